"""Collectives that gradients flow through: what one does forward, another undoes.

    forward             backward             where
    copy_to             all_reduce           before work that ranks share out
    all_reduce          nothing              after it, where the loss is one for all
    sum_over            all_reduce           statistics that all ranks' losses use
    all_gather          reduce_scatter       shards put together for use by everyone
    reduce_scatter      all_gather           the other way about
    all_to_all          all_to_all           shards that change their dim
    exchange            exchange, back       rows that go where they are told
    scatter_to          all_gather           one value that ranks share out
    gather_from         nothing              shards put together, one loss for all

Each is the adjoint of the other in the sum over all ranks' losses: if a value is used
on n ranks, its gradient is the sum of theirs. The exceptions are `all_reduce`,
`scatter_to` and `gather_from`: there the whole value is one for all ranks, they all do
the same with it, and its gradient is the same on each.

They take the options of a collective. A label is told to the other ranks: in backward
with that word, so that a rank which is ahead or behind is found out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.autograd import Function

from unisono.runtime.call.options import Options
from unisono.runtime.communicator import Communicator


class _CopyTo(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, how: Options) -> Tensor:
        ctx.comm, ctx.how = comm, how
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.comm.all_reduce(_own(grads[0]), **_back(ctx.how)), None, None


class _AllReduce(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, how: Options) -> Tensor:
        summed: Tensor = comm.all_reduce(_own(x), **how)
        return summed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0], None, None


class _SumOver(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, how: Options) -> Tensor:
        ctx.comm, ctx.how = comm, how
        summed: Tensor = comm.all_reduce(_own(x), **how)
        return summed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.comm.all_reduce(_own(grads[0]), **_back(ctx.how)), None, None


class _AllGather(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, comm: Communicator, dim: int, how: Options
    ) -> Tensor:
        ctx.comm, ctx.dim, ctx.how = comm, dim, how
        return _gathered(x, comm, dim, how)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        mine = _scattered(grads[0], ctx.comm, ctx.dim, _back(ctx.how))
        return mine, None, None, None


class _ReduceScatter(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, comm: Communicator, dim: int, how: Options
    ) -> Tensor:
        ctx.comm, ctx.dim, ctx.how = comm, dim, how
        return _scattered(x, comm, dim, how)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        whole = _gathered(grads[0], ctx.comm, ctx.dim, _back(ctx.how))
        return whole, None, None, None


class _ScatterTo(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, comm: Communicator, dim: int, how: Options
    ) -> Tensor:
        ctx.comm, ctx.dim, ctx.how = comm, dim, how
        return x.chunk(comm.world_size, dim)[comm.rank].contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        whole = _gathered(grads[0], ctx.comm, ctx.dim, _back(ctx.how))
        return whole, None, None, None


class _GatherFrom(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, comm: Communicator, dim: int, how: Options
    ) -> Tensor:
        ctx.comm, ctx.dim = comm, dim
        return _gathered(x, comm, dim, how)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        mine = grads[0].chunk(ctx.comm.world_size, ctx.dim)[ctx.comm.rank]
        return mine, None, None, None


class _AllToAll(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, comm: Communicator, cut: int, joined: int, how: Options
    ) -> Tensor:
        ctx.comm, ctx.cut, ctx.joined, ctx.how = comm, cut, joined, how
        return _swapped(x, comm, cut, joined, how)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        how = _back(ctx.how)
        grad = _swapped(grads[0], ctx.comm, ctx.joined, ctx.cut, how)
        return grad, None, None, None, None


class _Exchange(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        comm: Communicator,
        sent: list[int],
        received: list[int],
        how: Options,
    ) -> Tensor:
        ctx.comm, ctx.sent, ctx.received, ctx.how = comm, sent, received, how
        return _exchanged(x, comm, sent, received, how)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        how = _back(ctx.how)
        grad = _exchanged(grads[0], ctx.comm, ctx.received, ctx.sent, how)
        return grad, None, None, None, None


def copy_to(x: Tensor, comm: Communicator, **how: Unpack[Options]) -> Tensor:
    """The same value; its gradient is the sum of all ranks'."""
    return _applied(_CopyTo, x, comm, how)


def all_reduce(x: Tensor, comm: Communicator, **how: Unpack[Options]) -> Tensor:
    """The sum over the ranks; its gradient, the same on all, is that of each part."""
    return _applied(_AllReduce, x, comm, how)


def sum_over(x: Tensor, comm: Communicator, **how: Unpack[Options]) -> Tensor:
    """The sum over the ranks, where each rank has a loss of its own."""
    return _applied(_SumOver, x, comm, how)


def all_gather(
    x: Tensor, comm: Communicator, dim: int = 0, **how: Unpack[Options]
) -> Tensor:
    """All ranks' shards along a dim, in rank order; they are all of one shape."""
    return _applied(_AllGather, x, comm, dim, how)


def reduce_scatter(
    x: Tensor, comm: Communicator, dim: int = 0, **how: Unpack[Options]
) -> Tensor:
    """The sum over the ranks, of which each keeps its share along a dim."""
    return _applied(_ReduceScatter, x, comm, dim, how)


def scatter_to(
    x: Tensor, comm: Communicator, dim: int = 0, **how: Unpack[Options]
) -> Tensor:
    """This rank's shard of what all ranks have; all of its gradient is theirs."""
    return _applied(_ScatterTo, x, comm, dim, how)


def gather_from(
    x: Tensor, comm: Communicator, dim: int = 0, **how: Unpack[Options]
) -> Tensor:
    """All ranks' shards, where every rank then does the same with all of them."""
    return _applied(_GatherFrom, x, comm, dim, how)


def all_to_all(
    x: Tensor, comm: Communicator, cut: int, joined: int, **how: Unpack[Options]
) -> Tensor:
    """Cut x along one dim, hand the parts out, and join what comes along another."""
    return _applied(_AllToAll, x, comm, cut, joined, how)


def exchange(
    x: Tensor,
    comm: Communicator,
    sent: Sequence[int],
    received: Sequence[int],
    **how: Unpack[Options],
) -> Tensor:
    """So many rows of x to each rank, and so many from each; none is a number too."""
    return _applied(_Exchange, x, comm, list(sent), list(received), how)


def _applied(function: type[Function], *args: Any) -> Tensor:
    made: Tensor = function.apply(*args)
    return made


def _back(how: Options) -> Options:
    """The same options in backward, where the label says so."""
    label = how.get("label")
    return {**how, "label": f"{label}, backward"} if label else how


def _own(x: Tensor) -> Tensor:
    """A copy in one piece, to be overwritten."""
    return x.detach().clone(memory_format=torch.contiguous_format)


def _gathered(x: Tensor, comm: Communicator, dim: int, how: Options) -> Tensor:
    rows: Tensor = comm.all_gather(x.detach().movedim(dim, 0).contiguous(), **how)
    return rows.movedim(0, dim)


def _scattered(x: Tensor, comm: Communicator, dim: int, how: Options) -> Tensor:
    mine: Tensor = comm.reduce_scatter(x.detach().movedim(dim, 0).contiguous(), **how)
    return mine.movedim(0, dim)


def _swapped(
    x: Tensor, comm: Communicator, cut: int, joined: int, how: Options
) -> Tensor:
    parts = torch.stack(x.detach().chunk(comm.world_size, dim=cut))
    came: Tensor = comm.all_to_all(parts.contiguous(), **how)
    return torch.cat(came.unbind(0), dim=joined)


def _exchanged(
    x: Tensor, comm: Communicator, sent: list[int], received: list[int], how: Options
) -> Tensor:
    came: Tensor = comm.all_to_all(
        x.detach().contiguous(), send_counts=sent, recv_counts=received, **how
    )
    return came
