"""Which transfers must wait for which, read off the slots they touch.

Steps are simultaneous on paper; an executor need not stop between them. A transfer
reads its source slot (and its destination slot too, if it reduces) and later writes its
destination slot. It must wait for

    the last writers of what it reads         read after write
    the earlier readers of what it writes     write after read
    the last writers of what it writes        write after write

Every edge leads to a later step, so there is no cycle and no schedule can deadlock.
Within a step all reads come first; where two transfers of one step exchange a slot, the
executor must stage one of them; no edge orders them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from unisono.schedule.collective import Ints
from unisono.schedule.oracle import checked_steps
from unisono.schedule.protocol import ReadableSchedule
from unisono.schedule.step import runs


@dataclass(frozen=True, eq=False)
class Dependencies:
    """Edges between transfers, which are numbered: `after` waits for `before`.

    `step[t]` is the step, from 0, that transfer t belongs to. Edges are sorted by
    `after`.
    """

    before: Ints
    after: Ints
    step: Ints

    def __len__(self) -> int:
        """The number of edges."""
        return self.before.size

    def of(self, transfer: int) -> Ints:
        """The transfers that `transfer` waits for."""
        lo, hi = np.searchsorted(self.after, [transfer, transfer + 1])
        return self.before[lo:hi]

    def longest_chain(self) -> int:
        """The most transfers that must happen one after the other."""
        length = np.ones(self.step.size, dtype=np.int64)
        last = np.searchsorted(self.after, np.arange(self.step.size + 1))
        for at in np.unique(self.after).tolist():
            waits = self.before[last[at] : last[at + 1]]
            length[at] = 1 + length[waits].max()
        return int(length.max(initial=0))


def dependencies(schedule: ReadableSchedule) -> Dependencies:
    """All edges of `schedule`, which is materialised for it."""
    rows = [(i, *step.flat()) for i, step in enumerate(checked_steps(schedule))]
    if not rows:
        nothing = np.empty(0, dtype=np.int64)
        return Dependencies(nothing, nothing, nothing)
    step = np.concatenate([np.full(src.size, i) for i, src, *_ in rows])
    src, dst, chunk, mask, into = (
        np.concatenate([row[k] for row in rows]) for k in range(1, 6)
    )
    transfer = np.arange(step.size)
    writes = into * schedule.n + dst
    reads = np.concatenate([chunk * schedule.n + src, writes[mask]])
    reader = np.concatenate([transfer, transfer[mask]])

    edges = [
        _latest_before(writes, step, transfer, reads, step[reader], reader),
        _latest_before(writes, step, transfer, writes, step, transfer),
        _since(reads, step[reader], reader, writes, step, transfer),
    ]
    code = np.concatenate([after * step.size + before for before, after in edges])
    code = np.unique(code)
    return Dependencies(code % step.size, code // step.size, step)


def _latest_before(
    slot: Ints, when: Ints, who: Ints, wanted: Ints, now: Ints, asks: Ints
) -> tuple[Ints, Ints]:
    """For each (slot, now), all events of the last earlier step that has any."""
    order = np.lexsort((when, slot))
    slot, when, who = slot[order], when[order], who[order]
    key, horizon = _keys(slot, when, wanted, now)
    at = (
        np.searchsorted(key, horizon) - 1
    )  # the last event before now, perhaps elsewhere
    matches = (at >= 0) & (slot[at] == wanted)
    first = np.searchsorted(key, key[at[matches]])
    return _expand(first, at[matches] + 1, who, asks[matches])


def _since(
    slot: Ints, when: Ints, who: Ints, wanted: Ints, now: Ints, asks: Ints
) -> tuple[Ints, Ints]:
    """For each write (slot, now), all reads since the last write before it.

    A read in the step of a write saw what was there before, so it belongs to the reads
    that this write, not the next one, must wait for; being in the same step, it needs
    no edge.
    """
    order = np.lexsort((when, slot))
    slot, when, who = slot[order], when[order], who[order]
    key, horizon = _keys(slot, when, wanted, now)
    end = np.searchsorted(key, horizon)
    write_order = np.lexsort((now, wanted))
    write_key = horizon[write_order]
    previous = np.searchsorted(write_key, horizon) - 1
    same = (previous >= 0) & (wanted[write_order][previous] == wanted)
    floor = np.where(same, write_key[previous] + 1, wanted * (_span(when, now)))
    start = np.searchsorted(key, floor)
    return _expand(start, np.maximum(start, end), who, asks)


def _span(when: Ints, now: Ints) -> int:
    return int(max(when.max(initial=0), now.max(initial=0))) + 2


def _keys(slot: Ints, when: Ints, wanted: Ints, now: Ints) -> tuple[Ints, Ints]:
    """Slot and step as one sortable number, for events and for questions."""
    span = _span(when, now)
    return slot * span + when, wanted * span + now


def _expand(start: Ints, end: Ints, who: Ints, asks: Ints) -> tuple[Ints, Ints]:
    """The pairs (who[i], asker) for every i in each asker's start..end-1."""
    asker, nth = runs(end - start)
    return who[start[asker] + nth], asks[asker]
