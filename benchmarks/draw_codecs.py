"""The picture of docs/codecs.md, from what the two benchmarks of codecs have kept.

    python benchmarks/draw_codecs.py

On the left, what a codec sends for an element and how far off it is; on the right, how
long an all_reduce takes as values and as codes, over its size, on a slow link.
"""

from __future__ import annotations

import json
from collections import defaultdict
from math import log10
from pathlib import Path
from typing import Any

from unisono.cli._plot import pyplot, save, style

HERE = Path(__file__).parent
PICTURE = HERE.parent / "docs" / "codecs.svg"


def draw_errors(axes: Any, kept: dict[str, Any]) -> None:
    """Bytes against error, of Gaussian values and of heavy tails."""
    rows = [row for row in kept["errors"] if ":" not in row["codec"]]
    for what, marker in (("Gaussian", "o"), ("heavy tails", "x")):
        axes.scatter(
            [row["bytes per element"] for row in rows],
            [100 * row[what] for row in rows],
            marker=marker,
            label=what,
        )
    named = defaultdict(list)  # those that lie together share a label
    for row in rows:
        size, error = row["bytes per element"], 100 * row["Gaussian"]
        named[size, round(10 * log10(error))].append(row["codec"])
    for (size, place), names in named.items():
        at = size, 10 ** (place / 10)
        label = ", ".join(names)
        axes.annotate(label, at, xytext=(6, 3), textcoords="offset points")
    style(axes, xlabel="bytes per element", ylabel="error, %", yscale="log")
    axes.set_xlim(0, 2.4)


def draw_times(axes: Any, name: str, kept: dict[str, Any]) -> None:
    """Seconds over bytes, one line for each codec."""
    for codec, seconds in kept["seconds"].items():
        sizes = [int(size) for size in seconds]
        axes.plot(sizes, list(seconds.values()), marker=".", label=codec or "values")
    title = f"all_reduce, {name}"
    style(axes, xlabel="bytes of float32", ylabel="s", yscale="log", title=title)
    axes.set_xscale("log")


def main() -> None:
    """Draw what is kept."""
    errors = json.loads((HERE / "results" / "codecs.json").read_text())
    times = json.loads((HERE / "results" / "codecs_network.json").read_text())
    figure, (left, *right) = pyplot("draw_codecs").subplots(
        1, 1 + len(times), figsize=(5 * (1 + len(times)), 4)
    )
    draw_errors(left, errors)
    for axes, (name, kept) in zip(right, times.items(), strict=True):
        draw_times(axes, name, kept)
    save(figure, PICTURE)


if __name__ == "__main__":
    main()
