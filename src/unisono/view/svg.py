"""A schedule as SVG: small multiples, one panel a step, with arrows.

The grammar is that of the text. Rank is a column, chunk a row; a cell has one segment
for each contributor, filled with that rank's colour (and its letter, where there is
room) once its share is in. A ring around a cell marks one that has just changed. Arrows
are transfers: a full head adds, a hollow head copies. Above eight ranks steps that do
the same are one panel (`svg_groups`); above sixteen each phase becomes a table of bytes
by sender and receiver.

The file is self-contained, follows the reader's light or dark theme, and says in words
what it shows.
"""

from __future__ import annotations

import math
import textwrap
import zlib
from collections.abc import Iterator
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
    is_stepwise,
    letter,
    refuse_if_huge,
    row_names,
)
from unisono.view.named import as_schedule
from unisono.view.svg_groups import grouped_panels
from unisono.view.svg_parts import (
    GAP,
    MAX_WIDTH,
    ROW,
    STYLE,
    TOP,
    Box,
    Drawing,
    boxes,
    colour,
    frame_of_panel,
    head,
    label,
    label_width,
    left,
    number,
    rings,
    shared,
    signs,
    use,
)

HEAD, MARGIN = 58, 24
_MAX_BINS = 64


def to_svg(
    what: Schedule | str, algorithm: str = "ring", n: int = 4, *, root: int = 0
) -> str:
    """The picture of a schedule, costed and proven; ScheduleError if it is wrong.

    It is given as such, or by names, as to `explain`.
    """
    schedule = as_schedule(what, algorithm, n, root)
    refuse_if_huge(schedule.n)
    sentences = facts(schedule)
    key = f"u{zlib.crc32(schedule.title.encode()):08x}"  # several may share a page
    body = _body(schedule, key)
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
            f"<style>{STYLE.strip()}</style>",
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


def _body(schedule: Schedule, key: str) -> Drawing:
    """Every step, groups of steps, or phases: as much as can be read."""
    if is_stepwise(schedule):
        return _panels(schedule, key)
    return grouped_panels(schedule, key) if is_small(schedule) else _tables(schedule)


def _key(schedule: Schedule) -> str:
    """How to read the picture."""
    if not is_small(schedule):
        return "Who sends how much to whom, phase by phase."
    if not is_stepwise(schedule):
        count = "the number of contributions in it"
        cell = count if schedule.collective.reduces else "the rank it began at"
        return (
            f"Ranks are columns, chunks rows; in a cell, {cell}. Ringed cells have "
            "changed since the panel before."
        )
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


def _panels(schedule: Schedule, key: str) -> Drawing:
    """One panel for the start and one for each step, in reading order."""
    names = row_names(schedule)
    margin = label_width(names)
    cell = max(26.0, 9.0 * schedule.n) if schedule.collective.reduces else 26.0
    width = left(schedule.n, margin, cell) + GAP
    height = len(names) * ROW + 46 + GAP
    columns = max(1, min(int(MAX_WIDTH // width), schedule.num_steps + 1))
    parts = [shared(key, frame_of_panel(names, schedule.n, margin, cell))]
    for i, frame in enumerate(frames(schedule)):
        x, y = i % columns * width, i // columns * height
        parts.append(f'<g transform="translate({number(x)} {number(y)})">')
        parts.extend(_panel(schedule, frame, margin, cell, key))
        parts.extend(_arrows(frame, margin, cell, key))
        parts.append("</g>")
    rows = math.ceil((schedule.num_steps + 1) / columns)
    return Drawing(columns * width, rows * height, parts)


def _panel(
    schedule: Schedule, frame: StepFrame, margin: float, cell: float, key: str
) -> Iterator[str]:
    caption = f"step {frame.number}" if frame.number else "start"
    yield from head(left(schedule.n, margin, cell), caption, frame.phase)
    yield use(key)
    places = [
        (left(rank, margin, cell), float(TOP + row * ROW), held)
        for row, line in enumerate(frame.rows)
        for rank, held in enumerate(line)
    ]
    yield from _contents(schedule, frame, margin, cell)
    changed = [(x, y, cell) for x, y, held in places if held.changed]
    spoilt = [(x, y, cell) for x, y, held in places if held.spoilt]
    yield from rings([box for box in changed if box not in spoilt], "r")
    yield from rings(spoilt, "x")


def _contents(
    schedule: Schedule, frame: StepFrame, margin: float, cell: float
) -> Iterator[str]:
    """The contributions in all cells, with their letters where there is room."""
    n, whole = schedule.n, not schedule.collective.reduces
    part = cell if whole else cell / n
    shares: list[list[Box]] = [[] for _ in range(n)]
    lines: list[str] = []
    for row, line in enumerate(frame.rows):
        y = float(TOP + row * ROW)
        found: list[tuple[float, str]] = []
        for rank, held in enumerate(line):
            x = left(rank, margin, cell)
            for other in range(n):
                if held.ranks >> other & 1:
                    at = x if whole else x + other * part
                    shares[other].append((at, y, part))
                    found.append((at + part / 2, letter(other)))
        lines += signs(y + 10, found, "k")
    for other, share in enumerate(shares):
        yield from boxes(share, f'fill="{colour(other)}"')
    yield from lines


def _arrows(frame: StepFrame, margin: float, cell: float, key: str) -> Iterator[str]:
    """An arc for each transfer, from the source's cell to the destination's."""
    for t in frame.transfers:
        if t.src == t.dst:
            continue
        y, to = TOP + t.chunk * ROW, TOP + t.into * ROW
        rightwards = t.src < t.dst
        near, far = (left(rank, margin, cell) for rank in (t.src, t.dst))
        start = near + (cell * 0.8 if rightwards else cell * 0.2)
        end = far + (cell * 0.15 if rightwards else cell * 0.85)
        bend = y - min(16.0, 5 + abs(end - start) / 40)
        tip = "add" if t.reduces else "copy"
        yield (
            f'<path class="a" d="M{number(start)} {y}Q{number((start + end) / 2)} '
            f'{number(bend)} {number(end)} {to}" marker-end="url(#{key}-{tip})"/>'
        )


def _tables(schedule: Schedule) -> Drawing:
    """For each phase a table of who sends how much to whom, many ranks in one line."""
    side, gap = 216.0, 60.0
    together = math.ceil(schedule.n / _MAX_BINS)
    bins = math.ceil(schedule.n / together)
    bin_of = np.arange(schedule.n) // together
    parts: list[str] = []
    count = 0
    for name, steps in groupby(schedule, key=lambda s: s.phase):
        traffic: Floats = np.zeros((bins, bins))
        some = list(steps)
        traffic += sent_between(some, bin_of)
        x = count * (side + gap)
        parts.append(f'<g transform="translate({x:.1f} 0)">')
        parts.extend(_table(name, len(some), traffic, side, schedule.n))
        parts.append("</g>")
        count += 1
    return Drawing(max(count, 1) * (side + gap), side + 70, parts)


def _table(
    name: str, steps: int, traffic: Floats, side: float, n: int
) -> Iterator[str]:
    bins = len(traffic)
    part = side / bins
    most = traffic.max() or 1
    many = f"{steps} step" + ("s" if steps > 1 else "")
    yield f'<text class="p" x="0" y="14">{escape(name)}</text>'
    yield label(side, 14, many, "end")
    yield f'<rect class="c" x="0" y="24" width="{side:.1f}" height="{side:.1f}"/>'
    for i, j in np.argwhere(traffic > 0):
        shade = 0.25 + 0.75 * traffic[i, j] / most
        yield (
            f'<rect x="{j * part:.2f}" y="{24 + i * part:.2f}" width="{part:.2f}" '
            f'height="{part:.2f}" fill="{colour(0)}" opacity="{shade:.2f}"/>'
        )
    yield label(0, side + 38, f"down: from rank 0 to {n - 1}")
    yield label(0, side + 52, f"across: to rank 0 to {n - 1}; the darker, the more")
