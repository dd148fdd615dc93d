"""From transfers to messages: all data from one rank to another in one step.

That is what a simulation by steps, and the closed form, count as a message. Events do
so as well, unless the topology has `streams`: then each chunk that is copied is a
message of its own, and all that are added together are one (`events.py`).

A step of a hierarchy on 16,384 ranks has thirty million transfers but sixteen thousand
messages, and the transfers of one message are mostly adjacent. So runs of equal pairs
are summed first, and only the runs are sorted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from unisono.schedule.collective import BARRIER, Ints
from unisono.schedule.oracle import explain_rule, first_invalid
from unisono.schedule.schedule import Schedule
from unisono.schedule.step import Step
from unisono.topology.topology import Floats

BLOCK = 1 << 20
"""How many transfers are looked at at once."""


@dataclass(frozen=True, eq=False)
class Messages:
    """The messages of one step, sorted by pair = src * n + dst, and what is added up.

    `reduced` are bytes by rank, or None if the step adds up nothing.
    """

    pair: Ints
    nbytes: Floats
    reduced: Floats | None


def chunk_bytes(schedule: Schedule, nbytes: int | None) -> Floats:
    """The bytes of every slot when a rank's buffer has so many; None: one in all.

    A temporary is as large as the chunk that it replaces.
    """
    if schedule.collective is BARRIER:
        sizes = np.zeros(schedule.num_chunks)
    elif nbytes is None:
        share = 1.0 / schedule.contract.chunks_per_rank
        sizes = np.full(schedule.num_chunks, share)
    else:
        sizes = schedule.contract.chunk_sizes(nbytes).astype(np.float64)
    return np.resize(sizes, schedule.num_slots)


def in_range(schedule: Schedule) -> Iterator[Step]:
    """The steps, as `oracle.checked_steps` gives them, checked array by array.

    What a simulator uses as an index must be in range; which rule a transfer breaks is
    asked only when one does.
    """
    n, slots = schedule.n, schedule.num_slots
    for number, step in enumerate(schedule, start=1):
        limits = ((step.src, n), (step.dst, n), (step.chunk, slots), (step.into, slots))
        if any(array.min() < 0 or array.max() >= most for array, most in limits):
            broken = first_invalid(schedule, step)
            raise explain_rule(schedule, number, step, broken)
        yield step


def messages(step: Step, n: int, sizes: Floats, even: float | None) -> Messages:
    """The messages of a step; what stays on its rank is none.

    `even` is the size of all chunks, if they have but one.
    """
    if even is not None and step.chunk.ndim == 1 and len(step) <= BLOCK:
        return _few(step, n, even)
    pairs, amounts = [], []
    reduced = None if step.reduces is False else np.zeros(n)
    for part in _blocks(step):
        pair, nbytes = _runs(part, n, sizes, even)
        pairs.append(pair)
        amounts.append(nbytes)
        if reduced is not None:
            _, dst, chunk, mask, _ = part.flat()
            reduced += np.bincount(dst[mask], sizes[chunk[mask]], minlength=n)
    return Messages(*_merged(np.concatenate(pairs), np.concatenate(amounts)), reduced)


def _few(step: Step, n: int, even: float) -> Messages:
    """The usual case: a plain step, all chunks of one size."""
    src, dst = step.src, step.dst
    reduced: Floats | None = None
    if step.reduces is not False:
        to = dst if step.reduces is True else dst[step.mask]
        reduced = np.bincount(to, minlength=n).astype(np.float64) * even
    pair = src * n + dst
    if not (src != dst).all():
        pair = pair[src != dst]
    pair = np.sort(pair)
    if pair.size and (pair[1:] != pair[:-1]).all():
        return Messages(pair, np.full(pair.size, even), reduced)
    first = np.flatnonzero(np.append(True, pair[1:] != pair[:-1])[: pair.size])
    times = np.diff(np.append(first, pair.size))
    return Messages(pair[first], times * even, reduced)


def _blocks(step: Step) -> list[Step]:
    """The step cut into parts of bearable size."""
    if len(step) <= BLOCK or step.chunk.ndim == 1:
        return [step]
    rows = max(1, BLOCK * step.chunk.shape[0] // len(step))
    parts = []
    for at in range(0, step.chunk.shape[0], rows):
        some = slice(at, at + rows)
        reduces = step.reduces if isinstance(step.reduces, bool) else step.mask[some]
        chunk = step.chunk[some]
        into = chunk if step.into is step.chunk else step.into[some]
        parts.append(Step(step.src[some], step.dst[some], chunk, into, reduces))
    return parts


def _runs(step: Step, n: int, sizes: Floats, even: float | None) -> tuple[Ints, Floats]:
    """Pairs and bytes of each run of transfers with the same ends."""
    pair = (step.src * n + step.dst).ravel()
    first = np.flatnonzero(np.append(True, pair[1:] != pair[:-1])[: pair.size])
    if even is not None:
        nbytes = np.diff(np.append(first, pair.size)) * even
    else:
        nbytes = np.add.reduceat(sizes[step.chunk.ravel()], first)
    pairs = pair[first]
    apart = pairs // n != pairs % n
    return pairs[apart], nbytes[apart]


def _merged(pair: Ints, nbytes: Floats) -> tuple[Ints, Floats]:
    """Each pair once, with its bytes together."""
    order = np.argsort(pair, kind="stable")
    pair, nbytes = pair[order], nbytes[order]
    first = np.flatnonzero(np.append(True, pair[1:] != pair[:-1])[: pair.size])
    if not first.size:
        return pair, nbytes
    return pair[first], np.add.reduceat(nbytes, first)
