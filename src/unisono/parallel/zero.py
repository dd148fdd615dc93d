"""ZeRO: data parallelism without keeping everything n times over.

    optimizer = ZeRO(model, comm, torch.optim.AdamW, stage=2, lr=1e-3)
    loss(model(x), y).backward(); optimizer.step(); optimizer.zero_grad()

In DDP every rank has the same optimizer state and makes the same step. Here each rank
steps only its share, and what the others need of it they gather:

              sharded                          sent per step
    stage 1   optimizer state                  2(n-1)/n: gradients are reduce-scattered,
    stage 2   and gradients                              new parameters gathered
    stage 3   and parameters (as in FSDP)      3(n-1)/n: parameters are gathered twice

An all_reduce is just such a reduce_scatter and all_gather; so stages 1 and 2 cost what
DDP costs. The shares are of flat buckets, not of parameters, and differ by one element
at most, whatever the parameters' sizes. To the inner optimizer, a rank's piece of each
parameter is a parameter; any that works element by element will do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.errors import BadArgument, UsageError
from unisono.parallel.buckets import MIB, Bucket, Buckets, fill
from unisono.parallel.flat import (
    Pool,
    counts_of,
    room,
    same_start,
    share,
    trainable,
    views,
)
from unisono.parallel.fsdp import FSDP
from unisono.parallel.partition import Rule
from unisono.parallel.pieces import (
    Piece,
    clip_grad_norm,
    counts_in,
    load_optimizer_state,
    optimizer_state,
    refuse_closure,
    refuse_whole,
)
from unisono.runtime.communicator import Communicator

Groups = Iterable[dict[str, Any]]


class ZeRO(Optimizer):
    """An optimizer whose state, and more, is sharded over the ranks.

    `optimizer` is a class such as torch.optim.AdamW; `options` are for it. `groups` are
    parameter groups as torch has them, of the module's own parameters. `bucket_cap_mb`
    and `find_unused_parameters` are for stages 1 and 2, `units` for stage 3, as in DDP
    and FSDP. The module is used as it is, without a wrapper.
    """

    def __init__(
        self,
        module: nn.Module,
        comm: Communicator,
        optimizer: Callable[..., Optimizer],
        *,
        stage: int = 2,
        groups: Groups | None = None,
        bucket_cap_mb: float = 25.0,
        find_unused_parameters: bool = False,
        units: Rule = None,
        reproducible: bool = False,
        **options: Any,
    ) -> None:
        """Begin with the first rank's parameters; all ranks together."""
        if stage not in (1, 2, 3):
            raise BadArgument(f"ZeRO: stage = {stage!r}: expected 1, 2 or 3")
        refuse_whole(optimizer, "ZeRO")
        self.module, self.comm, self.stage = module, comm, stage
        named = trainable(module, "ZeRO")
        told = [{"params": [p for _, p in named]}] if groups is None else list(groups)
        self._sharding: _Flat | FSDP
        if stage == 3:
            self._sharding = FSDP(module, comm, units=units, reproducible=reproducible)
        else:
            same_start(comm, module, "ZeRO")
            self._sharding = _Flat(
                module,
                comm,
                fill(named[::-1], int(bucket_cap_mb * MIB)),
                keeps=stage == 1,
                reproducible=reproducible,
                finds_unused=find_unused_parameters,
            )
        self.pieces = [p for p in self._sharding.pieces if p.param.requires_grad]
        self.inner = optimizer(self._in_pieces(told, named), **options)
        super().__init__(self.inner.param_groups, self.inner.defaults)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def _in_pieces(
        self, groups: list[dict[str, Any]], named: list[tuple[str, nn.Parameter]]
    ) -> list[dict[str, Any]]:
        names = {param: name for name, param in named}
        piece = {p.name: p.param for p in self.pieces}
        strangers = [p for g in groups for p in g["params"] if p not in names]
        if strangers:
            raise BadArgument(
                f"ZeRO: groups have {len(strangers)} tensors that are not trainable "
                "parameters of the module"
            )
        return [g | {"params": [piece[names[p]] for p in g["params"]]} for g in groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step this rank's share, and gather what the others have stepped."""
        refuse_closure(closure, "ZeRO")
        self.inner.step()
        if isinstance(self._sharding, _Flat):
            self._sharding.gather()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, those of `no_sync` too."""
        self.inner.zero_grad(set_to_none)
        for param in self.module.parameters():
            param.grad = None

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients add up on each rank by itself, whole: not in stage 2.

        There, call backward several times: the averages add up in shards.
        """
        if self.stage == 2:
            raise UsageError(
                "ZeRO.no_sync: stage 2 keeps no whole gradients to add to; call "
                "backward several times without it, or take stage 1"
            )
        if isinstance(self._sharding, FSDP):
            with self._sharding.no_sync():
                yield
            return
        buckets = self._sharding.buckets
        before, buckets.sync = buckets.sync, False
        try:
            yield
        finally:
            buckets.sync = before

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip by the norm of all gradients together; returns it."""
        return clip_grad_norm(self.pieces, self.comm, max_norm, norm_type)

    def model_state_dict(self) -> dict[str, Any]:
        """The module's plain state dict, whole, on every rank, in every stage."""
        if isinstance(self._sharding, FSDP):
            state: dict[str, Any] = self._sharding.state_dict()
            return state
        return self.module.state_dict()

    def load_model_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a plain state dict, of however many ranks."""
        if isinstance(self._sharding, FSDP):
            self._sharding.load_state_dict(state)
        else:
            self.module.load_state_dict(state)

    def state_dict(self) -> dict[str, Any]:
        """The whole state by the parameters' names, on every rank: all call it.

        It can be loaded in a world of any size, and in any stage.
        """
        return optimizer_state(self.inner, self.pieces)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take this rank's part of a whole state; nothing is sent."""
        load_optimizer_state(self.inner, self.pieces, state_dict)


class _Flat:
    """Stages 1 and 2: whole parameters in flat buckets, of which a share is stepped."""

    def __init__(
        self,
        module: nn.Module,
        comm: Communicator,
        buckets: list[Bucket],
        *,
        keeps: bool,
        reproducible: bool,
        finds_unused: bool,
    ) -> None:
        self.comm, self._keeps, self._reproducible = comm, keeps, reproducible
        self._flying: deque[Bucket] = deque()
        self._flat: list[Tensor] = []
        self.pieces: list[Piece] = []
        self._places: list[list[tuple[Piece, slice]]] = []
        for bucket in buckets:
            self._take_over(bucket)
        self.buckets = Buckets(
            buckets,
            launch=self._launch,
            land=self._land_all,
            take=self._take,
            finds_unused=finds_unused,
            keeps_grads=False,
        )
        largest = max((b.count * b.dtype.itemsize for b in buckets), default=0)
        self._pool = Pool(comm, largest, self._land_oldest, rooms=2)
        module.register_forward_hook(lambda _, args, out: self.buckets.watch(out))

    def _take_over(self, bucket: Bucket) -> None:
        """Let the parameters live in one flat tensor, and cut this rank's share."""
        flat = room(self.comm, bucket.count, bucket.dtype)
        self._flat.append(flat)
        for param, view in zip(bucket.params, views(flat, bucket.params), strict=True):
            param.data = view.copy_(param.detach())
        if self._keeps:
            bucket.settle(room(self.comm, bucket.count, bucket.dtype))
        lower, upper = share(bucket.count, self.comm)
        places: list[tuple[Piece, slice]] = []
        for i, (begin, end) in enumerate(pairwise(bucket.begins)):
            first = min(max(begin, lower), upper)
            last = max(min(end, upper), first)
            counts = counts_in(begin, end, bucket.count, self.comm.world_size)
            param = nn.Parameter(flat[first:last])
            shape = bucket.params[i].shape
            piece = Piece(bucket.names[i], param, shape, counts, self.comm)
            places.append((piece, slice(first - lower, last - lower)))
        self._places.append(places)
        self.pieces += [piece for piece, _ in places]

    def _take(self, bucket: Bucket) -> None:
        bucket.settle(self._pool.take(bucket.count, bucket.dtype))

    def _launch(self, bucket: Bucket) -> None:
        """Average a full bucket; this rank gets its share, in its place."""
        assert bucket.data is not None
        lower, upper = share(bucket.count, self.comm)
        bucket.work = self.comm.reduce_scatter(
            bucket.data,
            op="mean",
            out=bucket.data[lower:upper],
            counts=counts_of(bucket.count, self.comm.world_size),
            async_op=True,
            reproducible=self._reproducible,
            label=f"bucket {bucket.number}, {self.buckets.parity()} step",
        )
        self._flying.append(bucket)

    def _land_oldest(self) -> bool:
        """Wait for a bucket and add its share to the pieces' gradients."""
        if not self._flying:
            return False
        bucket = self._flying.popleft()
        assert bucket.work is not None
        assert bucket.data is not None
        bucket.work.wait()
        lower, upper = share(bucket.count, self.comm)
        mine = bucket.data[lower:upper].clone()
        for piece, place in self._places[bucket.number]:
            if piece.param.grad is None:
                piece.param.grad = mine[place]
            else:
                piece.param.grad.add_(mine[place])
        if not self._keeps:
            self._pool.bring_back(bucket.data)
            bucket.data = None
        return True

    def _land_all(self, buckets: list[Bucket]) -> None:
        while self._land_oldest():
            pass

    def gather(self) -> None:
        """Give everybody what this rank has stepped."""
        works = []
        for number, flat in enumerate(self._flat):
            lower, upper = share(flat.numel(), self.comm)
            work = self.comm.all_gather(
                flat[lower:upper],
                out=flat,
                counts=counts_of(flat.numel(), self.comm.world_size),
                async_op=True,
                label=f"parameters of bucket {number}",
            )
            works.append(work)
        for work in works:
            work.wait()
