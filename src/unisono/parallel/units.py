"""A unit of FSDP: parameters that are gathered, used and freed together.

Between uses a rank has its share of the unit, one flat tensor in shared memory, of
which the optimizer sees pieces. For a use, the shares of all ranks are gathered into
another flat tensor; whole parameters are views of it and take the pieces' places in
the module. Freeing takes the memory from under these views and leaves the views: what
autograd has saved of them in forward is there again in backward, once it is gathered.

    shard   | rank's share |                 always there, float32
    full    | weight | bias | ...  |         gathered, used, freed
    grads   | weight | bias | ...  |         filled by backward, reduce-scattered
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from unisono.errors import BadArgument, UsageError
from unisono.parallel.apart import keep_apart
from unisono.parallel.flat import Lapsing, Pool, counts_of, offsets, room, share, views
from unisono.parallel.pieces import Piece, counts_in
from unisono.runtime.call.work import Work
from unisono.runtime.communicator import Communicator

_TRANSPARENT = (Tensor, int, float, complex, str, bytes, type(None))


@dataclass
class Member:
    """A parameter and all places where it stands: (module, name there)."""

    name: str
    param: nn.Parameter
    places: list[tuple[nn.Module, str]]


def refuse_mixed(name: str, members: list[Member]) -> None:
    """Parameters of one unit are gathered in one message, so they have one type."""
    types = {m.param.dtype for m in members}
    if len(types) > 1:
        told = ", ".join(sorted(str(t) for t in types))
        raise BadArgument(
            f"FSDP: the unit {name or 'root'} has parameters of {told}; give them one "
            "type, or make units of one type each"
        )


@dataclass(frozen=True)
class Policy:
    """How units compute and communicate; the same for all."""

    comm: Communicator
    replicas: Communicator | None = None
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    reproducible: bool = False
    param_codec: str | None = None
    reduce_codec: str | None = None


class Unit:
    """One unit. It knows how to gather and reduce, not when."""

    def __init__(self, name: str, members: list[Member], policy: Policy) -> None:
        """Take the parameters over: the module has pieces of them from now on."""
        self.name = name or "root"
        self.members, self._how = members, policy
        self.comm = policy.comm
        params = [m.param for m in members]
        self.begins = offsets(params)
        self.count = self.begins[-1]
        self.counts = counts_of(self.count, self.comm.world_size)
        self.lower, self.upper = share(self.count, self.comm)
        self.gathered = self.in_use = self.in_backward = self.reduced = False
        self.missing: set[int] = set()
        self.grads: Tensor | None = None
        self._gathering: Work | None = None
        self._reducing: Work | None = None
        self._cut(params)
        self._make_full(params)
        for param in params:  # whoever still knows them keeps no memory by that
            param.data = param.data.new_empty(0)
        self.free()

    def _cut(self, params: list[nn.Parameter]) -> None:
        """The share of this rank, and the pieces that it consists of."""
        size = self.upper - self.lower
        self.shard = room(self.comm, size, params[0].dtype)
        self.shard_grad: Tensor | None = None
        self.pieces: list[Piece] = []
        self._spans: list[slice] = []
        for i, (member, begin) in enumerate(
            zip(self.members, self.begins, strict=False)
        ):
            first = min(max(begin - self.lower, 0), size)
            last = max(min(self.begins[i + 1] - self.lower, size), first)
            data = self.shard[first:last]
            whole = member.param.detach().reshape(-1)
            skipped = max(self.lower - begin, 0)
            data.copy_(whole[skipped : skipped + last - first])
            piece = nn.Parameter(data, requires_grad=member.param.requires_grad)
            keep_apart(piece, self.comm, of=member.param)
            n = self.comm.world_size
            counts = counts_in(begin, self.begins[i + 1], self.count, n)
            shape = member.param.shape
            self.pieces.append(Piece(member.name, piece, shape, counts, self.comm))
            self._spans.append(slice(first, last))

    def _make_full(self, params: list[nn.Parameter]) -> None:
        """Whole parameters, as views of memory that comes and goes."""
        dtype = self._how.param_dtype or params[0].dtype
        self._memory = Lapsing(self.count, dtype)
        self.full = self._memory.tensor
        self.wholes = [
            nn.Parameter(view, requires_grad=p.requires_grad)
            for view, p in zip(views(self.full, params), params, strict=True)
        ]
        for whole, param in zip(self.wholes, params, strict=True):
            # What other strategies do with its gradient, as along a sequence.
            for hook in (param._backward_hooks or {}).values():
                whole.register_hook(hook)

    @property
    def trainable(self) -> list[int]:
        """Which of the parameters get gradients."""
        return [i for i, m in enumerate(self.members) if m.param.requires_grad]

    # --- parameters

    def gather(self, label: str) -> None:
        """Begin to gather the whole parameters, unless that has been done."""
        if self.gathered:
            return
        self.gathered = True
        self._gathering = self.comm.all_gather(
            self.shard.to(self.full.dtype),
            out=self.full,
            counts=self.counts,
            async_op=True,
            codec=self._how.param_codec,
            label=f"{self.name} {label}",
        )

    def use(self) -> None:
        """Wait for the whole parameters and put them into the module."""
        self.wait()
        self.in_use = True
        self.put(self.wholes)

    def wait(self) -> None:
        """Wait for what was begun by `gather`."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None

    def cast(self, inputs: Any) -> Any:
        """The inputs with their floats in the type to compute in, if one is told."""
        dtype = self._how.param_dtype
        if dtype is None:
            return inputs
        return tree_map(
            lambda x: (
                x.to(dtype) if torch.is_tensor(x) and x.is_floating_point() else x
            ),
            inputs,
        )

    def refuse_opaque(self, output: object) -> None:
        """Backward announces itself at the output, so that must show its tensors."""
        if self.trainable and not isinstance(output, _TRANSPARENT):
            raise UsageError(
                f"FSDP: the unit {self.name} returns a {type(output).__name__}; return "
                "tensors in tuples, lists or dicts, or register it with torch's pytree"
            )

    def free(self) -> None:
        """Put the pieces back and give the memory of the whole parameters up."""
        self.wait()
        self.put([piece.param for piece in self.pieces])
        if self.gathered:
            self._memory.give_back()
        self.gathered = self.in_use = False

    def put(self, params: list[nn.Parameter]) -> None:
        """Let the module have these, whole ones or pieces."""
        for member, param in zip(self.members, params, strict=True):
            for module, name in member.places:
                module._parameters[name] = param

    # --- gradients

    def expect_grads(self) -> None:
        """A backward pass begins: none have come."""
        self.in_backward, self.reduced = True, False
        self.missing = set(self.trainable)

    @torch.no_grad()
    def take_grad(self, i: int, pool: Pool) -> None:
        """Move a whole gradient into the flat ones, in the type to reduce them in."""
        if self.grads is None:
            dtype = self._how.reduce_dtype or self.full.dtype
            self.grads = pool.take(self.count, dtype)
        place = self.grads[self.begins[i] : self.begins[i + 1]]
        grad = self.wholes[i].grad
        if grad is None:
            place.zero_()
        else:
            place.copy_(grad.reshape(-1))
        self.wholes[i].grad = None
        self.missing.discard(i)

    def reduce(self, pool: Pool, label: str) -> None:
        """Begin to average the gradients; each rank gets its share, in its place."""
        for i in set(range(len(self.members))) - set(self.trainable) | self.missing:
            self.take_grad(i, pool)
        assert self.grads is not None
        self.reduced = True
        self._reducing = self.comm.reduce_scatter(
            self.grads,
            op="mean",
            out=self.grads[self.lower : self.upper],
            counts=self.counts,
            async_op=True,
            reproducible=self._how.reproducible,
            codec=self._how.reduce_codec,
            label=f"{self.name} {label}",
        )

    @torch.no_grad()
    def land(self, pool: Pool) -> None:
        """Wait for the average and add it to the pieces' gradients."""
        if self._reducing is None:
            return
        self._reducing.wait()
        self._reducing = None
        assert self.grads is not None
        mine = self.grads[self.lower : self.upper]
        if self._how.replicas is not None:
            self._how.replicas.all_reduce(
                mine,
                op="mean",
                reproducible=self._how.reproducible,
                codec=self._how.reduce_codec,
            )
        if self.shard_grad is None:
            self.shard_grad = torch.empty_like(self.shard)
        fresh = all(piece.param.grad is None for piece in self.pieces)
        if fresh:  # the usual case: one copy for all of them
            self.shard_grad.copy_(mine)
        for i in self.trainable:
            piece, span = self.pieces[i].param, self._spans[i]
            if piece.grad is not None:
                piece.grad.add_(mine[span])
            else:
                place = self.shard_grad[span]
                piece.grad = place if fresh else place.copy_(mine[span])
        pool.bring_back(self.grads)
        self.grads = None


class Order:
    """In which order units were used, and which comes next if all goes as before."""

    def __init__(self) -> None:
        """Nothing is known of the first pass."""
        self._before: list[Unit] = []
        self._now: list[Unit] = []

    def restart(self) -> None:
        """A pass begins."""
        self._before, self._now = self._now, []

    def after(self, unit: Unit) -> Unit | None:
        """Note that a unit is used; the one that came after it last time, if known."""
        self._now.append(unit)
        at = len(self._now)
        as_before = self._before[at - 1 : at] == [unit]
        return self._before[at] if as_before and at < len(self._before) else None
