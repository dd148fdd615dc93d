"""What pictures of schedules are made of: places, colours, labels, boxes in one path.

A picture has thousands of cells. Those that look the same are one path, and the letters
of a row are one text with a place for each: that keeps the file small.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape

HUES = (210, 30, 130, 330, 270, 50, 175, 0, 230, 90, 300, 15, 195, 65, 250, 345)
ROW, GAP, TOP, HIGH = 20, 14, 40, 14
"""The pitch of rows, between panels, where rows begin, and how high a cell is."""
MAX_WIDTH = 1180
"""How wide a picture may be, if one panel fits in it."""
_DIGIT = 6
"""How wide a digit is in a cell."""


STYLE = """
.u{font:12px system-ui,sans-serif;fill:#1b1f24}.u .t{font-size:18px;font-weight:600}
.u .p{font-weight:600}.u .l{font-size:10px;fill:#59636e}.u .c{fill:#fff;stroke:#c9d1d9}
.u .k{font:600 9px ui-monospace,monospace;fill:#fff;text-anchor:middle}
.u .r{fill:none;stroke:#1b1f24;stroke-width:1.6}
.u .x{fill:none;stroke:#cf222e;stroke-width:2.5}
.u .a{fill:none;stroke:#1b1f24;stroke-width:1;opacity:.75}.u .b{fill:#eef1f4}
.u .m{font:600 10px ui-monospace,monospace;fill:#fff;text-anchor:middle}
.u .n{fill:#1b1f24}.u .q{fill:#a9c7e8}.u .w{fill:#2a6eb3}
.u .bg{fill:#fff}.u .h{fill:#1b1f24}.u .o{fill:#fff;stroke:#1b1f24}
@media(prefers-color-scheme:dark){
.u{fill:#e6edf3}.u .bg{fill:#0d1117}.u .l{fill:#9198a1}
.u .c{fill:#161b22;stroke:#3d444d}.u .r,.u .a{stroke:#e6edf3}.u .b{fill:#1c2128}
.u .n{fill:#e6edf3}.u .q{fill:#274766}
.u .h{fill:#e6edf3}.u .o{fill:#0d1117;stroke:#e6edf3}}
"""


@dataclass(frozen=True)
class Drawing:
    """Parts of a picture, and how large they are together."""

    width: float
    height: float
    parts: list[str]


_EMPTY = 'class="c"'

Box = tuple[float, float, float]
"""Left, top and width; all are equally high."""


def number(value: float) -> str:
    """A coordinate in as few characters as it takes."""
    return f"{value:.1f}".removesuffix(".0")


def boxes(found: Iterable[Box], look: str, high: float = HIGH) -> list[str]:
    """Boxes that look the same, as one path; nothing if there is none."""
    shape = "".join(
        f"M{number(x)} {number(y)}h{number(w)}v{number(high)}h-{number(w)}z"
        for x, y, w in found
    )
    return [f'<path {look} d="{shape}"/>'] if shape else []


def rings(found: Iterable[Box], kind: str) -> list[str]:
    """Frames around cells, as one path."""
    wider = ((x - 1, y - 1, w + 2) for x, y, w in found)
    return boxes(wider, f'class="{kind}"', HIGH + 2)


def signs(y: float, found: list[tuple[float, str]], kind: str) -> list[str]:
    """Short words in one line, each around its place; one text for all of them."""
    if not found:
        return []
    places = " ".join(
        number(x + _DIGIT * (k - (len(word) - 1) / 2))
        for x, word in found
        for k in range(len(word))
    )
    words = escape("".join(word for _, word in found))
    return [f'<text class="{kind}" x="{places}" y="{number(y)}">{words}</text>']


def label(x: float, y: float, text: str, anchor: str = "start") -> str:
    """Small print."""
    middle = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return (
        f'<text class="l" x="{number(x)}" y="{number(y)}"{middle}>{escape(text)}</text>'
    )


def head(width: float, name: str, phase: str) -> list[str]:
    """The band above a panel."""
    return [
        f'<rect class="b" width="{number(width)}" height="20" rx="4"/>',
        f'<text class="p" x="6" y="14">{escape(name)}</text>',
        label(width - 6, 14, phase, "end"),
    ]


def left(rank: int, margin: float, cell: float) -> float:
    """Where a rank's column begins, right of the labels."""
    return margin + rank * (cell + 6)


def label_width(names: Iterable[str]) -> float:
    """How much room the names of rows take."""
    return math.ceil(7 + 5.6 * max(len(name) for name in names))


def shared(key: str, parts: Iterable[str]) -> str:
    """What all panels have in common, drawn once.

    It is styled where it is used, apart from what is around it: so it has the class.
    """
    return f'<defs><g id="{key}-shared" class="u">{"".join(parts)}</g></defs>'


def frame_of_panel(names: list[str], n: int, margin: float, cell: float) -> list[str]:
    """The names of ranks and rows, and an empty cell for each pair."""
    columns = [left(rank, margin, cell) for rank in range(n)]
    rows = [float(TOP + row * ROW) for row in range(len(names))]
    heads = [
        label(x + cell / 2, TOP - 6, str(rank), "middle")
        for rank, x in enumerate(columns)
    ]
    sides = [
        label(margin - 6, y + 11, name, "end")
        for y, name in zip(rows, names, strict=True)
    ]
    return heads + sides + boxes([(x, y, cell) for y in rows for x in columns], _EMPTY)


def use(key: str) -> str:
    """What all panels have in common, here."""
    return f'<use href="#{key}-shared"/>'


def colour(rank: int) -> str:
    """That of a rank's contribution."""
    return f"hsl({HUES[rank % len(HUES)]} 55% {42 if rank < 8 else 34}%)"
