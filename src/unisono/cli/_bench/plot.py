"""The picture: time and bandwidth over size, one line per system and algorithm.

The bus bandwidth; where ranks have no links between them, the algorithm's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from unisono.cli._bench.figures import BenchRow, Timing
from unisono.cli._plot import pyplot, save, style

OPTION = "--plot"
Line = tuple[list[int], list[float], list[float]]


def require() -> None:
    """Raise MissingExtra if nothing can be drawn, before anything is measured."""
    pyplot(OPTION)


def draw(rows: Sequence[BenchRow], path: Path) -> None:
    """Write the picture to a file whose suffix is the format."""
    names = list(dict.fromkeys(row.case.collective for row in rows))
    figure, all_axes = pyplot(OPTION).subplots(
        max(1, len(names)), 2, figsize=(11, 4 * max(1, len(names))), squeeze=False
    )
    for name, axes in zip(names, all_axes, strict=False):
        mine = [row for row in rows if row.case.collective == name]
        for label, (at, times, bandwidths) in lines_of(mine).items():
            line = "-o" if label.startswith("unisono") else "--s"
            axes[0].plot(at, times, line, label=label, markersize=3)
            axes[1].plot(at, bandwidths, line, label=label, markersize=3)
        place = mine[0].case.compared.replace("_", " ")
        title = f"{name}, {mine[0].case.n} ranks, {mine[0].case.dtype}, {place}"
        sizes = sorted({row.case.size for row in mine})
        style(axes[0], sizes=sizes, title=title, ylabel="time (µs)", yscale="log")
        kind = "bus" if mine[0].has_links else "algorithm"
        style(axes[1], sizes=sizes, title=title, ylabel=f"{kind} bandwidth (GB/s)")
    save(figure, path)


def lines_of(rows: Sequence[BenchRow]) -> dict[str, Line]:
    """Sizes, microseconds and bandwidths of each system."""
    lines: dict[str, Line] = {}
    several = len({row.case.size for row in rows}) < len(rows)
    for row in rows:
        label = f"unisono {row.algorithm}" if several else "unisono"
        for name, times in ((label, row.compared), *row.peers.items()):
            _add(lines.setdefault(name, ([], [], [])), row, times)
    return {name: line for name, line in lines.items() if line[0]}


def _add(line: Line, row: BenchRow, times: Timing | None) -> None:
    algbw, busbw = row.bandwidths(times)
    shown = busbw if row.has_links else algbw
    if times is None or math.isnan(shown) or row.case.size in line[0]:
        return
    line[0].append(row.case.size)
    line[1].append(times.seconds * 1e6)
    line[2].append(shown)
