"""Times over sizes as a picture: letters in a terminal, or matplotlib in a file."""

from __future__ import annotations

import math
from pathlib import Path

from unisono.cli._plot import pyplot, save, style
from unisono.simulate import Comparison
from unisono.units import format_bytes, format_seconds

HEIGHT = 16
MOST_LINES = 6


def best(comparison: Comparison) -> list[str]:
    """The algorithms worth a line: winners first, then by how close they come."""

    def loss(name: str) -> tuple[int, float]:
        times = comparison.results[name]
        least = [comparison.ranking(at)[0].time for at in range(len(comparison.sizes))]
        ratio = [
            r.time / low if low else 1.0 for r, low in zip(times, least, strict=True)
        ]
        return -sum(x <= 1.0 for x in ratio), sum(map(math.log, ratio))

    return sorted(comparison.results, key=loss)[:MOST_LINES]


def text_chart(comparison: Comparison) -> str:
    """A letter for each algorithm at each size; both axes are logarithmic."""
    names = best(comparison)
    lines = {name: [r.time for r in comparison.results[name]] for name in names}
    every = [math.log(t) for times in lines.values() for t in times if t > 0]
    if not every:
        return "nothing takes any time"
    low, high = min(every), max(every)
    width = max(1, min(8, 72 // len(comparison.sizes)))
    grid = [[" "] * (width * len(comparison.sizes)) for _ in range(HEIGHT)]
    for i, name in reversed(list(enumerate(names))):  # winners are drawn last
        for at, time in enumerate(lines[name]):
            if time > 0:
                part = (math.log(time) - low) / ((high - low) or 1.0)
                grid[HEIGHT - 1 - round(part * (HEIGHT - 1))][at * width] = _letter(i)
    drawn = []
    for row, cells in enumerate(grid):
        log = high - (high - low) * row / (HEIGHT - 1)
        label = format_seconds(math.exp(log)) if row % 5 == 0 else ""
        drawn.append(f"{label:>9} |{''.join(cells)}".rstrip())
    drawn.append(f"{'':>9} +{'-' * (width * len(comparison.sizes))}")
    first, last = format_bytes(comparison.sizes[0]), format_bytes(comparison.sizes[-1])
    space = max(1, width * len(comparison.sizes) - len(first) - len(last))
    drawn.append(f"{'':>11}{first}{' ' * space}{last}")
    drawn += [f"{'':>11}{_letter(i)} {name}" for i, name in enumerate(names)]
    return "\n".join(drawn)


def _letter(i: int) -> str:
    return chr(ord("a") + i)


def draw(comparison: Comparison, path: Path) -> None:
    """The same by matplotlib, in a file whose suffix is the format."""
    figure, axis = pyplot("--picture").subplots(figsize=(8, 5))
    for name in best(comparison):
        times = [r.time for r in comparison.results[name]]
        axis.plot(comparison.sizes, times, "-o", label=name, markersize=3)
    axis.plot(
        comparison.sizes,
        [comparison.ranking(at)[0].bound for at in range(len(comparison.sizes))],
        "k--",
        label="no schedule can be faster",
    )
    style(
        axis,
        sizes=comparison.sizes,
        yscale="log",
        ylabel="seconds",
        title=comparison.topology.name,
    )
    save(figure, path)
