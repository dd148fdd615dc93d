"""A schedule that plays by itself, as one SVG with no script: what README opens with.

Each step is shown twice: its messages on their way, and what the ranks hold then. CSS
shows one after the other, for ever; who prefers reduced motion sees the end.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from html import escape

from unisono.schedule.schedule import Schedule
from unisono.view.frames import StepFrame, frames, letter, row_names
from unisono.view.story import tell
from unisono.view.svg_parts import (
    ROW,
    STYLE,
    TOP,
    Box,
    boxes,
    colour,
    frame_of_panel,
    label_width,
    left,
    number,
    rings,
    shared,
    signs,
    use,
)

_SECONDS = 1.1
_CELL, _EDGE, _HEAD = 60.0, 24, 50
_WIDTH, _SCALE = 720, 1.7
_OVERLAP = 0.02
"""By how many per cent of the time a scene outlasts its turn: no moment has none."""


def moving(schedule: Schedule) -> str:
    """The picture; every scene is a group that is visible in its turn."""
    names = row_names(schedule)
    margin = label_width(names)
    story = tell(schedule)
    scenes = list(_scenes(schedule, margin, [beat.caption for beat in story.beats]))
    height = _HEAD + round(_SCALE * (TOP + len(names) * ROW)) + 10
    across = (_WIDTH - _SCALE * left(schedule.n, margin, _CELL)) / 2
    place = f"translate({number(across)} {_HEAD}) scale({_SCALE})"
    length, part = len(scenes) * _SECONDS, 100 / len(scenes)
    style = (
        f".s{{visibility:hidden;animation:show {length:.1f}s step-end infinite}}"
        f"@keyframes show{{0%{{visibility:visible}}{part + _OVERLAP:.3f}%"
        "{visibility:hidden}}"
        f".t{{animation:go {length:.1f}s linear infinite}}"
        f"@keyframes go{{{0.15 * part:.3f}%{{transform:none}}{0.9 * part:.3f}%,to"
        "{transform:translate(var(--x),var(--y))}}"
        "@media(prefers-reduced-motion:reduce){.s,.t{animation:none}"
        ".s:last-of-type{visibility:visible}}"
    )
    title = f"{schedule.title}, step by step"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="u" role="img" '
        f'width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}" '
        f'aria-label="{escape(title)}">',
        f"<title>{escape(title)}</title>",
        f"<desc>{escape(' '.join(beat.caption for beat in story.beats))}</desc>",
        f"<style>{STYLE.strip()}{style}</style>",
        f'<rect class="bg" width="{_WIDTH}" height="{height}"/>',
        f'<text class="p" x="{_EDGE}" y="30">{escape(schedule.title)}</text>',
        shared("ring", frame_of_panel(names, schedule.n, margin, _CELL)),
        f'<g transform="{place}">{use("ring")}</g>',
    ]
    for k, (words, parts) in enumerate(scenes):
        delay = f"--d:{k * _SECONDS - length:.1f}s"
        lines.append(
            f'<g class="s" style="animation-delay:{delay[4:]}">'
            f'{_said(words)}<g transform="{place}">'
        )
        lines += [part.replace("DELAY", delay[4:]) for part in parts]
        lines.append("</g></g>")
    return "\n".join([*lines, "</svg>\n"])


def _said(words: str) -> str:
    """A sentence, in as many lines as it takes."""
    lines = enumerate(textwrap.wrap(words, 100))
    return "".join(
        f'<text x="{_EDGE}" y="{52 + 16 * k}">{escape(line)}</text>'
        for k, line in lines
    )


def _scenes(
    schedule: Schedule, margin: float, captions: list[str]
) -> Iterator[tuple[str, list[str]]]:
    before: StepFrame | None = None
    for frame in frames(schedule):
        if before is None:
            yield "Before the first step.", list(_cells(schedule, frame, margin))
        else:
            words = captions[frame.number - 1]
            held = list(_cells(schedule, before, margin, changed=False))
            travels = list(_tokens(schedule, before, frame, margin))
            yield f"{frame.number}. {words}", held + travels
            yield f"{frame.number}. {words}", list(_cells(schedule, frame, margin))
        before = frame


def _cells(
    schedule: Schedule, frame: StepFrame, margin: float, *, changed: bool = True
) -> Iterator[str]:
    n = schedule.n
    part = _CELL / n
    shares: list[list[Box]] = [[] for _ in range(n)]
    ringed: list[Box] = []
    lines: list[str] = []
    for row, line in enumerate(frame.rows):
        y, found = float(TOP + row * ROW), []
        for rank, cell in enumerate(line):
            x = left(rank, margin, _CELL)
            if cell.changed and changed:
                ringed.append((x, y, _CELL))
            for other in range(n):
                if cell.ranks >> other & 1:
                    shares[other].append((x + other * part, y, part))
                    found.append((x + (other + 0.5) * part, letter(other)))
        lines += signs(y + 10, found, "k")
    for other, share in enumerate(shares):
        yield from boxes(share, f'fill="{colour(other)}"')
    yield from lines
    yield from rings(ringed, "r")


def _tokens(
    schedule: Schedule, before: StepFrame, frame: StepFrame, margin: float
) -> Iterator[str]:
    """What is on its way, each piece from its sender's cell to its receiver's."""
    n, part = schedule.n, 10
    for t in frame.transfers:
        ranks = before.rows[t.chunk][t.src].ranks
        whose = [other for other in range(n) if ranks >> other & 1]
        x = left(t.src, margin, _CELL) + (_CELL - part * len(whose)) / 2
        y = float(TOP + t.chunk * ROW)
        far = left(t.dst, margin, _CELL) - left(t.src, margin, _CELL)
        down = (t.into - t.chunk) * ROW
        yield (
            f'<g class="t" style="--x:{number(far)}px;--y:{down}px;'
            'animation-delay:DELAY">'
        )
        yield from rings([(x, y, float(part * len(whose)))], "r")
        for k, other in enumerate(whose):
            yield from boxes([(x + k * part, y, part)], f'fill="{colour(other)}"')
        found = [(x + (k + 0.5) * part, letter(o)) for k, o in enumerate(whose)]
        yield from signs(y + 10, found, "k")
        yield "</g>"
