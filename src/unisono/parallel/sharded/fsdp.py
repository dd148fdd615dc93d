"""Fully sharded data parallelism: parameters, gradients and optimizer state in shards.

    model = FSDP(Gpt(), comm)                          # units: members of ModuleLists
    optimizer = torch.optim.AdamW(model.parameters())  # of this rank's local shards
    loss(model(x), y).backward(); optimizer.step()

A rank has full parameters only of the units that it computes with:

    forward    gather 1 | use 1, gather 2 | free 1, use 2, gather 3 | ...
    backward   gather 3 | use 3, gather 2 | reduce 3, free 3, use 2, gather 1 | ...

Gathering the next unit while this one computes is called prefetching; the next unit is
known from the step before; the first one can be gathered before the pass (`unshard`),
while the batch is loaded. A unit's gradients are reduce-scattered when all are there.

    memory per rank   (parameters + gradients + optimizer state) / n, and two units
    sent per step     3(n-1)/n of the parameters: gathered twice, reduced once
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves

from unisono.parallel.common.clipping import clip_grad_norm_
from unisono.parallel.common.flat import CPU, BufferPool, needs_grad
from unisono.parallel.common.local_shard import LocalShard
from unisono.parallel.common.marking import forbid_assign
from unisono.parallel.common.opaque import opaque
from unisono.parallel.sharded.fsdp_policy import UnitPolicy, agree_on_units
from unisono.parallel.sharded.fsdp_prefetch import (
    EarlyUnits,
    UnitOrder,
    after_each_step,
)
from unisono.parallel.sharded.fsdp_state import FullState
from unisono.parallel.sharded.fsdp_summon import full_parameters_installed
from unisono.parallel.sharded.fsdp_unit import FSDPUnit, UnitOptions
from unisono.parallel.sharded.step_check import (
    ShardVersions,
    explain_step_mismatch,
    reports_new_shards,
)
from unisono.runtime.communicator import Communicator
from unisono.runtime.failing import fail_together


class FSDP(FullState):
    """A module whose parameters are sharded over the ranks of `comm`.

    `units` selects what is gathered at a time: a function of (name, module), classes or
    modules in a collection, or None for the members of every ModuleList.
    `replicas`: another communicator, among ranks that have the same shard (hybrid
    sharding). `param_dtype` and `reduce_dtype`: the types to compute and to reduce in;
    shards and optimizer state keep their own type. `reshard_after_forward=False` keeps
    full parameters for backward: more memory, and only 2(n-1)/n is sent. `param_codec`
    and `reduce_codec`: codecs for gathered parameters and reduced gradients ("fp8", or
    "fp8@hosts" to encode only between hosts); shards stay exact. `prefetch="early"`
    calls `unshard` after every step of an optimizer; False gathers when a unit is used.
    """

    def __init__(
        self,
        module: nn.Module,
        comm: Communicator,
        *,
        units: UnitPolicy = None,
        replicas: Communicator | None = None,
        param_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        param_codec: str | None = None,
        reduce_codec: str | None = None,
        reshard_after_forward: bool = True,
        prefetch: bool | Literal["early"] = True,
        reproducible: bool = False,
    ) -> None:
        """Begin with rank 0's parameters; a collective call."""
        super().__init__()
        self.module, self.comm, self._replicas = module, comm, replicas
        settings = [f"param_dtype = {param_dtype}, reduce_dtype = {reduce_dtype}"]
        settings += [f"param_codec = {param_codec}, reduce_codec = {reduce_codec}"]
        settings += [f"reshard_after_forward = {reshard_after_forward}"]
        settings += [f"prefetch = {prefetch}"]
        specs = agree_on_units(module, units, comm, replicas, settings)
        forbid_assign(module, "FSDP")
        options = UnitOptions(
            comm=comm,
            replicas=replicas,
            param_dtype=param_dtype,
            reduce_dtype=reduce_dtype,
            reproducible=reproducible,
            param_codec=param_codec,
            reduce_codec=reduce_codec,
        )
        self._units = {part: FSDPUnit(name, m, options) for part, name, m in specs}
        self._reshards, self._prefetches = reshard_after_forward, bool(prefetch)
        self._early, self._sync = EarlyUnits(), True
        self._calls, self._versions = 0, ShardVersions()
        self._order = {"forward": UnitOrder(), "backward": UnitOrder()}
        self._backward = False
        self._in_flight: deque[FSDPUnit] = deque()
        largest = max((u.count * u.shard.itemsize for u in self.units), default=0)
        device = self.units[0].shard.device if self.units else CPU
        self._pool = BufferPool(comm, largest, self._finish_oldest, 2, device)
        module.register_forward_pre_hook(self._begin_forward)
        for part, unit in self._units.items():
            self._hook(part, unit)
        if prefetch == "early":
            after_each_step([s.param for s in self.local_shards], self.unshard)

    @property
    def units(self) -> list[FSDPUnit]:
        """The units, in the order of the module."""
        return list(self._units.values())

    @property
    def local_shards(self) -> list[LocalShard]:
        """This rank's elements of every parameter."""
        return [shard for unit in self.units for shard in unit.local_shards]

    def forward(self, *args: Any, **options: Any) -> Any:
        """The module's own forward pass."""
        return self.module(*args, **options)

    def unshard(self) -> None:
        """Begin to gather what the next forward pass uses first; a collective call.

        Call it after the optimizer's step, before the next batch is loaded. If shards
        change afterwards, forward gathers them again.
        """
        first = self._order["forward"].expected(2 if self._prefetches else 1)
        self._calls += 1  # labels are those of the coming pass
        for unit in first or self.units[:1]:
            if not self._early.valid(unit):
                unit.reshard()
                if unit is self.units[0]:
                    self._versions.check(unit.shard for unit in self.units)
                unit.unshard(self._gather_label(unit, "forward"))
                self._early.add(unit)
        self._calls -= 1

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Full gradients accumulate on each rank until the first backward outside."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip by the norm of the whole model's gradients; returns it."""
        mine = [shard.param for shard in self.local_shards]
        return clip_grad_norm_(mine, max_norm, norm_type, comm=self._replicas)

    # --- full parameters

    @contextmanager
    def summon(self, writeback: bool = True) -> Iterator[nn.Module]:
        """The module with full parameters on every rank, to read or to change.

        With `writeback`, each rank keeps its shard of the changed values.
        """
        with full_parameters_installed(self.units, writeback):
            yield self.module

    # --- forward

    def _hook(self, part: nn.Module, unit: FSDPUnit) -> None:
        part.register_forward_pre_hook(
            lambda _, args, options: self._before_unit(unit, args, options),
            with_kwargs=True,
        )
        part.register_forward_hook(lambda _, args, out: self._after_unit(unit, out))
        for i in unit.trainable:
            unit.full_params[i].register_post_accumulate_grad_hook(
                lambda _, i=i: self._grad_ready(unit, i)
            )

    def _label(self, what: str) -> str:
        return f"{what}, {('even', 'odd')[self._calls % 2]} step"

    @opaque
    def _begin_forward(self, module: nn.Module, args: Any) -> None:
        if self._recomputing():
            return
        self._backward = False  # an earlier pass may have failed
        for unit in self.units:
            unit.in_backward = False
            if not self._early.valid(unit):
                unit.reshard()  # gathered and not used, and perhaps before a step
        self._early.clear()
        self._calls += 1
        self._versions.check(unit.shard for unit in self.units)
        self._order["forward"].restart()

    def _recomputing(self) -> bool:
        """Whether this is forward within backward, for activation checkpointing."""
        return self._backward and torch._C._current_graph_task_id() != -1

    @opaque
    def _before_unit(self, unit: FSDPUnit, args: Any, options: Any) -> Any:
        """Before a unit's forward pass: gather it, and prefetch the next one."""
        self._gather(unit, "backward" if self._recomputing() else "forward")
        unit.install_full()
        args, options = unit.cast_inputs(args), unit.cast_inputs(options)
        if torch.is_grad_enabled() and not unit.in_backward:
            inputs = [t for t in tree_leaves((args, options)) if needs_grad(t)]
            if inputs:  # when they have gradients, the unit's backward is over
                register_multi_grad_hook(inputs, lambda _: self._unit_done(unit))
        return args, options

    @opaque
    def _after_unit(self, unit: FSDPUnit, output: Any) -> None:
        """After a unit's forward pass: free it, unless backward needs it now."""
        if unit.in_backward:
            return
        training = torch.is_grad_enabled()
        if self._reshards or not training:
            unit.reshard()
        if training:
            for leaf in tree_leaves(output):
                with fail_together(self.comm, "an error: opaque output"):
                    unit.check_output(leaf)
                if needs_grad(leaf):
                    leaf.register_hook(lambda _: self._begin_unit(unit))

    def _gather(self, unit: FSDPUnit, direction: str) -> None:
        """Gather a unit, and begin to gather the one that followed it last time."""
        unit.unshard(self._gather_label(unit, direction))
        following = self._order[direction].record(unit)
        with explain_step_mismatch("FSDP", reports_new_shards):
            unit.wait_unshard()
        if following is not None and self._prefetches:
            following.unshard(self._gather_label(following, direction))

    def _gather_label(self, unit: FSDPUnit, direction: str) -> str:
        """The first unit's label also says, once in a pass, whether shards are new."""
        first = direction == "forward" and unit is self.units[0]
        return self._label(direction) + (self._versions.label if first else "")

    # --- backward

    def _begin_unit(self, unit: FSDPUnit) -> None:
        """The unit's output has a gradient."""
        if not self._backward:
            self._backward = True
            self._order["backward"].restart()
            Variable._execution_engine.queue_callback(self._end_backward)
        if unit.in_backward:
            return
        unit.expect_grads()
        self._gather(unit, "backward")
        unit.install_full()  # parts of it may be computed again

    def _grad_ready(self, unit: FSDPUnit, i: int) -> None:
        """A full gradient is complete."""
        if not self._sync:
            unit.missing.discard(i)
            return
        unit.copy_grad(i, self._pool)
        if not unit.missing and not unit.reduced:
            self._reduce(unit)

    def _reduce(self, unit: FSDPUnit) -> None:
        unit.reduce_grads(self._pool, self._label("gradients"))
        self._in_flight.append(unit)

    def _unit_done(self, unit: FSDPUnit) -> None:
        """The unit's backward is over: its full parameters are not needed any more."""
        if unit.in_backward and not unit.missing:
            unit.reshard()

    def _finish_oldest(self) -> bool:
        if not self._in_flight:
            return False
        self._in_flight.popleft().finish_reduce(self._pool)
        return True

    def _end_backward(self) -> None:
        """Backward is over: reduce what is left, wait for all, free everything."""
        for unit in self.units:
            left = unit.in_backward and unit.trainable and not unit.reduced
            if self._sync and left:
                self._reduce(unit)
        while self._finish_oldest():
            pass
        for unit in self.units:
            unit.in_backward = False
            unit.reshard()
        self._backward = False
