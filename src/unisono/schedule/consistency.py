"""Do all ranks end with the same bits, and how deep are the sums?

Floating-point addition is commutative but not associative, so two ranks agree to the
last bit exactly when they added in the same tree, up to the two sides of each sum. Run
the schedule on hashes instead of numbers, with a hash of a sum that does not mind the
order of its two operands: equal hashes, equal trees. The depth of the tree, which
bounds the rounding error, is followed in the same pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from unisono.schedule.collective import Ints
from unisono.schedule.oracle import checked_steps
from unisono.schedule.protocol import ReadableSchedule
from unisono.schedule.step import Step
from unisono.schedule.verify import batches

Hashes = NDArray[np.uint64]


@dataclass(frozen=True)
class Consistency:
    """What a schedule does to the bits of a sum."""

    same_bits_on_all_ranks: bool
    depth: int


_BYTES_PER_SLOT = 12  # a hash and a depth


def consistency(schedule: ReadableSchedule) -> Consistency:
    """Follow the trees in which `schedule` adds up."""
    if not schedule.collective.reduces:
        return Consistency(same_bits_on_all_ranks=True, depth=0)
    parts = [_of_lot(schedule, lo, hi) for lo, hi in batches(schedule, _BYTES_PER_SLOT)]
    return Consistency(all(same for same, _ in parts), max(deep for _, deep in parts))


def _of_lot(schedule: ReadableSchedule, lo: int, hi: int) -> tuple[bool, int]:
    """The same bits, and how deep, for chunks lo..hi-1."""
    trees = _Trees(schedule, lo, hi)
    for step in checked_steps(schedule):
        trees.run(step)
    contract = schedule.contract
    chunk = np.arange(lo, min(hi, schedule.num_chunks))
    ends, depth = trees.hash[: chunk.size], trees.depth[: chunk.size]
    holder = contract.holder(contract.collective.after, chunk)
    if holder is None:
        return bool((ends == ends[:, :1]).all()), int(depth.max())
    return True, int(depth[np.arange(chunk.size), holder].max())


class _Trees:
    """For every slot, the hash of its tree of additions and that tree's depth."""

    def __init__(self, schedule: ReadableSchedule, lo: int, hi: int) -> None:
        shape = (hi - lo, schedule.n)
        self.lo, self.hi = lo, hi
        leaves = _mix(np.arange(schedule.n, dtype=np.uint64) + np.uint64(1))
        self.n = schedule.n
        self.hash: Hashes = np.broadcast_to(leaves, shape).copy()
        self.depth: NDArray[np.int32] = np.zeros(shape, dtype=np.int32)

    def run(self, step: Step) -> None:
        """Every slot's operands, in the order of their ranks, summed from the left."""
        if self.lo or (step.chunk >= self.hi).any():
            step = step.where((step.chunk >= self.lo) & (step.chunk < self.hi))
        src, dst, chunk, mask, into = step.flat()
        chunk, into = chunk - self.lo, into - self.lo
        hashes, depths = self.hash[chunk, src], self.depth[chunk, src]
        slot = into * self.n + dst
        self.hash.flat[slot[~mask]] = hashes[~mask]
        self.depth.flat[slot[~mask]] = depths[~mask]
        if not mask.any():
            return
        summed = np.unique(slot[mask])
        # A slot's own value counts as its own rank's, or as that of the copy it is.
        own_rank = summed % self.n
        copied = np.isin(slot, summed) & ~mask
        own_rank[np.searchsorted(summed, slot[copied])] = src[copied]
        operands = np.concatenate([self.hash.flat[summed], hashes[mask]])
        deep = np.concatenate([self.depth.flat[summed], depths[mask]])
        where = np.concatenate([summed, slot[mask]])
        order = np.lexsort((np.concatenate([own_rank, src[mask]]), where))
        self._fold(where[order], operands[order], deep[order])

    def _fold(self, slot: Ints, operands: Hashes, deep: NDArray[np.int32]) -> None:
        starts = np.flatnonzero(np.diff(slot, prepend=-1))
        lengths = np.diff(starts, append=slot.size)
        by_length = np.argsort(-lengths, kind="stable")
        starts, lengths = starts[by_length], lengths[by_length]
        total, depth = operands[starts], deep[starts]
        for position in range(1, int(lengths[0])):
            open_ = int(np.searchsorted(-lengths, -position))  # runs longer than this
            at = starts[:open_] + position
            total[:open_] = _add(total[:open_], operands[at])
            depth[:open_] = np.maximum(depth[:open_], deep[at]) + 1
        self.hash.flat[slot[starts]] = total
        self.depth.flat[slot[starts]] = depth


def _add(a: Hashes, b: Hashes) -> Hashes:
    """The hash of a sum, the same for a + b and b + a."""
    return _mix(np.minimum(a, b) + _mix(np.maximum(a, b)))


def _mix(x: Hashes) -> Hashes:
    """Spread every bit of x over the whole word, one to one."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
