"""Beyond eight ranks: a panel for each group of steps, with numbers in the cells.

In a sum a cell is a bar, as long as it has contributions, with their number; elsewhere
it has the number and colour of the rank that its content began at. What the steps do is
written above the cells.
"""

from __future__ import annotations

import math
import textwrap
from collections import defaultdict
from collections.abc import Iterator

from unisono.schedule.schedule import Schedule
from unisono.view.frames import SlotView, row_names
from unisono.view.groups import StepGroup, groups
from unisono.view.svg_parts import (
    GAP,
    MAX_WIDTH,
    ROW,
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

CELL = 26.0
_LINE = 13


def grouped_panels(schedule: Schedule, key: str) -> Drawing:
    """One panel for the start and one for each group of steps, in reading order."""
    names = row_names(schedule)
    margin = label_width(names)
    width = left(schedule.n, margin, CELL)
    found = groups(schedule)
    texts = [_wrapped(group.action, width) for group in found]
    above = 20 + _LINE * max(map(len, texts))
    height = above + TOP - 18 + len(names) * ROW + GAP
    columns = max(1, min(int((MAX_WIDTH + GAP) // (width + GAP)), len(found)))
    parts = [shared(key, frame_of_panel(names, schedule.n, margin, CELL))]
    for i, (group, lines) in enumerate(zip(found, texts, strict=True)):
        x, y = i % columns * (width + GAP), i // columns * height
        parts.append(f'<g transform="translate({number(x)} {number(y)})">')
        parts += head(width, group.name, group.phase)
        parts += [label(6, 33 + _LINE * k, line) for k, line in enumerate(lines)]
        parts.append(f'<g transform="translate(0 {above - 18})">{use(key)}')
        parts += _cells(schedule, group, margin)
        parts.append("</g></g>")
    rows = math.ceil(len(found) / columns)
    return Drawing(columns * (width + GAP), rows * height, parts)


def _wrapped(words: str, width: float) -> list[str]:
    text = f"{words}." if words else ""
    return textwrap.wrap(text, max(24, int(width / 5.4)))


def _cells(schedule: Schedule, group: StepGroup, margin: float) -> Iterator[str]:
    changed: list[Box] = []
    spoilt: list[Box] = []
    filled: dict[str, list[Box]] = defaultdict(list)
    lines: list[str] = []
    for row, line in enumerate(group.frame.rows):
        y = float(TOP + row * ROW)
        words: dict[str, list[tuple[float, str]]] = {"m": [], "m n": []}
        for rank, cell in enumerate(line):
            x = left(rank, margin, CELL)
            if cell.changed or cell.spoilt:
                (spoilt if cell.spoilt else changed).append((x, y, CELL))
            if cell.ranks:
                look, part, kind, word = _content(schedule, cell)
                filled[look].append((x, y, CELL * part))
                words[kind].append((x + CELL / 2, word))
        for kind, found in words.items():
            lines += signs(y + 10, found, kind)
    for look, some in filled.items():
        yield from boxes(some, look)
    yield from rings(changed, "r")
    yield from rings(spoilt, "x")
    yield from lines


def _content(schedule: Schedule, cell: SlotView) -> tuple[str, float, str, str]:
    """How a cell is filled, how much of it, and with which word of which kind."""
    if not schedule.collective.reduces:
        origin = cell.ranks.bit_length() - 1
        return f'fill="{colour(origin)}"', 1.0, "m", str(origin)
    count = cell.ranks.bit_count()
    if count == schedule.n:
        return 'class="w"', 1.0, "m", str(count)
    return 'class="q"', count / schedule.n, "m n", str(count)
