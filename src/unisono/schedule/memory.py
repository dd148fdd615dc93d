"""What a rank holds besides its input and its result while a schedule runs.

Chunks that are on their way to others, and temporaries. Sums that a rank makes of what
it contributes, or of what it will keep, are in buffers that it has anyway.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from unisono.schedule.collective import BARRIER, Holders, Ints
from unisono.schedule.protocol import ReadableSchedule


def memory_beyond_buffers(
    schedule: ReadableSchedule, weight: NDArray[np.float64]
) -> float:
    """The most that any rank holds at one time, in the unit of the weights."""
    what = schedule.collective
    anywhere = Holders.EVERYWHERE in (what.before, what.after)
    temporaries = schedule.num_slots - schedule.num_chunks
    if what is BARRIER or (anywhere and not temporaries):
        return 0.0
    arrived, sent, steps = _moves(schedule)
    held, first = np.unique(arrived[0], return_index=True)  # the first of each
    begin = arrived[1][first]
    end = begin.copy()
    place = np.searchsorted(held, sent[0])
    known = place < held.size
    known[known] = held[place[known]] == sent[0][known]
    np.maximum.at(end, place[known], sent[1][known])
    rank, slot = np.divmod(held, schedule.num_slots)
    change = np.zeros((schedule.n, steps + 1))
    np.add.at(change, (rank, begin), weight[slot])
    np.add.at(change, (rank, end + 1), -weight[slot])
    return float(change.cumsum(axis=1).max(initial=0.0))


def _moves(schedule: ReadableSchedule) -> tuple[list[Ints], list[Ints], int]:
    """What reaches and what leaves ranks that have no buffer for it, and when.

    Each as rank · slots + slot, and the number of the step.
    """
    moves: list[list[Ints]] = [[], [], [], []]
    steps = 0
    for step in schedule:
        src, dst, slot, _, _ = step.flat()
        for k, rank in ((0, dst), (2, src)):
            here = ~_has_buffer(schedule, rank, slot)
            moves[k].append(rank[here] * schedule.num_slots + slot[here])
            moves[k + 1].append(np.full(int(here.sum()), steps))
        steps += 1
    joined = [np.concatenate([np.zeros(0, np.int64), *part]) for part in moves]
    return joined[:2], joined[2:], steps


def _has_buffer(
    schedule: ReadableSchedule, rank: Ints, slot: Ints
) -> NDArray[np.bool_]:
    """Whether a rank has the chunk before or after anyway."""
    contract, what = schedule.contract, schedule.collective
    is_chunk = slot < schedule.num_chunks
    chunk = np.where(is_chunk, slot, 0)
    found = np.zeros(rank.shape, np.bool_)
    for place in (what.before, what.after):
        holder = contract.holder(place, chunk)
        found |= True if holder is None else holder == rank
    return found & is_chunk
