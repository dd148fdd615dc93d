"""Traffic: what a schedule sends from host to host, counted from its steps.

Ranks of one host share its link to the others, so what counts between hosts is not what
passes through the busiest rank but what leaves and enters the busiest host. `traffic`
counts it for any schedule and any placement of its ranks, step by step.

The least that must enter the busiest of H hosts is 2(H-1)/H of a buffer in an
all_reduce, one whole buffer in a broadcast, and in an all_gather the shares of
all ranks elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from unisono.errors import BadArgument
from unisono.schedule.collective import BARRIER, Ints
from unisono.schedule.counts import distinct
from unisono.schedule.oracle import checked_steps
from unisono.schedule.schedule import Schedule
from unisono.schedule.step import Bools, Step, together, whole_numbers

Floats = NDArray[np.float64]

ROWS = "leaves", "enters", "taken", "added", "peers", "mutual"
"""What is counted of each step."""
MOST_HELD = 1 << 22
"""Above so many chunks on all ranks every step is taken to wait for the one before."""


MOST_AT_ONCE = 1 << 17
"""So many transfers are counted in one pass."""


@dataclass(frozen=True, eq=False)
class Traffic:
    """One row per step, in whole chunks, of which `unit` make up a rank's buffer.

    `leaves` and `enters` have a column per host. The others have one per rank: what it
    takes in, from its own host or another; how much of that it adds; with how many
    ranks of other hosts it exchanges messages, the larger of sends and receives; and to
    how many of them it both sends and listens.

    `depth` is the longest chain of transfers between hosts of which each waits for the
    one before. In a pipeline it is the way of one chunk, and not of all.

    `fan` is with how many ranks of other hosts a rank exchanges messages in all steps
    together, the larger of sends and receives, of the rank with most.

    Whole numbers are the same on every machine, to the last bit; so ranks may decide by
    them, each for itself.
    """

    unit: float
    leaves: Ints
    enters: Ints
    taken: Ints
    added: Ints
    peers: Ints
    mutual: Ints
    depth: int = field(kw_only=True)
    fan: int = field(kw_only=True)

    @property
    def leaving(self) -> Floats:
        """What leaves each host in all, in buffers."""
        return np.asarray(self.leaves.sum(axis=0) / self.unit)

    @property
    def entering(self) -> Floats:
        """What enters each host in all, in buffers."""
        return np.asarray(self.enters.sum(axis=0) / self.unit)

    def split(self, segments: int) -> Traffic:
        """The traffic of the schedule split into so many segments.

        In each step there, as many steps of here go on at once, each with one segment.
        A peer counts for each of them.
        """
        return Traffic(
            self.unit * segments,
            *(_windows(getattr(self, field), segments) for field in ROWS),
            depth=self.depth,
            fan=self.fan,
        )


def _windows(rows: Ints, width: int) -> Ints:
    """The sums of `width` rows one after the other, the ends included."""
    if not len(rows):
        return rows
    padded = np.zeros((len(rows) + 2 * width - 1, rows.shape[1]), dtype=rows.dtype)
    padded[width : width + len(rows)] = rows
    upto = np.cumsum(padded, axis=0)
    return np.asarray(upto[width:] - upto[:-width])


def traffic(schedule: Schedule, hosts: Sequence[int] | Ints) -> Traffic:
    """Count what crosses between hosts; `hosts` is the host of every rank, from 0."""
    n, host = schedule.n, whole_numbers(hosts)
    if host.shape != (n,) or (host < 0).any():
        raise BadArgument(
            f"hosts: expected the number of the host of each of {n} ranks, got {hosts}"
        )
    width = int(host.max()) + 1
    steps = list(checked_steps(schedule))
    counted = [_counts(batch, host) for batch in _batches(steps)]
    columns = (
        np.concatenate(
            [np.empty((0, across), np.int64), *(part[i] for part in counted)]
        )
        for i, across in enumerate((width, width, n, n, n, n))
    )
    silent = schedule.collective is BARRIER
    unit = math.inf if silent else schedule.contract.chunks_per_rank
    return Traffic(unit, *columns, depth=_depth(steps, host), fan=_fan(steps, host))


def _fan(steps: Sequence[Step], host: Ints) -> int:
    """The most ranks of other hosts to whom a rank sends, or from whom it receives."""
    pairs = [np.zeros(0, dtype=np.int64)]
    for batch in _batches(steps):
        src, dst, *_ = together(batch).flat()
        away = host[src] != host[dst]
        pairs.append(distinct(src[away] * host.size + dst[away]))
    src, dst = np.divmod(distinct(np.concatenate(pairs)), host.size)
    return int(max(np.bincount(src).max(initial=0), np.bincount(dst).max(initial=0)))


def _depth(steps: Sequence[Step], host: Ints) -> int:
    """The most transfers between hosts of which each waits for the one before."""
    flats = [step.flat() for step in steps]
    largest = (max(int(a.max(initial=0)) for a in flat[2::2]) for flat in flats)
    slots = 1 + max(largest, default=0)
    if host.size * slots > MOST_HELD:
        return sum(bool((host[src] != host[dst]).any()) for src, dst, *_ in flats)
    level = np.zeros(host.size * slots, dtype=np.int64)
    for src, dst, slot, mask, into in flats:
        after = level[src * slots + slot] + (host[src] != host[dst])
        cells = dst * slots + into
        level[cells[~mask]] = 0  # what is copied replaces what was there
        np.maximum.at(level, cells, after)
    return int(level.max(initial=0))


def _batches(steps: Sequence[Step]) -> Iterator[list[Step]]:
    """The steps, small ones together: each pass over some has its price."""
    batch: list[Step] = []
    held = 0
    for step in steps:
        if batch and held + len(step) > MOST_AT_ONCE:
            yield batch
            batch, held = [], 0
        batch.append(step)
        held += len(step)
    if batch:
        yield batch


def _counts(
    steps: Sequence[Step], host: Ints
) -> tuple[Ints, Ints, Ints, Ints, Ints, Ints]:
    """The rows of some steps, in chunks."""
    flats = [step.flat() for step in steps]
    src, dst, mask = (np.concatenate([flat[i] for flat in flats]) for i in (0, 1, 3))
    at = np.repeat(np.arange(len(steps)), [len(step) for step in steps])
    n, num_hosts = host.size, int(host.max()) + 1
    away = host[src] != host[dst]

    def count(columns: int, chosen: Bools, column: Ints) -> Ints:
        cells = at[chosen] * columns + column[chosen]
        found = np.bincount(cells, minlength=len(steps) * columns)
        return found.reshape(len(steps), columns)

    return (
        count(num_hosts, away, host[src]),
        count(num_hosts, away, host[dst]),
        count(n, src != dst, dst),
        count(n, mask, dst),
        *_peers(at[away], src[away], dst[away], (len(steps), n)),
    )


def _peers(at: Ints, src: Ints, dst: Ints, shape: tuple[int, int]) -> tuple[Ints, Ints]:
    """With how many ranks each exchanges in each step, and with how many both ways."""
    steps, n = shape
    there = distinct((at * n + src) * n + dst)
    back = distinct((at * n + dst) * n + src)
    both = np.intersect1d(there, back, assume_unique=True)
    sends, receives, mutual = (
        np.bincount(pairs // n, minlength=steps * n).reshape(shape)
        for pairs in (there, back, both)
    )
    return np.maximum(sends, receives), mutual
