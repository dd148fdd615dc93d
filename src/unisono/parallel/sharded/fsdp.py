"""Fully sharded data parallelism: parameters, gradients and optimizer state in shards.

    model = FSDP(Gpt(), comm)                          # units: the layers of its lists
    optimizer = torch.optim.AdamW(model.parameters())  # of this rank's pieces
    loss(model(x), y).backward(); optimizer.step()

A rank has whole parameters only of the units that it is computing with:

    forward    gather 1 | use 1, gather 2 | free 1, use 2, gather 3 | ...
    backward   gather 3 | use 3, gather 2 | reduce 3, free 3, use 2, gather 1 | ...

Gathering the next unit while this one computes is called prefetching; which one is next
is known from the step before. Gradients are reduce-scattered as each unit has them all.

    memory per rank   (parameters + gradients + optimizer state) / n, and two units
    sent per step     3(n-1)/n of the parameters: gathered twice, reduced once

Why not all_reduce, as in DDP? It is a reduce_scatter and an all_gather, and a rank that
steps only its share needs the second half for parameters, not for gradients.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves

from unisono.errors import BadArgument
from unisono.parallel.common.agreement import heard
from unisono.parallel.common.clipping import clip_grad_norm_
from unisono.parallel.common.flat import Pool, needs_grad
from unisono.parallel.common.placement import keep_parameters, refuse_assign
from unisono.parallel.data.compression import dense
from unisono.parallel.sharded.fsdp_policy import Rule, agreed_partition
from unisono.parallel.sharded.fsdp_unit import Order, Policy, Unit
from unisono.parallel.sharded.local_shard import (
    Piece,
    load_module_state,
    load_parameters,
    module_state,
)
from unisono.parallel.sharded.step_check import Updates, all_step, shows_new
from unisono.runtime.communicator import Communicator


class FSDP(nn.Module):
    """A module whose parameters are sharded over the ranks of `comm`.

    `units` says what is gathered at a time: a function of (name, module), a collection
    of module classes or of modules, or None for the members of every ModuleList.
    `replicas`: another communicator, among ranks that have the same shard (hybrid
    sharding). `param_dtype` and `reduce_dtype`: what is computed and reduced in, while
    shards and optimizer state keep their own type. `reshard_after_forward=False` keeps
    whole parameters for backward: more memory, and only 2(n-1)/n is sent. `param_codec`
    and `reduce_codec`: what parameters are gathered as and gradients reduced as ("fp8",
    or "fp8@hosts" to code only between hosts); shards stay exact.
    """

    def __init__(
        self,
        module: nn.Module,
        comm: Communicator,
        *,
        units: Rule = None,
        replicas: Communicator | None = None,
        param_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        param_codec: str | None = None,
        reduce_codec: str | None = None,
        reshard_after_forward: bool = True,
        prefetch: bool = True,
        reproducible: bool = False,
    ) -> None:
        """Begin with the first rank's parameters; all ranks together."""
        super().__init__()
        self.module, self.comm, self._replicas = module, comm, replicas
        told = [f"computed in {param_dtype}, reduced in {reduce_dtype}"]
        told.append(f"gathered by {param_codec}, reduced by {reduce_codec}")
        told.append(f"reshard_after_forward = {reshard_after_forward}")
        parts = agreed_partition(module, units, comm, replicas, told)
        keep_parameters(module, "FSDP")
        policy = Policy(
            *(comm, replicas, param_dtype, reduce_dtype, reproducible),
            *(dense(param_codec, "FSDP"), dense(reduce_codec, "FSDP")),
        )
        self._units = {part: Unit(name, m, policy) for part, name, m in parts}
        self._reshards, self._prefetches = reshard_after_forward, prefetch
        self._sync = True
        self._calls, self._updates = 0, Updates()
        self._order = {"forward": Order(), "backward": Order()}
        self._backward = False
        self._flying: deque[Unit] = deque()
        largest = max((u.count * u.shard.itemsize for u in self.units), default=0)
        self._pool = Pool(comm, largest, self._land_oldest, rooms=2)
        module.register_forward_pre_hook(self._begin_forward)
        for part, unit in self._units.items():
            self._hook(part, unit)

    @property
    def units(self) -> list[Unit]:
        """The units, in the order of the module."""
        return list(self._units.values())

    @property
    def pieces(self) -> list[Piece]:
        """What this rank has of every parameter."""
        return [piece for unit in self.units for piece in unit.pieces]

    def forward(self, *args: Any, **options: Any) -> Any:
        """The module's own forward pass."""
        return self.module(*args, **options)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Whole gradients add up on each rank until the first backward outside."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip by the norm of the whole model's gradients; returns it."""
        mine = [piece.param for piece in self.pieces]
        return clip_grad_norm_(mine, max_norm, norm_type, comm=self._replicas)

    # --- whole parameters for people and files

    @contextmanager
    def summon(self, writeback: bool = True) -> Iterator[nn.Module]:
        """The module with whole parameters on every rank, to look at or to change.

        With `writeback`, each rank keeps its share of what they are changed to.
        """
        wholes = [
            [nn.Parameter(p.whole(p.param), p.param.requires_grad) for p in unit.pieces]
            for unit in self.units
        ]
        for unit, params in zip(self.units, wholes, strict=True):
            unit.put(params)
        try:
            yield self.module
        finally:
            for unit, params in zip(self.units, wholes, strict=True):
                if writeback:
                    named = zip(unit.pieces, params, strict=True)
                    load_parameters(unit.pieces, {p.name: w for p, w in named})
                unit.free()

    def state_dict(self, *args: Any, **options: Any) -> Any:
        """A plain state dict: whole tensors by the module's own names, on every rank.

        All ranks call it together.
        """
        if args or options.get("prefix"):
            with heard(self.comm, "an error: state_dict"):
                raise BadArgument("FSDP.state_dict: takes no destination and no prefix")
        return module_state(self.module, self.pieces)

    def load_state_dict(
        self, state: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Take this rank's part of a plain state dict; nothing is sent."""
        if assign:
            refuse_assign("FSDP")
        return load_module_state(self.module, self.pieces, state, strict=strict)

    # --- forward

    def _hook(self, part: nn.Module, unit: Unit) -> None:
        part.register_forward_pre_hook(
            lambda _, args, options: self._enter(unit, args, options),
            with_kwargs=True,
        )
        part.register_forward_hook(lambda _, args, out: self._leave(unit, out))
        for i in unit.trainable:
            unit.wholes[i].register_post_accumulate_grad_hook(
                lambda _, i=i: self._arrived(unit, i)
            )

    def _label(self, what: str) -> str:
        return f"{what}, {('even', 'odd')[self._calls % 2]} step"

    def _begin_forward(self, module: nn.Module, args: Any) -> None:
        if self._recomputing():
            return
        self._backward = False  # whatever an earlier pass left when it failed
        for unit in self.units:
            unit.in_backward = False
            unit.free()  # gathered for nothing, and perhaps before a step
        self._calls += 1
        self._updates.look(unit.shard for unit in self.units)
        self._order["forward"].restart()

    def _recomputing(self) -> bool:
        """Whether this is forward within backward, for activation checkpointing."""
        return self._backward and torch._C._current_graph_task_id() != -1

    def _enter(self, unit: Unit, args: Any, options: Any) -> Any:
        """Before a unit's forward pass: have it whole, and the next one coming."""
        self._bring(unit, "backward" if self._recomputing() else "forward")
        unit.use()
        args, options = unit.cast(args), unit.cast(options)
        if torch.is_grad_enabled() and not unit.in_backward:
            inputs = [t for t in tree_leaves((args, options)) if needs_grad(t)]
            if inputs:  # backward has left the unit when these have their gradients
                register_multi_grad_hook(inputs, lambda _: self._passed(unit))
        return args, options

    def _leave(self, unit: Unit, output: Any) -> None:
        """After it: free it, unless backward is waiting for it."""
        if unit.in_backward:
            return
        learning = torch.is_grad_enabled()
        if self._reshards or not learning:
            unit.free()
        if learning:
            for leaf in tree_leaves(output):
                with heard(self.comm, "an error: opaque output"):
                    unit.refuse_opaque(leaf)
                if needs_grad(leaf):
                    leaf.register_hook(lambda _: self._begin_unit(unit))

    def _bring(self, unit: Unit, way: str) -> None:
        """Gather a unit now, and begin with the one that came after it last time."""
        unit.gather(self._labelled(unit, way))
        after = self._order[way].after(unit)
        with all_step("FSDP", shows_new):
            unit.wait()
        if after is not None and self._prefetches:
            after.gather(self._labelled(after, way))

    def _labelled(self, unit: Unit, way: str) -> str:
        """Of the first unit it also tells, once in a pass, whether shards are new."""
        first = way == "forward" and unit is self.units[0]
        return self._label(way) + (self._updates.told if first else "")

    # --- backward

    def _begin_unit(self, unit: Unit) -> None:
        """A gradient has come to the unit's output."""
        if not self._backward:
            self._backward = True
            self._order["backward"].restart()
            Variable._execution_engine.queue_callback(self._end_backward)
        if unit.in_backward:
            return
        unit.expect_grads()
        self._bring(unit, "backward")
        unit.use()  # parts of it may be computed again

    def _arrived(self, unit: Unit, i: int) -> None:
        """A whole gradient is complete."""
        if not self._sync:
            unit.missing.discard(i)
            return
        unit.take_grad(i, self._pool)
        if not unit.missing and not unit.reduced:
            self._reduce(unit)

    def _reduce(self, unit: Unit) -> None:
        unit.reduce(self._pool, self._label("gradients"))
        self._flying.append(unit)

    def _passed(self, unit: Unit) -> None:
        """Backward has left the unit: nothing needs its whole parameters any more."""
        if unit.in_backward and not unit.missing:
            unit.free()

    def _land_oldest(self) -> bool:
        if self._flying:
            self._flying.popleft().land(self._pool)
            return True
        return False

    def _end_backward(self) -> None:
        """Backward is over: reduce what is left, wait for all, free everything."""
        for unit in self.units:
            left = unit.in_backward and unit.trainable and not unit.reduced
            if self._sync and left:
                self._reduce(unit)
        while self._land_oldest():
            pass
        for unit in self.units:
            unit.in_backward = False
            unit.free()
        self._backward = False
