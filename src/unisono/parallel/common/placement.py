"""Which communicators a parameter is sharded over: a mark that the parameter carries.

    parallelize    a shard of a layer's parameter       sharded over tp
    MoE            some of the experts                  sharded over ep
    Pipeline       some of the layers                   sharded over pp
    FSDP, ZeRO     a local shard of any of these        sharded over dp as well

The mark lists the communicators in the order in which the parameter was sharded. Code
that averages, broadcasts or counts parameters reads the mark and does not need to know
the strategy that set it (`marking`). A parameter without a mark is the same on all
ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn

from unisono.errors import BadArgument
from unisono.runtime.communicator import Communicator


class ShardedOver(NamedTuple):
    """Each rank of `comm` has a different shard of the parameter.

    `averaged`: the strategy that sharded it also averages its gradient, so others must
    not.
    """

    comm: Communicator
    averaged: bool = False

    def common_ranks(self, comm: Communicator) -> int:
        """How many ranks of `comm` have different shards; 1 if none of them do."""
        return max(1, len(set(self.comm.world_ranks) & set(comm.world_ranks)))


def placements_of(param: Tensor) -> tuple[ShardedOver, ...]:
    """How a parameter was sharded, in order; empty if it was not."""
    placements: tuple[ShardedOver, ...] = getattr(param, "unisono_placements", ())
    return placements


def is_sharded(param: Tensor, comm: Communicator) -> bool:
    """Whether ranks of `comm` have different shards of the parameter."""
    return shard_count(param, comm) > 1


def shard_count(param: Tensor, comm: Communicator) -> int:
    """How many different shards of the parameter the ranks of `comm` have."""
    count = 1
    for placement in placements_of(param):
        count *= placement.common_ranks(comm)
    return min(count, comm.world_size)


def refuse_unaveraged(
    named: list[tuple[str, nn.Parameter]], comm: Communicator, where: str
) -> None:
    """Raise if ranks of `comm` have shards whose gradients no strategy averages."""
    for name, param in named:
        for placement in placements_of(param):
            if placement.common_ranks(comm) > 1 and not placement.averaged:
                raise BadArgument(
                    f"{where}: ranks {list(placement.comm.world_ranks)} have different "
                    f"shards of {name}; use a communicator of ranks that have the same "
                    'parameters, as mesh["dp"]'
                )


def sharded_axes(
    params: Sequence[Tensor],
    comm: Communicator | None = None,
    where: str = "clip_grad_norm_",
) -> list[Communicator]:
    """The communicators to reduce over, in order, for a value of the whole model.

    Axes that were sharded first come first, and `comm` is last: the stages of a
    pipeline may differ in how their layers are sharded, but not in what comes after.
    """
    position: dict[Communicator, int] = {}
    for param in params:
        for i, placement in enumerate(placements_of(param)):
            position[placement.comm] = max(i, position.get(placement.comm, 0))
    axes = sorted(position, key=lambda axis: position[axis])
    if comm is not None:
        axes = [*(axis for axis in axes if axis is not comm), comm]
    kept: list[Communicator] = []
    for axis in sorted(axes, key=lambda axis: -axis.world_size):
        if not any(_within(axis, other, where) for other in kept):
            kept.append(axis)
    return [axis for axis in axes if axis in kept and axis.world_size > 1]


def _within(axis: Communicator, other: Communicator, where: str) -> bool:
    """Whether a reduction over `other` includes the one over `axis`."""
    mine, theirs = set(axis.world_ranks), set(other.world_ranks)
    if mine <= theirs:
        return True
    if len(mine & theirs) > 1:
        raise BadArgument(
            f"{where}: parameters are sharded over ranks {sorted(mine)} and over "
            f"{sorted(theirs)}, which overlap; give the communicator of all ranks of "
            "the mesh as comm= to unisono.parallel.clip_grad_norm_, and to a scaler "
            "as the optimizer's attribute comm"
        )
    return False
