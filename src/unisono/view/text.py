"""A schedule as text: one grid per step, then what it costs and what was proven.

    step 2/8  reduce_scatter    0→1 chunk 3, 1→2 chunk 4, ...
               rank 0   rank 1   rank 2   rank 3   rank 4
      chunk 0   a····    ·b···   [·bc··]   ...

Letters are contributions, by rank; brackets mark cells that have just changed; an
exclamation mark, one that holds something wrong. Above eight ranks a cell is dots, one
for each contribution; above sixteen, each phase is summed up in a line.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from itertools import groupby

import numpy as np

from unisono.algorithms.library import schedule as named_schedule
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
    letter,
    refuse_if_huge,
    row_names,
)

WIDTH = 88
_MAX_LETTERS = 8
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
    schedule = (
        named_schedule(what, algorithm, n, root=root) if isinstance(what, str) else what
    )
    refuse_if_huge(schedule.n)
    words = advice(schedule, lang)
    sentences = [*facts(schedule), *words]
    lines = [*_head(schedule), "", picture(schedule), "", *_foot(sentences)]
    return Explanation("\n".join(lines), schedule)


def picture(schedule: Schedule) -> str:
    """The steps alone: every one, or the phases if there is too much to draw."""
    refuse_if_huge(schedule.n)
    if is_small(schedule):
        return "\n\n".join("\n".join(_grid(schedule, f)) for f in frames(schedule))
    return "\n".join(_summary(schedule))


def _head(schedule: Schedule) -> Iterator[str]:
    yield schedule.title
    what = schedule.collective
    yield f"  {what.name}: {what.meaning}."
    if schedule.about:
        yield f"  {schedule.name}: {schedule.about}"
    if not is_small(schedule):
        return
    if what.reduces and schedule.n <= _MAX_LETTERS:
        last = schedule.n - 1
        key = f"a is rank 0's contribution, {letter(last)} rank {last}'s"
        yield f"  In the cells {key}; [ ] has just changed."
    elif what.reduces:
        yield "  In the cells a dot for each rank's contribution; [ ] has just changed."
    else:
        yield "  In the cells the letter of the rank it began at; [ ] has just changed."


def _foot(sentences: list[tuple[str, str]]) -> Iterator[str]:
    for word, line in sentences:
        yield from wrapped(word, line, WIDTH)


def _grid(schedule: Schedule, frame: StepFrame) -> Iterator[str]:
    names = row_names(schedule)
    label = max(len(name) for name in names) + 2
    cells = [[_cell(schedule, c) for c in row] for row in frame.rows]
    roomy = schedule.n <= _MAX_LETTERS
    heads = [f"rank {r}" if roomy else str(r) for r in range(schedule.n)]
    width = max(len(text) for text in (*heads, *(c for row in cells for c in row))) + 1
    yield from _caption(schedule, frame, names)
    rows = [("" if roomy else "rank", heads), *zip(names, cells, strict=True)]
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
    if not schedule.collective.reduces:
        text = next((letter(r) for r in range(schedule.n) if cell.ranks >> r & 1), "·")
    elif schedule.n <= _MAX_LETTERS:
        text = "".join(
            letter(r) if cell.ranks >> r & 1 else "·" for r in range(schedule.n)
        )
    else:
        text = _dots(cell.ranks, schedule.n)
    if cell.spoilt:
        return f"!{text}!"
    return f"[{text}]" if cell.changed else f" {text} "


def _dots(ranks: int, n: int) -> str:
    """Eight contributions to a braille character, filled column by column."""
    places = (0, 1, 2, 6, 3, 4, 5, 7)  # the bits of Unicode's braille patterns
    signs = []
    for first in range(0, n, 8):
        here = [places[i] for i in range(8) if ranks >> (first + i) & 1]
        signs.append(chr(0x2800 + sum(1 << bit for bit in here)))
    return "".join(signs)


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
