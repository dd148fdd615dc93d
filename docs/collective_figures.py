"""Each collective before and after: who holds what, as its contract says."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

import numpy as np

from unisono.algorithms import schedule
from unisono.schedule.collective import ALL_TO_ALL, COLLECTIVES
from unisono.schedule.schedule import Schedule
from unisono.view.frames import letter, row_names
from unisono.view.svg_parts import (
    ROW,
    STYLE,
    TOP,
    Box,
    boxes,
    colour,
    frame_of_panel,
    head,
    label_width,
    left,
    number,
    shared,
    signs,
    use,
)

_FEW, _RANKS = 3, 4
_MARGIN, _ARROW = 20, 56


def before_and_after(name: str) -> str:
    """A collective on a few ranks: two panels, and an arrow from one to the other."""
    what = COLLECTIVES[name]
    n = _FEW if what is ALL_TO_ALL else _RANKS
    by = "naive" if name in ("all_reduce", "broadcast", "reduce") else "direct"
    made = schedule(name, by, n)
    names = row_names(made)
    margin = label_width(names)
    cell = max(26.0, 11.0 * n) if what.reduces else 26.0
    width = left(n, margin, cell)
    tall = TOP + len(names) * ROW
    title = f"{name}: {what.meaning}"
    whole = 2 * _MARGIN + max(2 * width + _ARROW, 7 * len(title))
    right, middle = _MARGIN + width + _ARROW, 42 + (TOP + tall) / 2
    start = _MARGIN + width + 10
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="u" role="img" '
            f'width="{number(whole)}" height="{tall + 62}" '
            f'viewBox="0 0 {number(whole)} {tall + 62}" aria-label="{escape(title)}">',
            f"<title>{escape(title)}</title>",
            f"<style>{STYLE.strip()}</style>",
            f'<rect class="bg" width="{number(whole)}" height="{tall + 62}"/>',
            f'<text class="p" x="{_MARGIN}" y="26">{escape(title)}</text>',
            shared(f"f-{name}", frame_of_panel(names, n, margin, cell)),
            *_panel(made, "before", _MARGIN, margin, cell),
            f'<path class="a" d="M{number(start)} {number(middle)}h28"/>',
            f'<path class="h" d="M{number(start + 38)} {number(middle)}l-10-5v10z"/>',
            *_panel(made, "after", right, margin, cell),
            "</svg>\n",
        ]
    )


def _panel(
    made: Schedule, when: str, x: float, margin: float, cell: float
) -> Iterator[str]:
    name = made.collective.name
    yield f'<g transform="translate({number(x)} 42)">'
    yield from head(left(made.n, margin, cell), when, "")
    yield use(f"f-{name}")
    shares: list[list[Box]] = [[] for _ in range(made.n)]
    lines: list[str] = []
    for row, line in enumerate(_held(made, when)):
        found = []
        for rank, ranks in enumerate(line):
            for k, other in enumerate(ranks):
                part = cell / made.n if made.collective.reduces else cell
                offset = other if made.collective.reduces else k
                at = left(rank, margin, cell) + offset * part
                shares[other].append((at, float(TOP + row * ROW), part))
                found.append((at + part / 2, letter(other)))
        lines += signs(TOP + row * ROW + 10, found, "k")
    for other, share in enumerate(shares):
        yield from boxes(share, f'fill="{colour(other)}"')
    yield from lines
    yield "</g>"


def _held(made: Schedule, when: str) -> Iterator[list[list[int]]]:
    """Whose contributions every rank holds of each chunk, before or after."""
    what, n = made.collective, made.n
    chunks = np.arange(made.num_chunks)
    begins = made.contract.holder(what.before, chunks)
    ends = made.contract.holder(what.after, chunks)
    holders = begins if when == "before" else ends
    for chunk in range(made.num_chunks):
        row = []
        for rank in range(n):
            there = holders is None or int(holders[chunk]) == rank
            if when == "before" or not what.reduces:
                whose = [rank if begins is None else int(begins[chunk])]
            else:
                whose = list(range(n))
            row.append(whose if there else [])
        yield row
