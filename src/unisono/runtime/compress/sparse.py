"""Sums of a few elements of each rank: top-k, and random-k.

Random-k is simple: all ranks draw the same indices, so the selected elements are summed
as a short tensor by a plain all_reduce. With top-k every rank has other indices, and
their overlap is not known in advance. So a sum takes four steps:

    balance   where to cut the tensor into n regions, so that about as many elements
              fall into each: the mean over the ranks of where each would cut
    split     every rank sends (index, value) to the region's owner: all_to_all
    sum       the owner adds in rank order, in float32; with `again` it keeps only the
              k/n largest of its region
    gather    all get the owners' elements, as pairs, or as plain values where more
              than half of the elements are nonzero (a pair has twice the size)

    sent per rank, in pairs     split  k(n-1)/n    gather  U(n-1)/n

where U, the number of elements that any rank selected, is between k and nk, and at most
k with `again`: 4k(n-1)/n values in all. Where 2k is the whole tensor or more, it is
sent whole. Besides, 16n(n-1) bytes are sent for the counts.

An element that a rank selected, but not the owner again, has not been sent: the indices
come back with the result, and the residual keeps such elements.

Li and Hoefler, "Near-optimal sparse allreduce" (Ok-Topk, 2022); Renggli et al.,
"SparCML" (2019), for the switch to dense.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from unisono.codecs.feedback import Feedback
from unisono.codecs.randomk import RandomK, drawn
from unisono.codecs.topk import Floats, Places, TopK, largest, packed, unpacked
from unisono.errors import BadArgument
from unisono.runtime.call import arguments
from unisono.runtime.call.shard_sizes import shard_sizes
from unisono.runtime.collectives import Collectives
from unisono.runtime.compress.sums import CompressedSum
from unisono.runtime.stages import Stages, once

MOST = 1 << 32
"""An index has 32 bits."""


class TopKSum(CompressedSum):
    """The sum of each rank's largest elements, with or without error feedback."""

    def __init__(
        self, comm: Collectives, how: TopK, count: int, *, feedback: bool = True
    ) -> None:
        """With feedback, unsent elements are kept for the next call."""
        super().__init__(comm, count)
        if count >= MOST:
            raise BadArgument(
                f"topk: {count} elements; expected less than 2^32, send them in parts"
            )
        how.count(count)
        self._how = how
        made = Feedback(self.memory, count, how.momentum) if feedback else None
        self._feedback = made

    def reduce(self, x: Floats, *, whole: bool = True, label: str = "") -> Stages:
        """Turn x into the sum; it is zero where no rank selected an element."""
        k = self._how.count(self.count, self.steps)
        self.steps += 1
        wanted = x if self._feedback is None else self._feedback.wanted(x)
        mine = largest(wanted, k)
        values = wanted[mine]
        if not whole:
            yield from summed_in_parts(
                self.comm, mine, values, x, self.bounds, label=label
            )
            taken = None
        else:
            again = k if self._feedback is not None else None
            taken = yield from summed(
                self.comm, mine, values, x, again=again, label=label
            )
        if self._feedback is not None:
            if taken is not None:  # of our selection, what was sent to all
                mine = np.intersect1d(mine, taken, assume_unique=True)
            self._feedback.sent(mine)


class RandomKSum(CompressedSum):
    """The sum of elements at random indices, with or without error feedback."""

    def __init__(
        self, comm: Collectives, how: RandomK, count: int, *, feedback: bool = True
    ) -> None:
        """With feedback, unsent elements are kept for the next call."""
        super().__init__(comm, count)
        how.count(count)
        self._how = how
        self._feedback = Feedback(self.memory, count) if feedback else None

    def reduce(self, x: Floats, *, whole: bool = True, label: str = "") -> Stages:
        """Turn x into the sum; it is zero at all other indices."""
        k = self._how.count(self.count)
        places = drawn(self.count, k, self._how.seed + self.steps)
        self.steps += 1
        wanted = x if self._feedback is None else self._feedback.wanted(x)
        few = wanted[places]
        x[:] = 0
        if whole:
            yield self.comm.all_reduce(few, async_op=True, label=label)
            x[places] = few
        else:
            cuts = np.searchsorted(places, self.bounds)
            first, last = cuts[self.comm.rank : self.comm.rank + 2]
            counts = np.diff(cuts).tolist()
            out = np.empty(last - first, np.float32)
            yield self.comm.reduce_scatter(
                few, out=out, counts=counts, async_op=True, label=label
            )
            x[places[first:last]] = out
        if self._feedback is not None:
            self._feedback.sent(places)


def summed(
    comm: Collectives,
    places: Places,
    values: Floats,
    into: Floats,
    *,
    again: int | None = None,
    label: str = "",
) -> Stages:
    """The sum of every rank's selected elements, on every rank, in `into`.

    Returns the indices that were sent, or None if all selected elements were. All ranks
    select the same number; `again` is how many elements of the sum to keep.
    """
    count = into.size
    if 2 * places.size >= count:
        into[:] = 0
        into[places] = values
        yield comm.all_reduce(into, async_op=True, label=label)
        return None
    bounds = yield from _balanced(comm, places, count, label)
    region = yield from _split(comm, places, values, bounds, label)
    found, sums = region
    if again is not None:
        quota = shard_sizes(again, comm.world_size)[comm.rank]
        best = largest(sums, min(quota, found.size))
        found, sums = found[best], sums[best]
    return (yield from _gathered(comm, found, sums, into, bounds, label))


def summed_in_parts(
    comm: Collectives,
    places: Places,
    values: Floats,
    into: Floats,
    bounds: Sequence[int],
    *,
    label: str = "",
) -> Stages:
    """The same, but every rank gets only its own part of `into`."""
    if 2 * places.size >= into.size:
        into[:] = 0
        into[places] = values
        counts, mine = np.diff(bounds).tolist(), slice(*bounds[comm.rank :][:2])
        yield comm.reduce_scatter(
            into, out=into[mine], counts=counts, async_op=True, label=label
        )
        return
    found, sums = yield from _split(comm, places, values, bounds, label)
    into[bounds[comm.rank] : bounds[comm.rank + 1]] = 0
    into[found] = sums


def _balanced(comm: Collectives, places: Places, count: int, label: str) -> Stages:
    """Where to cut so that owners have about the same work; the same on all ranks."""
    n = comm.world_size
    inner = np.arange(1, n) * places.size // n
    cuts = places[inner].astype(np.int64)
    yield comm.all_reduce(cuts, async_op=True, label=label)
    return [0, *(cuts // n).tolist(), count]


def _split(
    comm: Collectives,
    places: Places,
    values: Floats,
    bounds: Sequence[int],
    label: str,
) -> Stages:
    """Send each owner the elements of its region; the sum of this rank's region."""
    n, rank = comm.world_size, comm.rank
    counts = np.diff(np.searchsorted(places, bounds)).astype(np.int64)
    counts_of_all = np.empty((n, n), np.int64)
    yield comm.all_gather(counts[None], out=counts_of_all, async_op=True, label=label)
    arrived = np.empty(int(counts_of_all[:, rank].sum()), np.uint64)
    pairs = packed(places, values)
    call = arguments.all_to_all(
        comm.core.position, pairs, arrived, counts.tolist(), counts_of_all.tolist()
    )
    yield once(comm, call, label)
    first, last = bounds[rank], bounds[rank + 1]
    return _added(arrived, counts_of_all[:, rank].tolist(), first, last)


def _added(
    arrived: NDArray[np.uint64], counts: list[int], first: int, last: int
) -> tuple[Places, Floats]:
    """Every rank's elements of a region, added in rank order: indices and sums."""
    total = np.zeros(last - first, np.float32)
    there = np.zeros(last - first, np.bool_)
    for end, count in zip(accumulate(counts), counts, strict=True):
        at, values = unpacked(arrived[end - count : end])
        total[at - first] += values
        there[at - first] = True
    found = np.flatnonzero(there)
    return found + first, total[found]


def _gathered(
    comm: Collectives,
    found: Places,
    sums: Floats,
    into: Floats,
    bounds: Sequence[int],
    label: str,
) -> Stages:
    """Gather the owners' elements on all ranks; their indices."""
    n = comm.world_size
    sizes = np.empty(n, np.int64)
    mine = np.array([found.size], np.int64)
    yield comm.all_gather(mine, out=sizes, async_op=True, label=label)
    first, last = bounds[comm.rank], bounds[comm.rank + 1]
    total = int(sizes.sum())
    if 2 * total >= into.size:
        here = np.zeros(last - first, np.float32)
        here[found - first] = sums
        counts = np.diff(bounds).tolist()
        yield once(
            comm, arguments.all_gather(comm.core.position, here, into, counts), label
        )
        return None
    everything = np.empty(total, np.uint64)
    pairs = packed(found, sums)
    call = arguments.all_gather(comm.core.position, pairs, everything, sizes.tolist())
    yield once(comm, call, label)
    places, values = unpacked(everything)
    into[:] = 0
    into[places] = values
    return places
