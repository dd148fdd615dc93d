"""What a trace shows: calls, who came late, waiting, sends and receives."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from docs.drawings import WIDTH, colour, svg, text
from unisono.simulate import simulate
from unisono.simulate.result import Result
from unisono.units import format_seconds

_LEFT, _LANE = 84.0, 58.0
_LATE, _BY = 2, 60e-6
_WAIT = 15e-6
"""A shorter pause between two messages is not drawn."""


def traced() -> str:
    """A ring of four ranks where one arrives late, as simulated."""
    result = simulate("ring", "switch:4", "1M", delays={_LATE: _BY})
    scale = (WIDTH - _LEFT - 24) / result.time
    parts = list(_lanes(result, scale))
    late = format_seconds(_BY)
    title = (
        f"all_reduce on four ranks, as a trace shows it; rank {_LATE} is {late} late"
    )
    return svg(title, 58 + 4 * _LANE + 34, parts)


def _lanes(result: Result, scale: float) -> Iterator[str]:
    line = result.timeline
    assert line is not None  # events have one
    sent = list(zip(line.src, line.dst, line.start, line.end, strict=True))
    for rank in range(4):
        y = 58 + _LANE * rank
        begins = _BY if rank == _LATE else 0.0
        ends = max(end for src, dst, _, end in sent if rank in (src, dst))
        yield text(16, y + 13, f"rank {rank}")
        yield _box(begins, ends, y, scale, 0, "all_reduce")
        mine = sorted((start, end, dst) for src, dst, start, end in sent if src == rank)
        for start, end, dst in mine:
            yield _box(start, end, y + 18, scale, 2, f"to {dst}")
        for (_, end, _), (start, _, _) in pairwise(mine):
            if start - end > _WAIT:
                words = f"waits for rank {(rank - 1) % 4}"
                yield _box(end, start, y + 36, scale, 1, words)
    bottom = 58 + 4 * _LANE
    for number, name in enumerate(("call", "waits", "sends")):
        x = _LEFT + 90 * number
        yield (
            f'<rect x="{x:.1f}" y="{bottom + 4:.1f}" width="12" height="12" rx="3" '
            f'fill="{colour(number)}"/>'
        )
        yield text(x + 17, bottom + 14, name, "l")
    end = format_seconds(result.time)
    yield text(WIDTH - 24, bottom + 14, f"time, 0 to {end}", "l", "end")


def _box(
    start: float, end: float, y: float, scale: float, number: int, words: str
) -> str:
    width = max((end - start) * scale - 1, 1)
    made = (
        f'<rect x="{_LEFT + start * scale:.1f}" y="{y:.1f}" width="{width:.1f}" '
        f'height="16" rx="2" fill="{colour(number)}"/>'
    )
    if 6.2 * len(words) < width:
        made += text(_LEFT + start * scale + 4, y + 12, words, "w")
    return made
