"""The picture: time and bus bandwidth over size, one line per system and algorithm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unisono.cli._bench.figures import Row, Times
from unisono.cli._matplotlib import pyplot, save
from unisono.units import format_bytes

OPTION = "--plot"
Line = tuple[list[int], list[float], list[float]]


def require() -> None:
    """Raise MissingExtra if nothing can be drawn, before anything is measured."""
    pyplot(OPTION)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write the picture to a file whose name says the format."""
    names = list(dict.fromkeys(row.case.collective for row in rows))
    figure, all_axes = pyplot(OPTION).subplots(
        max(1, len(names)), 2, figsize=(11, 4 * max(1, len(names))), squeeze=False
    )
    for name, axes in zip(names, all_axes, strict=False):
        mine = [row for row in rows if row.case.collective == name]
        for label, (sizes, times, bandwidths) in lines_of(mine).items():
            style = "-o" if label.startswith("unisono") else "--s"
            axes[0].plot(sizes, times, style, label=label, markersize=3)
            axes[1].plot(sizes, bandwidths, style, label=label, markersize=3)
        place = mine[0].case.compared.replace("_", " ")
        title = f"{name}, {mine[0].case.n} ranks, {mine[0].case.dtype}, {place}"
        _dress(axes, title, sorted({row.case.size for row in mine}))
    save(figure, path)


def lines_of(rows: Sequence[Row]) -> dict[str, Line]:
    """Sizes, microseconds and bus bandwidths of each system."""
    found: dict[str, Line] = {}
    several = len({row.case.size for row in rows}) < len(rows)
    for row in rows:
        label = f"unisono {row.algorithm}" if several else "unisono"
        for name, times in ((label, row.compared), *row.peers.items()):
            _add(found.setdefault(name, ([], [], [])), row, times)
    return {name: line for name, line in found.items() if line[0]}


def _add(line: Line, row: Row, times: Times | None) -> None:
    _, busbw = row.bandwidths(times)
    if times is None or math.isnan(busbw) or row.case.size in line[0]:
        return
    line[0].append(row.case.size)
    line[1].append(times.seconds * 1e6)
    line[2].append(busbw)


def _dress(axes: Sequence[Any], title: str, sizes: Sequence[int]) -> None:
    shown = sizes[:: max(1, len(sizes) // 8)]
    for axis, label in zip(axes, ("time (µs)", "bus bandwidth (GB/s)"), strict=True):
        axis.set_xscale("log", base=2)
        axis.set_ylabel(label)
        axis.set_title(title, fontsize=9)
        axis.set_xticks(shown, [format_bytes(size) for size in shown])
        axis.tick_params(axis="x", labelrotation=45, labelsize=8)
        axis.grid(visible=True, alpha=0.3)
    axes[0].set_yscale("log")
    axes[0].legend(fontsize=8)
