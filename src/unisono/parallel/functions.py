"""Collectives that gradients flow through: what one does forward, another undoes.

    forward             backward             where
    copy_to             all_reduce           before work that ranks share out
    all_reduce          nothing              after it, where the loss is one for all
    sum_over            all_reduce           statistics that all ranks' losses use
    all_gather          reduce_scatter       shards put together for use by everyone
    reduce_scatter      all_gather           the other way about
    all_to_all          all_to_all           shards that change their dim

Each is the adjoint of the other in the sum over all ranks' losses: if a value is used
on n ranks, its gradient is the sum of theirs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from unisono.runtime.communicator import Communicator


class _CopyTo(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator) -> Tensor:
        ctx.comm = comm
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.comm.all_reduce(_own(grads[0])), None


class _AllReduce(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator) -> Tensor:
        summed: Tensor = comm.all_reduce(_own(x))
        return summed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _SumOver(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator) -> Tensor:
        ctx.comm = comm
        summed: Tensor = comm.all_reduce(_own(x))
        return summed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.comm.all_reduce(_own(grads[0])), None


class _AllGather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, dim: int) -> Tensor:
        ctx.comm, ctx.dim = comm, dim
        return _gathered(x, comm, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _scattered(grads[0], ctx.comm, ctx.dim), None, None


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, dim: int) -> Tensor:
        ctx.comm, ctx.dim = comm, dim
        return _scattered(x, comm, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _gathered(grads[0], ctx.comm, ctx.dim), None, None


class _AllToAll(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, comm: Communicator, cut: int, joined: int
    ) -> Tensor:
        ctx.comm, ctx.cut, ctx.joined = comm, cut, joined
        return _exchanged(x, comm, cut, joined)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(grads[0], ctx.comm, ctx.joined, ctx.cut), None, None, None


def copy_to(x: Tensor, comm: Communicator) -> Tensor:
    """The same value; its gradient is the sum of all ranks'."""
    return _applied(_CopyTo, x, comm)


def all_reduce(x: Tensor, comm: Communicator) -> Tensor:
    """The sum over the ranks; its gradient, the same on all, is that of each part."""
    return _applied(_AllReduce, x, comm)


def sum_over(x: Tensor, comm: Communicator) -> Tensor:
    """The sum over the ranks, where each rank has a loss of its own."""
    return _applied(_SumOver, x, comm)


def all_gather(x: Tensor, comm: Communicator, dim: int = 0) -> Tensor:
    """All ranks' shards along a dim, in rank order; they are all of one shape."""
    return _applied(_AllGather, x, comm, dim)


def reduce_scatter(x: Tensor, comm: Communicator, dim: int = 0) -> Tensor:
    """The sum over the ranks, of which each keeps its share along a dim."""
    return _applied(_ReduceScatter, x, comm, dim)


def all_to_all(x: Tensor, comm: Communicator, cut: int, joined: int) -> Tensor:
    """Cut x along one dim, hand the parts out, and join what comes along another."""
    return _applied(_AllToAll, x, comm, cut, joined)


def _applied(function: type[Function], *args: Any) -> Tensor:
    made: Tensor = function.apply(*args)
    return made


def _own(x: Tensor) -> Tensor:
    """A copy in one piece, to be overwritten."""
    return x.detach().clone(memory_format=torch.contiguous_format)


def _gathered(x: Tensor, comm: Communicator, dim: int) -> Tensor:
    rows: Tensor = comm.all_gather(x.detach().movedim(dim, 0).contiguous())
    return rows.movedim(0, dim)


def _scattered(x: Tensor, comm: Communicator, dim: int) -> Tensor:
    mine: Tensor = comm.reduce_scatter(x.detach().movedim(dim, 0).contiguous())
    return mine.movedim(0, dim)


def _exchanged(x: Tensor, comm: Communicator, cut: int, joined: int) -> Tensor:
    parts = torch.stack(x.detach().chunk(comm.world_size, dim=cut))
    came: Tensor = comm.all_to_all(parts.contiguous())
    return torch.cat(came.unbind(0), dim=joined)
