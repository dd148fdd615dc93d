"""Pictures for pages that no single schedule shows: curves, a timeline, bars.

All numbers come from the simulator and the estimates, when the site is built. Colours
are distinguished by labels beside what they mark, too, and follow the reader's theme.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape

from unisono.models import of_size
from unisono.parallel.estimate import Setting, estimates
from unisono.simulate import TrainingStep, compare, train
from unisono.topology import parse
from unisono.units import format_bytes, format_seconds

HUES = (210, 30, 130, 330, 270, 50)
WIDTH = 720
_STYLE = """
.d{font:12px system-ui,sans-serif;fill:#1b1f24}.d .t{font-size:15px;font-weight:600}
.d .l{fill:#59636e}.d .bg{fill:#fff}.d .g{stroke:#d1d9e0;stroke-width:1}
.d .w{fill:#fff;font-size:11px}
@media(prefers-color-scheme:dark){.d{fill:#e6edf3}.d .l{fill:#9198a1}
.d .bg{fill:#0d1117}.d .g{stroke:#3d444d}}
"""


def colour(number: int) -> str:
    """One that is readable on light and dark grounds."""
    return f"hsl({HUES[number % len(HUES)]} 55% 48%)"


def svg(title: str, height: float, parts: Iterable[str]) -> str:
    """A picture that stands alone, with its title as its description."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="d" role="img" '
            f'width="{WIDTH}" height="{height:.0f}" viewBox="0 0 {WIDTH} {height:.0f}" '
            f'aria-label="{escape(title)}">',
            f"<title>{escape(title)}</title>",
            f"<style>{_STYLE.strip()}</style>",
            f'<rect class="bg" width="{WIDTH}" height="{height:.0f}"/>',
            text(16, 26, title, "t"),
            *parts,
            "</svg>\n",
        ]
    )


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    """Some words at a place."""
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">'
        f"{escape(words)}</text>"
    )


def bar(x: float, y: float, width: float, number: int, words: str = "") -> str:
    """A bar, with words on it if they fit."""
    made = (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.8):.1f}" height="22" '
        f'rx="2" fill="{colour(number)}"/>'
    )
    if 6.2 * len(words) < width:
        made += text(x + 4, y + 15, words, "w")
    return made


# --- time over size


def costs() -> str:
    """Time of all_reduce over its size for a few algorithms, both axes in powers."""
    names = ["ring", "recursive_doubling", "rabenseifner", "circulant"]
    sizes = [1 << k for k in range(8, 29, 2)]
    topology = parse("switch:13")
    compared = compare("all_reduce", names, topology, sizes)
    times = {name: [r.time for r in compared.results[name]] for name in names}
    title = f"all_reduce among {topology.n} ranks on a switch, as simulated"
    return svg(title, 400, _curves(sizes, times))


def _curves(sizes: Sequence[int], times: dict[str, list[float]]) -> Iterable[str]:
    left, right, top, bottom = 70.0, 560.0, 50.0, 350.0
    low = min(map(min, times.values()))
    high = max(map(max, times.values()))

    def x(size: float) -> float:
        part = math.log(size / sizes[0]) / math.log(sizes[-1] / sizes[0])
        return left + part * (right - left)

    def y(seconds: float) -> float:
        part = math.log(seconds / low) / math.log(high / low)
        return bottom - part * (bottom - top)

    for size in sizes[::2]:
        yield _grid(x(size), top, x(size), bottom)
        yield text(x(size), bottom + 18, format_bytes(size), "l", "middle")
    for power in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1):
        yield _grid(left, y(10**power), right, y(10**power))
        yield text(left - 6, y(10**power) + 4, format_seconds(10**power), "l", "end")
    labels = _apart(sorted((y(times[name][-1]), name) for name in times))
    for number, (name, line) in enumerate(times.items()):
        points = zip(map(x, sizes), map(y, line), strict=True)
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        yield (
            f'<polyline points="{path}" fill="none" stroke="{colour(number)}" '
            'stroke-width="2.5"/>'
        )
        yield (
            f'<rect x="{right + 8:.1f}" y="{labels[name] - 4:.1f}" width="10" '
            f'height="4" fill="{colour(number)}"/>'
        )
        yield text(right + 24, labels[name] + 3, name)
    yield text((left + right) / 2, bottom + 38, "size of the array", "l", "middle")


def _grid(x: float, y: float, to_x: float, to_y: float) -> str:
    return f'<path class="g" d="M{x:.1f} {y:.1f}L{to_x:.1f} {to_y:.1f}"/>'


def _apart(wanted: list[tuple[float, str]]) -> dict[str, float]:
    """Labels near the heights that they want, none on top of another."""
    placed: dict[str, float] = {}
    last = -math.inf
    for height, name in wanted:
        last = max(height, last + 16)
        placed[name] = last
    return placed


# --- what happens beside what


def overlap() -> str:
    """A DDP step twice: with one bucket for everything, and with many."""
    model, topology = "7B", "dgx-h100:2"
    one = train(model, topology, strategy="ddp", bucket=1 << 60)
    many = train(model, topology, strategy="ddp")
    scale = 600 / max(one.time, many.time)
    parts = [*_lanes("one bucket, sent at the end", one, 50, scale)]
    parts += _lanes("a bucket for each layer, sent meanwhile", many, 160, scale)
    where = f"{model} on two DGX H100"
    title = f"One step of DDP, as simulated: {where}"
    return svg(title, 260, parts)


def _lanes(words: str, step: TrainingStep, y: float, scale: float) -> Iterable[str]:
    yield text(16, y + 8, f"{words}: {format_seconds(step.time)}")
    kinds = {"forward": 0, "backward": 1, "all_reduce": 2}
    for kind, number in kinds.items():
        mine = [ran for ran in step.ran if ran.name.startswith(kind)]
        height = y + (18 if kind != "all_reduce" else 46)
        for ran in mine:
            width = (ran.end - ran.start) * scale
            yield bar(90 + ran.start * scale, height, width - 0.4, number)
        if kind != "all_reduce":
            yield text(94 + mine[0].start * scale, height + 15, kind, "w")
    yield text(16, y + 33, "compute", "l")
    yield text(16, y + 61, "all_reduce", "l")


# --- who keeps how much


def memory() -> str:
    """Model states on a rank by strategy: parameters, gradients, optimizer."""
    weights, n = 7_000_000_000, 64
    made = list(estimates(of_size("7B", weights), Setting(n)))
    scale = 500 / max(e.parameters + e.gradients + e.optimizer for e in made)
    parts: list[str] = []
    for row, e in enumerate(made):
        x, y = 80.0, 50 + 32 * row
        parts.append(text(16, y + 15, e.strategy))
        states = {
            "parameters": e.parameters,
            "gradients": e.gradients,
            "optimizer": e.optimizer,
        }
        for number, (name, size) in enumerate(states.items()):
            parts.append(bar(x, y, size * scale - 0.4, number, name))
            x += size * scale
        parts.append(text(x + 6, y + 15, format_bytes(sum(states.values()))))
    title = f"Memory of a rank: 7 billion parameters in float32, Adam, {n} ranks"
    return svg(title, 190, parts)


DRAWINGS: dict[str, Callable[[], str]] = {
    "costs.svg": costs,
    "overlap.svg": overlap,
    "memory.svg": memory,
}
