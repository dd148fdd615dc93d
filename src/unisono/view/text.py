"""A schedule as text: one grid per step, then what it costs and what was proven.

    step 2/8  reduce_scatter    0→1 chunk 3, 1→2 chunk 4, ...
               rank 0   rank 1   rank 2   rank 3   rank 4
      chunk 0   a····    ·b···   [·bc··]   ...

Letters are contributions, by rank; brackets mark cells that have just changed; an
exclamation mark, one that holds something wrong. Above eight ranks steps that do the
same have one grid, with the number of contributions in each cell; above sixteen, each
phase is summed up in a line.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from itertools import groupby

import numpy as np

from unisono.schedule.schedule import Schedule
from unisono.schedule.step import Step, Transfer
from unisono.view.advice import advice, wrapped
from unisono.view.explanation import Explanation
from unisono.view.facts import facts
from unisono.view.frames import (
    SlotView,
    StepFrame,
    frames,
    is_small,
    is_stepwise,
    letter,
    refuse_if_huge,
    row_names,
)
from unisono.view.groups import StepGroup, groups
from unisono.view.named import as_schedule

WIDTH = 88
_MAX_MOVES = 24


def explain(
    what: Schedule | str,
    algorithm: str = "ring",
    n: int = 4,
    *,
    root: int = 0,
    lang: str = "en",
) -> Explanation:
    """The schedule drawn step by step, costed and proven; or ScheduleError.

    It is given as such, or by names as on the command line: a collective, an algorithm
    and a number of ranks. It is text; notebooks show it as a picture, or play it (see
    `explanation`). `lang`, en or zh, is the language that says when it is good.
    """
    schedule = as_schedule(what, algorithm, n, root)
    refuse_if_huge(schedule.n)
    words = advice(schedule, lang)
    sentences = [*facts(schedule), *words]
    lines = [*_head(schedule), "", picture(schedule), "", *_foot(sentences)]
    return Explanation("\n".join(lines), schedule)


def picture(schedule: Schedule) -> str:
    """The steps alone: every one, groups of them, or phases, by how many ranks."""
    refuse_if_huge(schedule.n)
    if is_stepwise(schedule):
        return "\n\n".join("\n".join(_grid(schedule, f)) for f in frames(schedule))
    if is_small(schedule):
        parts = (_grouped_grid(schedule, group) for group in groups(schedule))
        return "\n\n".join("\n".join(lines) for lines in parts)
    return "\n".join(_summary(schedule))


def _head(schedule: Schedule) -> Iterator[str]:
    yield schedule.title
    what = schedule.collective
    yield f"  {what.name}: {what.meaning}."
    if schedule.about:
        yield f"  {schedule.name}: {schedule.about}"
    if not is_small(schedule):
        return
    if not is_stepwise(schedule):
        key = "the number of contributions" if what.reduces else "the rank it began at"
        yield f"  In the cells {key}; [ ] has changed since the grid before."
    elif what.reduces:
        last = schedule.n - 1
        key = f"a is rank 0's contribution, {letter(last)} rank {last}'s"
        yield f"  In the cells {key}; [ ] has just changed."
    else:
        yield "  In the cells the letter of the rank it began at; [ ] has just changed."


def _foot(sentences: list[tuple[str, str]]) -> Iterator[str]:
    for word, line in sentences:
        yield from wrapped(word, line, WIDTH)


def _grid(schedule: Schedule, frame: StepFrame) -> Iterator[str]:
    names = row_names(schedule)
    yield from _caption(schedule, frame, names)
    heads = [f"rank {r}" for r in range(schedule.n)]
    cells = [[_cell(schedule, c) for c in row] for row in frame.rows]
    rows = [("", heads), *zip(names, cells, strict=True)]
    yield from _table(names, rows, gap=1)


def _grouped_grid(schedule: Schedule, group: StepGroup) -> Iterator[str]:
    if group.last:
        yield f"{group.name}/{schedule.num_steps}  {group.phase}"
        yield textwrap.fill(
            f"{group.action}.", WIDTH, initial_indent="  ", subsequent_indent="    "
        )
    else:
        yield group.name
    names = row_names(schedule)
    cells = [[_count(schedule, c) for c in row] for row in group.frame.rows]
    heads = [f" {r:2} " for r in range(schedule.n)]
    yield from _table(names, [("rank", heads), *zip(names, cells, strict=True)], gap=0)


def _table(
    names: list[str], rows: list[tuple[str, list[str]]], gap: int
) -> Iterator[str]:
    """Rows of cells, all of one width, behind their names."""
    label = max(len(name) for name in names) + 2
    width = max(len(cell) for _, row in rows for cell in row) + gap
    for name, row in rows:
        yield f"{name:>{label}} {''.join(c.center(width) for c in row)}".rstrip()


def _caption(schedule: Schedule, frame: StepFrame, names: list[str]) -> Iterator[str]:
    if not frame.number:
        yield "start"
        return
    yield f"step {frame.number}/{schedule.num_steps}  {frame.phase}"
    yield textwrap.fill(
        _moves(frame.transfers, names, schedule.num_chunks),
        WIDTH,
        initial_indent="  ",
        subsequent_indent="    ",
    )


def _moves(transfers: Iterable[Transfer], names: list[str], num_chunks: int) -> str:
    """Who sends which chunks to whom, in words: "add 0→1 chunk 4, 1→2 chunk 0"."""

    def key(t: Transfer) -> tuple[bool, int, int, bool]:
        return t.reduces, t.src, t.dst, t.chunk != t.into

    lines: dict[bool, list[str]] = {False: [], True: []}
    for (reduces, src, dst, renamed), group in groupby(sorted(transfers, key=key), key):
        some = list(group)
        what = _chunks([t.chunk for t in some])
        if renamed or some[0].chunk >= num_chunks:
            what = ", ".join(f"{names[t.chunk]} into {names[t.into]}" for t in some)
        lines[reduces].append(f"{src}→{dst} {what}")
    parts = []
    for verb, messages in (("copy", lines[False]), ("add", lines[True])):
        if len(messages) > _MAX_MOVES:
            rest = len(messages) - _MAX_MOVES
            messages = [*messages[:_MAX_MOVES], f"and {rest} more"]
        if messages:
            parts.append(f"{verb} {', '.join(messages)}")
    return "; ".join(parts)


def _chunks(chunks: list[int]) -> str:
    """ "chunk 3", or "chunks 0-2 5"."""
    runs: list[list[int]] = []
    for c in sorted(chunks):
        if runs and c == runs[-1][-1] + 1:
            runs[-1].append(c)
        else:
            runs.append([c])
    ranges = [str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs]
    return ("chunk " if len(chunks) == 1 else "chunks ") + " ".join(ranges)


def _cell(schedule: Schedule, cell: SlotView) -> str:
    signs = [letter(r) if cell.ranks >> r & 1 else "·" for r in range(schedule.n)]
    if schedule.collective.reduces:
        return _marked("".join(signs), cell)
    return _marked(next((sign for sign in signs if sign != "·"), "·"), cell)


def _count(schedule: Schedule, cell: SlotView) -> str:
    """How many contributions are in a cell, or at which rank its content began."""
    if not cell.ranks:
        return _marked(" ·", cell)
    origin = cell.ranks.bit_length() - 1
    number = cell.ranks.bit_count() if schedule.collective.reduces else origin
    return _marked(f"{number:2}", cell)


def _marked(text: str, cell: SlotView) -> str:
    if cell.spoilt:
        return f"!{text}!"
    return f"[{text}]" if cell.changed else f" {text} "


def _summary(schedule: Schedule) -> Iterator[str]:
    """A line for each phase: how many steps, messages and chunks, and how far."""
    yield f"{'steps':>13}  {'phase':<24} {'messages':>10} {'chunks each':>12}  distance"
    number = 0
    for name, steps in groupby(schedule, key=lambda s: s.phase):
        first, total, sizes, far = number + 1, 0, [], []
        for step in steps:
            number += 1
            messages, chunks, distance = _traffic(step, schedule.n)
            total += messages
            sizes.append(chunks)
            far.append(distance)
        span = f"{first:,}-{number:,}" if number > first else f"{first:,}"
        yield (
            f"{span:>13}  {name:<24} {total:>10,} "
            f"{_range([lo for lo, _ in sizes], [hi for _, hi in sizes]):>12}  "
            f"{_range([lo for lo, _ in far], [hi for _, hi in far])}"
        )


def _traffic(step: Step, n: int) -> tuple[int, tuple[int, int], tuple[int, int]]:
    """Messages, the fewest and most chunks in one, the shortest and longest way."""
    src, dst, *_ = step.flat()
    apart = src != dst
    pair, sizes = np.unique((src * n + dst)[apart], return_counts=True)
    if not pair.size:
        return 0, (0, 0), (0, 0)
    distance = np.abs(pair // n - pair % n)
    distance = np.minimum(distance, n - distance)
    return (
        pair.size,
        (int(sizes.min()), int(sizes.max())),
        (int(distance.min()), int(distance.max())),
    )


def _range(low: list[int], high: list[int]) -> str:
    least, most = min(low), max(high)
    return f"{least:,}" if least == most else f"{least:,}-{most:,}"
