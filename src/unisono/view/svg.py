"""A schedule as SVG: small multiples, one panel a step, with arrows.

The grammar is that of the text. Rank is a column, chunk a row; a cell has one segment
for each contributor, filled with that rank's colour (and its letter, where there is
room) once its share is in. A ring around a cell marks one that has just changed. Arrows
are transfers: a full head adds, a hollow head copies. Above sixteen ranks each phase
becomes a table of bytes by sender and receiver.

The file is self-contained, follows the reader's light or dark theme, and says in words
what it shows.
"""

from __future__ import annotations

import math
import textwrap
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from itertools import groupby

import numpy as np

from unisono.schedule.counts import Floats, sent_between
from unisono.schedule.schedule import Schedule
from unisono.view.facts import facts
from unisono.view.frames import (
    StepFrame,
    frames,
    is_small,
    letter,
    refuse_if_huge,
    row_names,
)

HUES = (210, 30, 130, 330, 270, 50, 175, 0, 230, 90, 300, 15, 195, 65, 250, 345)
ROW, GAP, HEAD, MARGIN = 20, 14, 58, 24
_MAX_BINS = 64
_MAX_WIDTH = 1180

_STYLE = """
.u{font:12px system-ui,sans-serif;fill:#1b1f24}.u .t{font-size:18px;font-weight:600}
.u .p{font-weight:600}.u .l{font-size:10px;fill:#59636e}.u .c{fill:#fff;stroke:#c9d1d9}
.u .k{font:600 9px ui-monospace,monospace;fill:#fff;text-anchor:middle}
.u .r{fill:none;stroke:#1b1f24;stroke-width:1.6}
.u .x{fill:none;stroke:#cf222e;stroke-width:2.5}
.u .a{fill:none;stroke:#1b1f24;stroke-width:1;opacity:.75}.u .b{fill:#eef1f4}
.u .bg{fill:#fff}.u .h{fill:#1b1f24}.u .o{fill:#fff;stroke:#1b1f24}
@media(prefers-color-scheme:dark){
.u{fill:#e6edf3}.u .bg{fill:#0d1117}.u .l{fill:#9198a1}
.u .c{fill:#161b22;stroke:#3d444d}.u .r,.u .a{stroke:#e6edf3}.u .b{fill:#1c2128}
.u .h{fill:#e6edf3}.u .o{fill:#0d1117;stroke:#e6edf3}}
"""


def to_svg(schedule: Schedule) -> str:
    """The picture of a schedule, costed and proven; ScheduleError if it is wrong."""
    refuse_if_huge(schedule.n)
    sentences = facts(schedule)
    key = f"u{zlib.crc32(schedule.title.encode()):08x}"  # several may share a page
    body = _panels(schedule, key) if is_small(schedule) else _tables(schedule)
    foot = body.height + HEAD + MARGIN
    sentence_lines = list(_wrapped_facts(sentences))
    height = foot + 20 * len(sentence_lines) + MARGIN
    lines = [
        f'<text x="{MARGIN}" y="{foot + 20 * i}">{line}</text>'
        for i, line in enumerate(sentence_lines)
    ]
    longest = max(len(line) for line in sentence_lines)
    content = max(body.width, 6.4 * longest, 5.6 * len(_key(schedule)))
    width = content + 2 * MARGIN
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="u" role="img" '
            f'width="{width:.0f}" height="{height:.0f}" '
            f'viewBox="0 0 {width:.0f} {height:.0f}" '
            f'aria-labelledby="{key}-title {key}-desc">',
            f'<title id="{key}-title">{escape(schedule.title)}</title>',
            f'<desc id="{key}-desc">{escape(_words(schedule, sentences))}</desc>',
            f"<style>{_STYLE.strip()}</style>",
            _MARKERS.format(key=key),
            f'<rect class="bg" width="{width:.0f}" height="{height:.0f}"/>',
            f'<text class="t" x="{MARGIN}" y="28">{escape(schedule.title)}</text>',
            f'<text class="l" x="{MARGIN}" y="44">{escape(_key(schedule))}</text>',
            f'<g transform="translate({MARGIN} {HEAD})">',
            *body.parts,
            "</g>",
            *lines,
            "</svg>\n",
        ]
    )


def _wrapped_facts(sentences: list[tuple[str, str]]) -> Iterator[str]:
    """The facts as lines of a readable length, the first word of each set off."""
    for word, sentence in sentences:
        first, *rest = textwrap.wrap(sentence, 120)
        yield f'<tspan class="p">{word}</tspan> {escape(first)}'
        yield from (escape(line) for line in rest)


_HEAD_SHAPE = 'viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7"'
_MARKERS = (
    f'<defs><marker id="{{key}}-add" {_HEAD_SHAPE} orient="auto"><path class="h" '
    f'd="M0 0 8 4 0 8z"/></marker><marker id="{{key}}-copy" {_HEAD_SHAPE} '
    'orient="auto"><path class="o" d="M.5 .5 7.5 4 .5 7.5z"/></marker></defs>'
)


@dataclass(frozen=True)
class _Drawing:
    """Parts of a picture, and how large they are together."""

    width: float
    height: float
    parts: list[str]


def _key(schedule: Schedule) -> str:
    """How to read the picture."""
    if not is_small(schedule):
        return "Who sends how much to whom, phase by phase."
    cell = (
        "one segment for each rank's share"
        if schedule.collective.reduces
        else ("the rank it began at")
    )
    return (
        f"Ranks are columns, chunks rows; in a cell, {cell}. An arrow with a full "
        "head adds, with a hollow head copies; ringed cells have just changed."
    )


def _words(schedule: Schedule, sentences: list[tuple[str, str]]) -> str:
    steps = f"{schedule.num_steps} steps among {schedule.n} ranks"
    text = ". ".join(sentence for _, sentence in sentences)
    return f"{schedule.about or schedule.title} {steps}. {text}."


def _panels(schedule: Schedule, key: str) -> _Drawing:
    """One panel for the start and one for each step, in reading order."""
    names = row_names(schedule)
    label = 7 + 5.6 * max(len(name) for name in names)
    cell = max(26.0, 9.0 * schedule.n) if schedule.collective.reduces else 26.0
    width = _left(schedule.n, label, cell) + GAP
    height = len(names) * ROW + 46 + GAP
    columns = max(1, min(int(_MAX_WIDTH // width), schedule.num_steps + 1))
    parts: list[str] = []
    for i, frame in enumerate(frames(schedule)):
        x, y = i % columns * width, i // columns * height
        parts.append(f'<g transform="translate({x:.1f} {y:.1f})">')
        parts.extend(_panel(schedule, frame, names, label, cell))
        parts.extend(_arrows(frame, label, cell, key))
        parts.append("</g>")
    rows = math.ceil((schedule.num_steps + 1) / columns)
    return _Drawing(columns * width, rows * height, parts)


def _panel(
    schedule: Schedule, frame: StepFrame, names: list[str], label: float, cell: float
) -> Iterator[str]:
    n = schedule.n
    band = _left(n, label, cell)
    yield f'<rect class="b" width="{band:.1f}" height="20" rx="4"/>'
    caption = f"step {frame.number}" if frame.number else "start"
    yield f'<text class="p" x="6" y="14">{caption}</text>'
    yield _label(band - 6, 14, frame.phase, "end")
    for rank in range(n):
        middle = _left(rank, label, cell) + cell / 2
        yield _label(middle, 34, str(rank), "middle")
    for row, name in enumerate(names):
        y = 40 + row * ROW
        yield _label(label - 6, y + 11, name, "end")
        for rank in range(n):
            x = _left(rank, label, cell)
            yield from _cell(schedule, frame, row, rank, x, y, cell)


def _left(rank: int, label: float, cell: float) -> float:
    """Where a rank's column begins, right of the labels."""
    return label + rank * (cell + 6)


def _cell(
    schedule: Schedule,
    frame: StepFrame,
    row: int,
    rank: int,
    x: float,
    y: float,
    cell: float,
) -> Iterator[str]:
    held = frame.rows[row][rank]
    yield f'<rect class="c" x="{x:.1f}" y="{y}" width="{cell:.1f}" height="14" rx="2"/>'
    whole = not schedule.collective.reduces
    part = cell if whole else cell / schedule.n
    for other in range(schedule.n):
        if held.ranks >> other & 1:
            at = x if whole else x + other * part
            yield (
                f'<rect x="{at:.1f}" y="{y}" width="{part:.1f}" height="14" '
                f'rx="2" fill="{_colour(other)}"/>'
            )
            if part >= 8:
                middle, sign = at + part / 2, letter(other)
                yield f'<text class="k" x="{middle:.1f}" y="{y + 10}">{sign}</text>'
    if held.changed or held.spoilt:
        ring = "x" if held.spoilt else "r"
        yield (
            f'<rect class="{ring}" x="{x - 1:.1f}" y="{y - 1}" width="{cell + 2:.1f}" '
            'height="16" rx="3"/>'
        )


def _colour(rank: int) -> str:
    return f"hsl({HUES[rank % len(HUES)]} 55% {42 if rank < 8 else 34}%)"


def _arrows(frame: StepFrame, label: float, cell: float, key: str) -> Iterator[str]:
    """An arc for each transfer, from the source's cell to the destination's."""
    for t in frame.transfers:
        if t.src == t.dst:
            continue
        y, to = 40 + t.chunk * ROW, 40 + t.into * ROW
        rightwards = t.src < t.dst
        left, right = (_left(rank, label, cell) for rank in (t.src, t.dst))
        start = left + (cell * 0.8 if rightwards else cell * 0.2)
        end = right + (cell * 0.15 if rightwards else cell * 0.85)
        bend = y - min(16.0, 5 + abs(end - start) / 40)
        head = "add" if t.reduces else "copy"
        yield (
            f'<path class="a" d="M{start:.1f} {y} Q{(start + end) / 2:.1f} {bend:.1f} '
            f'{end:.1f} {to}" marker-end="url(#{key}-{head})"/>'
        )


def _tables(schedule: Schedule) -> _Drawing:
    """For each phase a table of who sends how much to whom, many ranks in one line."""
    side, gap = 216.0, 60.0
    together = math.ceil(schedule.n / _MAX_BINS)
    bins = math.ceil(schedule.n / together)
    bin_of = np.arange(schedule.n) // together
    parts: list[str] = []
    count = 0
    for name, steps in groupby(schedule, key=lambda s: s.phase):
        traffic: Floats = np.zeros((bins, bins))
        for number, step in enumerate(steps, start=1):  # noqa: B007
            traffic += sent_between([step], bin_of)
        x = count * (side + gap)
        parts.append(f'<g transform="translate({x:.1f} 0)">')
        parts.extend(_table(name, number, traffic, side, schedule.n))
        parts.append("</g>")
        count += 1
    return _Drawing(max(count, 1) * (side + gap), side + 70, parts)


def _table(
    name: str, number: int, traffic: Floats, side: float, n: int
) -> Iterator[str]:
    bins = len(traffic)
    part = side / bins
    most = traffic.max() or 1
    steps = f"{number} step" + ("s" if number > 1 else "")
    yield f'<text class="p" x="0" y="14">{escape(name)}</text>'
    yield _label(side, 14, steps, "end")
    yield f'<rect class="c" x="0" y="24" width="{side:.1f}" height="{side:.1f}"/>'
    for i, j in np.argwhere(traffic > 0):
        shade = 0.25 + 0.75 * traffic[i, j] / most
        yield (
            f'<rect x="{j * part:.2f}" y="{24 + i * part:.2f}" width="{part:.2f}" '
            f'height="{part:.2f}" fill="{_colour(0)}" opacity="{shade:.2f}"/>'
        )
    yield _label(0, side + 38, f"down: from rank 0 to {n - 1}")
    yield _label(0, side + 52, f"across: to rank 0 to {n - 1}; the darker, the more")


def _label(x: float, y: float, text: str, anchor: str = "start") -> str:
    """Small print."""
    return (
        f'<text class="l" x="{x:.1f}" y="{y:.0f}" text-anchor="{anchor}">'
        f"{escape(text)}</text>"
    )
