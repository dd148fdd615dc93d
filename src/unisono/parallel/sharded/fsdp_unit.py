"""An FSDP unit: parameters that are gathered, used and freed together.

Between uses a rank has its shard of the unit's flat parameter, in shared memory; the
optimizer sees local shards of the parameters, which are views of it. For a use, the
shards of all ranks are gathered into the flat parameter; full parameters are views of
it and replace the local shards in the module. Freeing releases the memory under these
views and keeps the views: tensors that autograd saved in forward are valid again in
backward, once the unit is gathered again.

    shard        | this rank's elements |     always there, float32
    flat_param   | weight | bias | ...  |     gathered, used, freed
    grads        | weight | bias | ...  |     filled by backward, reduce-scattered
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from unisono.errors import BadArgument, UsageError
from unisono.parallel.common.flat import (
    BufferPool,
    ReleasableBuffer,
    offsets,
    shared_zeros,
    views,
)
from unisono.parallel.common.local_shard import LocalShard
from unisono.parallel.common.marking import mark_sharded
from unisono.parallel.common.shard_math import (
    overlap_sizes,
    shard_bounds,
    uneven_counts,
)
from unisono.parallel.data.compression import begin_coded, dense
from unisono.runtime.call.work import Work
from unisono.runtime.communicator import Communicator

_TRANSPARENT = (Tensor, int, float, complex, str, bytes, type(None))


@dataclass
class UnitParameter:
    """A parameter and where modules refer to it: (module, name there)."""

    name: str
    param: nn.Parameter
    places: list[tuple[nn.Module, str]]


def refuse_mixed_types(name: str, members: list[UnitParameter]) -> None:
    """Parameters of one unit are gathered in one message, so they have one type."""
    types = {m.param.dtype for m in members}
    if len(types) > 1:
        listed = ", ".join(sorted(str(t) for t in types))
        raise BadArgument(
            f"FSDP: the unit {name or 'root'} has parameters of {listed}; give them "
            "one type, or make units of one type each"
        )


@dataclass(frozen=True)
class UnitOptions:
    """How units compute and communicate; the same for all."""

    comm: Communicator
    replicas: Communicator | None = None
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    reproducible: bool = False
    param_codec: str | None = None
    reduce_codec: str | None = None

    def __post_init__(self) -> None:
        """Refuse codecs with error feedback."""
        dense(self.param_codec, "FSDP")
        dense(self.reduce_codec, "FSDP")


class FSDPUnit:
    """One unit: it implements gathering and reducing; FSDP decides when."""

    def __init__(
        self, name: str, members: list[UnitParameter], options: UnitOptions
    ) -> None:
        """Shard the parameters: the module has local shards of them from now on."""
        self.name = name or "root"
        self.members, self._options = members, options
        self.comm = options.comm
        params = [m.param for m in members]
        self.begins = offsets(params)
        self.count = self.begins[-1]
        self.counts = uneven_counts(self.count, self.comm.world_size)
        self.lower, self.upper = shard_bounds(self.count, self.comm)
        self.unsharded = self.in_backward = self.reduced = False
        self.missing: set[int] = set()
        self.grads: Tensor | None = None
        self._gathering: Work | None = None
        self._reducing: Work | None = None
        self._make_shards(params)
        self._make_full_params(params)
        for param in params:  # other references to them keep no memory alive
            param.data = param.data.new_empty(0)
        self.reshard()

    def _make_shards(self, params: list[nn.Parameter]) -> None:
        """This rank's shard of the flat parameter, and local shards as views of it."""
        size = self.upper - self.lower
        self.shard = shared_zeros(self.comm, size, params[0].dtype, params[0].device)
        self.shard_grad: Tensor | None = None
        self.local_shards: list[LocalShard] = []
        self._spans: list[slice] = []
        for i, (member, begin) in enumerate(
            zip(self.members, self.begins, strict=False)
        ):
            first = min(max(begin - self.lower, 0), size)
            last = max(min(self.begins[i + 1] - self.lower, size), first)
            data = self.shard[first:last]
            flat = member.param.detach().reshape(-1)
            skipped = max(self.lower - begin, 0)
            data.copy_(flat[skipped : skipped + last - first])
            local = nn.Parameter(data, requires_grad=member.param.requires_grad)
            mark_sharded(local, self.comm, of=member.param)
            n = self.comm.world_size
            counts = overlap_sizes(begin, self.begins[i + 1], self.count, n)
            shape = member.param.shape
            self.local_shards.append(
                LocalShard(member.name, local, shape, counts, self.comm)
            )
            self._spans.append(slice(first, last))

    def _make_full_params(self, params: list[nn.Parameter]) -> None:
        """Full parameters, as views of memory that is released between uses."""
        dtype = self._options.param_dtype or params[0].dtype
        self._memory = ReleasableBuffer(self.count, dtype, params[0].device)
        self.flat_param = self._memory.tensor
        self.full_params = [
            nn.Parameter(view, requires_grad=p.requires_grad)
            for view, p in zip(views(self.flat_param, params), params, strict=True)
        ]
        for full, param in zip(self.full_params, params, strict=True):
            # Other strategies' gradient hooks, as those of sequence parallelism.
            for hook in (param._backward_hooks or {}).values():
                full.register_hook(hook)

    @property
    def trainable(self) -> list[int]:
        """Which of the parameters get gradients."""
        return [i for i, m in enumerate(self.members) if m.param.requires_grad]

    # --- parameters

    def unshard(self, label: str) -> None:
        """Begin to gather the full parameters, unless that has been done."""
        if self.unsharded:
            return
        self.unsharded = True
        self._memory.claim()
        codec, label = self._options.param_codec, f"{self.name} {label}"
        self._gathering = begin_coded(
            *(self.flat_param, codec, f"all_gather({label})"),
            lambda whole: self.comm.all_gather(
                self.shard.to(whole),
                out=whole,
                counts=self.counts,
                async_op=True,
                codec=codec,
                label=label,
            ),
        )

    def wait_unshard(self) -> None:
        """Wait for what `unshard` began."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None

    def install_full(self) -> None:
        """Wait for the full parameters and put them into the module."""
        self.wait_unshard()
        self.install(self.full_params)

    def reshard(self) -> None:
        """Put the local shards back, and release the memory of the full parameters."""
        self.wait_unshard()
        self.install([shard.param for shard in self.local_shards])
        if self.unsharded:
            self._memory.release()
        self.unsharded = False

    def install(self, params: list[nn.Parameter]) -> None:
        """Put these into the module: full parameters, or local shards."""
        for member, param in zip(self.members, params, strict=True):
            for module, name in member.places:
                module._parameters[name] = param

    def cast_inputs(self, inputs: Any) -> Any:
        """The inputs with their floats in `param_dtype`, if there is one."""
        dtype = self._options.param_dtype
        if dtype is None:
            return inputs
        return tree_map(
            lambda x: (
                x.to(dtype) if torch.is_tensor(x) and x.is_floating_point() else x
            ),
            inputs,
        )

    def check_output(self, output: object) -> None:
        """Raise if tensors in the output cannot be found: they start backward."""
        if self.trainable and not isinstance(output, _TRANSPARENT):
            raise UsageError(
                f"FSDP: the unit {self.name} returns a {type(output).__name__}; return "
                "tensors in tuples, lists or dicts, or register it with torch's pytree"
            )

    # --- gradients

    def expect_grads(self) -> None:
        """A backward pass begins: no gradient is complete."""
        self.in_backward, self.reduced = True, False
        self.missing = set(self.trainable)

    @torch.no_grad()
    def copy_grad(self, i: int, pool: BufferPool) -> None:
        """Move a full gradient into the flat gradients, in the type to reduce in."""
        if self.grads is None:
            dtype = self._options.reduce_dtype or self.flat_param.dtype
            self.grads = pool.acquire(self.count, dtype)
        view = self.grads[self.begins[i] : self.begins[i + 1]]
        grad = self.full_params[i].grad
        if grad is None:
            view.zero_()
        else:
            view.copy_(grad.reshape(-1))
        self.full_params[i].grad = None
        self.missing.discard(i)

    def reduce_grads(self, pool: BufferPool, label: str) -> None:
        """Begin to average the gradients; each rank gets its shard, in place."""
        for i in set(range(len(self.members))) - set(self.trainable) | self.missing:
            self.copy_grad(i, pool)
        assert self.grads is not None
        self.reduced = True
        codec, label = self._options.reduce_codec, f"{self.name} {label}"
        self._reducing = begin_coded(
            *(self.grads, codec, f"reduce_scatter({label})"),
            lambda grads: self.comm.reduce_scatter(
                grads,
                op="mean",
                out=grads[self.lower : self.upper],
                counts=self.counts,
                async_op=True,
                reproducible=self._options.reproducible,
                codec=codec,
                label=label,
            ),
        )

    @torch.no_grad()
    def finish_reduce(self, pool: BufferPool) -> None:
        """Wait for the average and add it to the local shards' gradients."""
        if self._reducing is None:
            return
        self._reducing.wait()
        self._reducing = None
        assert self.grads is not None
        mine = self.grads[self.lower : self.upper]
        if (replicas := self._options.replicas) is not None:
            exact, codec = self._options.reproducible, self._options.reduce_codec
            begin_coded(
                *(mine, codec, f"all_reduce({self.name})"),
                lambda grads: replicas.all_reduce(
                    grads, op="mean", async_op=True, reproducible=exact, codec=codec
                ),
            ).wait()
        self._add_to_shards(mine)
        pool.release(self.grads)
        self.grads = None

    def _add_to_shards(self, mine: Tensor) -> None:
        if self.shard_grad is None:
            self.shard_grad = torch.empty_like(self.shard)
        fresh = all(shard.param.grad is None for shard in self.local_shards)
        if fresh:  # the usual case: one copy for all of them
            self.shard_grad.copy_(mine)
        for i in self.trainable:
            local, span = self.local_shards[i].param, self._spans[i]
            if local.grad is not None:
                local.grad.add_(mine[span])
            else:
                view = self.shard_grad[span]
                local.grad = view if fresh else view.copy_(mine[span])
