"""Steps that do the same, put together: how a schedule is shown beyond eight ranks.

A group has one sentence for all its steps, and the state after the last of them; a cell
has changed if any of the steps has written to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby

from unisono.schedule.schedule import Schedule
from unisono.view.captions import action
from unisono.view.frames import SlotView, StepFrame, frames

MOST_GROUPS = 10
"""With more groups than this, all steps of a phase are one group."""


@dataclass(frozen=True)
class StepGroup:
    """Steps `first` to `last`, and the state after them; 0 to 0 is the start."""

    first: int
    last: int
    phase: str
    action: str
    frame: StepFrame

    @property
    def name(self) -> str:
        """As in "steps 2-4"; the group before the first step is "start"."""
        if not self.last:
            return "start"
        several = self.first < self.last
        return f"steps {self.first}-{self.last}" if several else f"step {self.last}"


_Acted = tuple[StepFrame, str]


def groups(schedule: Schedule) -> list[StepGroup]:
    """The start, and all steps in groups."""
    start, *steps = _with_actions(schedule)
    found = list(_grouped(steps, lambda s: (s[0].phase, s[1])))
    if len(found) > MOST_GROUPS:
        found = list(_grouped(steps, lambda s: s[0].phase))
    return [StepGroup(0, 0, "", "", start[0]), *found]


def _with_actions(schedule: Schedule) -> Iterator[_Acted]:
    """Every frame with what its step does, in words."""
    whole = (1 << schedule.n) - 1
    before: StepFrame | None = None
    for frame in frames(schedule):
        words = ""
        if before is not None:
            held = (before.rows[t.chunk][t.src].ranks for t in frame.transfers)
            finished = all(bits == whole for bits in held)
            words = action(schedule, frame.transfers, finished)
        yield frame, words
        before = frame


def _grouped(
    steps: list[_Acted], key: Callable[[_Acted], object]
) -> Iterator[StepGroup]:
    for _, group in groupby(steps, key):
        some = list(group)
        first, last = some[0][0], some[-1][0]
        words = {acted for _, acted in some}
        text = words.pop() if len(words) == 1 else _in_numbers(some)
        frame = replace(last, rows=_changed(some))
        yield StepGroup(first.number, last.number, last.phase, text, frame)


def _in_numbers(some: list[_Acted]) -> str:
    """Steps that differ: how many messages there are."""
    sent = [
        len({(t.src, t.dst) for t in frame.transfers if t.src != t.dst})
        for frame, _ in some
    ]
    return f"{sum(sent)} messages, up to {max(sent)} in one step"


def _changed(some: list[_Acted]) -> tuple[tuple[SlotView, ...], ...]:
    """The last state; changed is what was written in any of the steps."""
    last = some[-1][0].rows
    return tuple(
        tuple(
            replace(cell, changed=any(f.rows[r][k].changed for f, _ in some))
            for k, cell in enumerate(row)
        )
        for r, row in enumerate(last)
    )
