"""ZeRO: data parallelism that does not replicate everything n times.

    optimizer = ZeRO(model, comm, torch.optim.AdamW, stage=2, lr=1e-3)
    loss(model(x), y).backward(); optimizer.step(); optimizer.zero_grad()

In DDP every rank has the same optimizer state and makes the same step. Here each rank
steps only its shard, and gathers what the other ranks have stepped:

              sharded                          sent per step
    stage 1   optimizer state                  2(n-1)/n: gradients are reduce-scattered,
    stage 2   and gradients                              new parameters gathered
    stage 3   and parameters (as in FSDP)      3(n-1)/n: parameters are gathered twice

An all_reduce is a reduce_scatter and an all_gather, so stages 1 and 2 cost what DDP
costs. Shards are of flat buckets, not of parameters, and differ by one element at most,
whatever the parameters' sizes. To the inner optimizer, a rank's local shard of each
parameter is a parameter; any optimizer that works element by element can be used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.errors import BadArgument, UsageError
from unisono.parallel.common.agreement import setup_together
from unisono.parallel.common.clipping import clip_grad_norm_
from unisono.parallel.common.local_shard import (
    full_optimizer_state,
    load_full_optimizer_state,
)
from unisono.parallel.common.marking import forbid_assign
from unisono.parallel.common.module_state import sync_module_state, trainable_parameters
from unisono.parallel.common.optimizers import (
    is_comparable,
    refuse_closure,
    refuse_not_elementwise,
    refuse_other_parameters,
)
from unisono.parallel.data.buckets import MIB, fill_buckets
from unisono.parallel.data.compression import BucketCodec, Compression, dense
from unisono.parallel.sharded.fsdp import FSDP
from unisono.parallel.sharded.fsdp_policy import UnitPolicy
from unisono.parallel.sharded.zero_buckets import ZeroBuckets
from unisono.runtime.communicator import Communicator
from unisono.runtime.failing import fail_together

Groups = Iterable[dict[str, Any]]


class ZeRO(Optimizer):
    """An optimizer whose state, and more, is sharded over the ranks.

    `optimizer` is a class such as torch.optim.AdamW; `options` are for it. `groups` are
    parameter groups as torch has them, of the module's own parameters. `bucket_cap_mb`
    and `find_unused_parameters` are for stages 1 and 2, `units` for stage 3, as in DDP
    and FSDP. The module is used as it is, without a wrapper. `codec` compresses
    gradients, per bucket in stages 1 and 2 (a dense one in stage 3); `compression` has
    the error feedback of these codecs.
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
        units: UnitPolicy = None,
        reproducible: bool = False,
        codec: BucketCodec = None,
        **options: Any,
    ) -> None:
        """Begin with rank 0's parameters; a collective call."""
        self.module, self.comm, self.stage = module, comm, stage
        with setup_together(comm, "ZeRO") as settings:
            if stage not in (1, 2, 3):
                raise BadArgument(f"ZeRO: stage = {stage!r}: expected 1, 2 or 3")
            refuse_not_elementwise(optimizer, "ZeRO")
            named = trainable_parameters(module, "ZeRO")
            every = {"params": [p for _, p in named]}
            in_groups = [every] if groups is None else list(groups)
            refuse_other_parameters(in_groups, named, "ZeRO")
            first = fill_buckets(named[::-1], int(bucket_cap_mb * MIB))
            settings += [f"stage {stage}", f"bucket_cap_mb = {bucket_cap_mb}"]
            named_options = {"codec": codec, **options}.items()
            settings += [f"{k} = {v}" for k, v in named_options if is_comparable(v)]
        self._sharding: ZeroBuckets | FSDP
        if stage == 3:
            self._sharding = FSDP(
                module,
                comm,
                units=units,
                reduce_codec=dense(codec, "ZeRO, stage 3"),
                reproducible=reproducible,
            )
        else:
            sync_module_state(comm, module, "ZeRO")
            forbid_assign(module, "ZeRO")
            self._sharding = ZeroBuckets(
                module,
                comm,
                first,
                keep_grads=stage == 1,
                reproducible=reproducible,
                finds_unused=find_unused_parameters,
                codec=codec,
            )
        self.local_shards = [
            s for s in self._sharding.local_shards if s.param.requires_grad
        ]
        with setup_together(comm, "ZeRO"):  # it may refuse its options
            self.inner = optimizer(self._local_groups(in_groups, named), **options)
        super().__init__(self.inner.param_groups, self.inner.defaults)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def _local_groups(
        self, groups: list[dict[str, Any]], named: list[tuple[str, nn.Parameter]]
    ) -> list[dict[str, Any]]:
        names = {param: name for name, param in named}
        local = {s.name: s.param for s in self.local_shards}
        return [g | {"params": [local[names[p]] for p in g["params"]]} for g in groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step this rank's shard, and gather what the others have stepped."""
        with fail_together(self.comm, "an error: a closure"):
            refuse_closure(closure, "ZeRO")
        self.inner.step()
        if isinstance(self._sharding, ZeroBuckets):
            self._sharding.gather_parameters()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, those of `no_sync` too."""
        self.inner.zero_grad(set_to_none)
        for param in self.module.parameters():
            param.grad = None

    @property
    def compression(self) -> Compression | None:
        """The codecs of gradients, and their error feedback; None in stage 3."""
        sharding = self._sharding
        return sharding.compression if isinstance(sharding, ZeroBuckets) else None

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Full gradients accumulate on each rank; not in stage 2.

        There, call backward several times: averages accumulate in shards.
        """
        if self.stage == 2:
            raise UsageError(
                "ZeRO.no_sync: stage 2 keeps no full gradients to add to; call "
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
        return clip_grad_norm_(
            [s.param for s in self.local_shards], max_norm, norm_type
        )

    def model_state_dict(self) -> dict[str, Any]:
        """The module's state dict with full tensors, on every rank, in every stage."""
        if isinstance(self._sharding, FSDP):
            state: dict[str, Any] = self._sharding.state_dict()
            return state
        return self.module.state_dict()

    def load_model_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state dict with full tensors, saved by any number of ranks."""
        if isinstance(self._sharding, FSDP):
            self._sharding.load_state_dict(state)
        else:
            self.module.load_state_dict(state)

    def state_dict(self) -> dict[str, Any]:
        """The full state by the parameters' names, on every rank; a collective call.

        It can be loaded in a world of any size, and in any stage.
        """
        return full_optimizer_state(self.inner, self.local_shards)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load this rank's part of a full state; nothing is sent."""
        load_full_optimizer_state(self.inner, self.local_shards, state_dict)
