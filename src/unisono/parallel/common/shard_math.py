"""Sizes and bounds of shards: arithmetic on numbers of elements."""

from __future__ import annotations

from itertools import accumulate, pairwise

from unisono.errors import BadArgument
from unisono.runtime.call.shard_sizes import shard_sizes
from unisono.runtime.communicator import Communicator


def shard_bounds(count: int, comm: Communicator) -> tuple[int, int]:
    """Where this rank's shard of `count` elements begins and ends."""
    ends = list(accumulate(shard_sizes(count, comm.world_size), initial=0))
    return ends[comm.rank], ends[comm.rank + 1]


def uneven_counts(count: int, n: int) -> list[int] | None:
    """The sizes as a collective takes them: None where they are all the same."""
    return shard_sizes(count, n) if count % n else None


def overlap_sizes(begin: int, end: int, total: int, n: int) -> list[int]:
    """How much of [begin, end) lies in the shard of each rank, of `total` elements."""
    bounds = list(accumulate(shard_sizes(total, n), initial=0))
    return [
        max(0, min(end, upper) - max(begin, lower)) for lower, upper in pairwise(bounds)
    ]


def divide_evenly(where: str, number: int, n: int) -> int:
    """number / n; raise if there is a remainder."""
    if number % n:
        raise BadArgument(
            f"{where}: {number} cannot be divided evenly by {n}; choose sizes that "
            f"are multiples of {n}, or another number of ranks"
        )
    return number // n
