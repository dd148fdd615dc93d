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

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.errors import BadArgument, UsageError
from unisono.parallel.common.agreement import heard, prepared
from unisono.parallel.common.clipping import clip_grad_norm_
from unisono.parallel.common.flat import same_start, trainable
from unisono.parallel.common.placement import keep_parameters
from unisono.parallel.data.buckets import MIB, fill
from unisono.parallel.data.compression import Compression, PerBucket, dense
from unisono.parallel.sharded.fsdp import FSDP
from unisono.parallel.sharded.fsdp_policy import Rule
from unisono.parallel.sharded.local_shard import (
    is_plain,
    load_optimizer_state,
    optimizer_state,
    refuse_closure,
    refuse_strangers,
    refuse_whole,
)
from unisono.parallel.sharded.zero_buckets import Shares
from unisono.runtime.communicator import Communicator

Groups = Iterable[dict[str, Any]]


class ZeRO(Optimizer):
    """An optimizer whose state, and more, is sharded over the ranks.

    `optimizer` is a class such as torch.optim.AdamW; `options` are for it. `groups` are
    parameter groups as torch has them, of the module's own parameters. `bucket_cap_mb`
    and `find_unused_parameters` are for stages 1 and 2, `units` for stage 3, as in DDP
    and FSDP. The module is used as it is, without a wrapper. `codec` is what gradients
    travel as, per bucket in stages 1 and 2 (a dense one in stage 3); `compression` is
    what that remembers.
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
        codec: PerBucket = None,
        **options: Any,
    ) -> None:
        """Begin with the first rank's parameters; all ranks together."""
        self.module, self.comm, self.stage = module, comm, stage
        with prepared(comm, "ZeRO") as told:
            if stage not in (1, 2, 3):
                raise BadArgument(f"ZeRO: stage = {stage!r}: expected 1, 2 or 3")
            refuse_whole(optimizer, "ZeRO")
            named = trainable(module, "ZeRO")
            every = {"params": [p for _, p in named]}
            in_groups = [every] if groups is None else list(groups)
            refuse_strangers(in_groups, named)
            first = fill(named[::-1], int(bucket_cap_mb * MIB))
            told += [f"stage {stage}", f"bucket_cap_mb = {bucket_cap_mb}"]
            named_options = {"codec": codec, **options}.items()
            told += [f"{k} = {v}" for k, v in named_options if is_plain(v)]
        self._sharding: Shares | FSDP
        if stage == 3:
            self._sharding = FSDP(
                *(module, comm),
                units=units,
                reduce_codec=dense(codec, "ZeRO, stage 3"),
                reproducible=reproducible,
            )
        else:
            same_start(comm, module, "ZeRO")
            keep_parameters(module, "ZeRO")
            self._sharding = Shares(
                module,
                comm,
                first,
                keeps=stage == 1,
                reproducible=reproducible,
                finds_unused=find_unused_parameters,
                codec=codec,
            )
        self.pieces = [p for p in self._sharding.pieces if p.param.requires_grad]
        with prepared(comm, "ZeRO"):  # it may refuse its options
            self.inner = optimizer(self._in_pieces(in_groups, named), **options)
        super().__init__(self.inner.param_groups, self.inner.defaults)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def _in_pieces(
        self, groups: list[dict[str, Any]], named: list[tuple[str, nn.Parameter]]
    ) -> list[dict[str, Any]]:
        names = {param: name for name, param in named}
        piece = {p.name: p.param for p in self.pieces}
        return [g | {"params": [piece[names[p]] for p in g["params"]]} for g in groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step this rank's share, and gather what the others have stepped."""
        with heard(self.comm, "an error: a closure"):
            refuse_closure(closure, "ZeRO")
        self.inner.step()
        if isinstance(self._sharding, Shares):
            self._sharding.gather()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, those of `no_sync` too."""
        self.inner.zero_grad(set_to_none)
        for param in self.module.parameters():
            param.grad = None

    @property
    def compression(self) -> Compression | None:
        """What gradients travel as, and what that remembers; None in stage 3."""
        found = self._sharding
        return found.compression if isinstance(found, Shares) else None

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
        """Clip by the norm of the whole model's gradients; returns it."""
        return clip_grad_norm_([p.param for p in self.pieces], max_norm, norm_type)

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
