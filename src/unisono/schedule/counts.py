"""How often each chunk is sent, and between which ranks, counted from the steps.

Transfers within a rank do not count. A temporary counts as the chunk it stands in for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from unisono.schedule.collective import Ints
from unisono.schedule.protocol import ReadableSchedule
from unisono.schedule.step import Step

Floats = NDArray[np.float64]
Group = Callable[[Ints, Ints], Ints]
"""The group of each transfer, given the ranks that send and receive; -1 for none."""


def sends_per_chunk(schedule: ReadableSchedule, num_groups: int, group: Group) -> Ints:
    """How often each chunk is sent by the transfers of each group: a row per group."""
    chunks = schedule.num_chunks
    times = np.zeros(num_groups * chunks, dtype=np.int64)
    for step in schedule:
        src, dst, slot, _, _ = step.flat()
        row = group(src, dst)
        counted = (row >= 0) & (src != dst)
        cell = row[counted] * chunks + slot[counted] % chunks
        times += np.bincount(cell, minlength=times.size)
    return times.reshape(num_groups, chunks)


def sent_between(
    steps: Iterable[Step], group: Ints, weight: Floats | None = None
) -> Floats:
    """How much each group of ranks sends to each, in chunks or in `weight` of them.

    `group[r]` is the group of rank r, from 0. A row per group that sends.
    """
    groups = int(group.max()) + 1
    table = np.zeros(groups * groups)
    for step in steps:
        src, dst, chunk, _, _ = step.flat()
        apart = src != dst
        cell = group[src[apart]] * groups + group[dst[apart]]
        size = None if weight is None else weight[chunk[apart]]
        table += np.bincount(cell, size, minlength=table.size)
    return table.reshape(groups, groups)


def num_peers(src: Ints, dst: Ints, n: int) -> tuple[Ints, Ints]:
    """For every rank, to how many it sends and from how many it receives."""
    code = src * n + dst
    if code.size > n * n // 8:
        pair = np.flatnonzero(np.bincount(code, minlength=1))
    else:
        pair = distinct(code)
    return np.bincount(pair // n, minlength=n), np.bincount(pair % n, minlength=n)


def distinct(values: Ints) -> Ints:
    """The different ones of some numbers, in order.

    As np.unique returns them, which imports all of numpy.ma at its first call: that
    takes longer than to choose an algorithm.
    """
    ordered = np.sort(values)
    found: Ints = ordered[np.diff(ordered, prepend=ordered[:1] - 1) > 0]
    return found
