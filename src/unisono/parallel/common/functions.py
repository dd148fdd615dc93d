"""Collectives with gradients: each is the backward of another.

    forward             backward             used
    copy_to             all_reduce           before work that is sharded over ranks
    all_reduce          nothing              after it, where all ranks have one loss
    sum_over            all_reduce           for statistics that all ranks' losses use
    all_gather          reduce_scatter       for shards that every rank uses in full
    reduce_scatter      all_gather           for the inverse
    all_to_all          all_to_all           to shard along another dim
    exchange            exchange, back       for rows with given destinations
    scatter_to          all_gather           to shard a replicated value
    gather_from         nothing              to gather shards, where there is one loss

Each is the adjoint of the other for the sum of all ranks' losses: if a value is used on
n ranks, its gradient is the sum of theirs. The exceptions are `all_reduce`,
`scatter_to` and `gather_from`: there the full value is replicated, all ranks compute
the same with it, and its gradient is the same on each.

They take the options of a collective. A label is compared between ranks; in backward it
says so, so that a rank that is ahead or behind is detected.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.autograd import Function

from unisono.parallel.common.opaque import opaque
from unisono.runtime.call.options import Options
from unisono.runtime.communicator import Communicator


class _CopyTo(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, options: Options) -> Tensor:
        ctx.comm, ctx.options = comm, options
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.comm.all_reduce(_own(grads[0]), **_back(ctx.options)), None, None


class _AllReduce(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, options: Options) -> Tensor:
        summed: Tensor = comm.all_reduce(_own(x), **options)
        return summed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0], None, None


class _SumOver(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, options: Options) -> Tensor:
        ctx.comm, ctx.options = comm, options
        summed: Tensor = comm.all_reduce(_own(x), **options)
        return summed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.comm.all_reduce(_own(grads[0]), **_back(ctx.options)), None, None


class _AllGather(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, comm: Communicator, dim: int, options: Options
    ) -> Tensor:
        ctx.comm, ctx.dim, ctx.options = comm, dim, options
        return _gathered(x, comm, dim, options)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        mine = _scattered(grads[0], ctx.comm, ctx.dim, _back(ctx.options))
        return mine, None, None, None


class _ReduceScatter(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, comm: Communicator, dim: int, options: Options
    ) -> Tensor:
        ctx.comm, ctx.dim, ctx.options = comm, dim, options
        return _scattered(x, comm, dim, options)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        whole = _gathered(grads[0], ctx.comm, ctx.dim, _back(ctx.options))
        return whole, None, None, None


class _ScatterTo(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, comm: Communicator, dim: int, options: Options
    ) -> Tensor:
        ctx.comm, ctx.dim, ctx.options = comm, dim, options
        return x.chunk(comm.world_size, dim)[comm.rank].contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        whole = _gathered(grads[0], ctx.comm, ctx.dim, _back(ctx.options))
        return whole, None, None, None


class _GatherFrom(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, comm: Communicator, dim: int, options: Options
    ) -> Tensor:
        ctx.comm, ctx.dim = comm, dim
        return _gathered(x, comm, dim, options)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        mine = grads[0].chunk(ctx.comm.world_size, ctx.dim)[ctx.comm.rank]
        return mine, None, None, None


class _AllToAll(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        comm: Communicator,
        split_dim: int,
        join_dim: int,
        options: Options,
    ) -> Tensor:
        ctx.comm, ctx.options = comm, options
        ctx.split_dim, ctx.join_dim = split_dim, join_dim
        return _swapped(x, comm, split_dim, join_dim, options)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        options = _back(ctx.options)
        grad = _swapped(grads[0], ctx.comm, ctx.join_dim, ctx.split_dim, options)
        return grad, None, None, None, None


class _Exchange(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        comm: Communicator,
        sent: list[int],
        received: list[int],
        options: Options,
    ) -> Tensor:
        ctx.comm, ctx.sent, ctx.received, ctx.options = comm, sent, received, options
        return _exchanged(x, comm, sent, received, options)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        options = _back(ctx.options)
        grad = _exchanged(grads[0], ctx.comm, ctx.received, ctx.sent, options)
        return grad, None, None, None, None


def copy_to(x: Tensor, comm: Communicator, **options: Unpack[Options]) -> Tensor:
    """The same value; its gradient is the sum of all ranks'."""
    return _applied(_CopyTo, x, comm, options)


def all_reduce(x: Tensor, comm: Communicator, **options: Unpack[Options]) -> Tensor:
    """The sum over the ranks; each summand gets the sum's gradient."""
    return _applied(_AllReduce, x, comm, options)


def sum_over(x: Tensor, comm: Communicator, **options: Unpack[Options]) -> Tensor:
    """The sum over the ranks, where each rank has a loss of its own."""
    return _applied(_SumOver, x, comm, options)


def all_gather(
    x: Tensor, comm: Communicator, dim: int = 0, **options: Unpack[Options]
) -> Tensor:
    """All ranks' shards along a dim, in rank order; they are all of one shape."""
    return _applied(_AllGather, x, comm, dim, options)


def reduce_scatter(
    x: Tensor, comm: Communicator, dim: int = 0, **options: Unpack[Options]
) -> Tensor:
    """The sum over the ranks, of which each keeps its shard along a dim."""
    return _applied(_ReduceScatter, x, comm, dim, options)


def scatter_to(
    x: Tensor, comm: Communicator, dim: int = 0, **options: Unpack[Options]
) -> Tensor:
    """This rank's shard of a replicated value; its gradient is gathered."""
    return _applied(_ScatterTo, x, comm, dim, options)


def gather_from(
    x: Tensor, comm: Communicator, dim: int = 0, **options: Unpack[Options]
) -> Tensor:
    """All ranks' shards, where every rank then computes the same with them."""
    return _applied(_GatherFrom, x, comm, dim, options)


def all_to_all(
    x: Tensor,
    comm: Communicator,
    split_dim: int,
    join_dim: int,
    **options: Unpack[Options],
) -> Tensor:
    """Split x along one dim, send a part to each rank, join along another dim."""
    return _applied(_AllToAll, x, comm, split_dim, join_dim, options)


def exchange(
    x: Tensor,
    comm: Communicator,
    sent: Sequence[int],
    received: Sequence[int],
    **options: Unpack[Options],
) -> Tensor:
    """Send sent[r] rows of x to each rank r, receive received[r]; either may be 0."""
    return _applied(_Exchange, x, comm, list(sent), list(received), options)


@opaque
def _applied(function: type[Function], *args: Any) -> Tensor:
    made: Tensor = function.apply(*args)
    return made


def _back(options: Options) -> Options:
    """The same options in backward, with a label that says so."""
    label = options.get("label")
    return {**options, "label": f"{label}, backward"} if label else options


def _own(x: Tensor) -> Tensor:
    """A contiguous copy, to be overwritten."""
    return x.detach().clone(memory_format=torch.contiguous_format)


def _gathered(x: Tensor, comm: Communicator, dim: int, options: Options) -> Tensor:
    rows: Tensor = comm.all_gather(x.detach().movedim(dim, 0).contiguous(), **options)
    return rows.movedim(0, dim)


def _scattered(x: Tensor, comm: Communicator, dim: int, options: Options) -> Tensor:
    mine: Tensor = comm.reduce_scatter(
        x.detach().movedim(dim, 0).contiguous(), **options
    )
    return mine.movedim(0, dim)


def _swapped(
    x: Tensor, comm: Communicator, split_dim: int, join_dim: int, options: Options
) -> Tensor:
    parts = torch.stack(x.detach().chunk(comm.world_size, dim=split_dim))
    received: Tensor = comm.all_to_all(parts.contiguous(), **options)
    return torch.cat(received.unbind(0), dim=join_dim)


def _exchanged(
    x: Tensor,
    comm: Communicator,
    sent: list[int],
    received: list[int],
    options: Options,
) -> Tensor:
    rows: Tensor = comm.all_to_all(
        x.detach().contiguous(), send_counts=sent, recv_counts=received, **options
    )
    return rows
