"""The picture of docs/performance.md: time over size, ours and the peers'.

    python benchmarks/draw_engine.py

From what `benchmarks/engine.py 2 4 8 16 --json` has kept of a machine with a core for
every rank: a panel for each collective, in a row for each of two numbers of ranks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from unisono.cli._plot import pyplot, save, style

HERE = Path(__file__).parent
KEPT = HERE / "results" / "engine_16_cores.json"
PICTURE = HERE.parent / "docs" / "engine.svg"
WORLDS = 2, 16
COLLECTIVES = "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast"
PEERS = {"openmpi": "Open MPI", "gloo": "gloo"}


def draw(axes: Any, rows: list[dict[str, Any]], title: str) -> None:
    """One collective on so many ranks."""
    sizes = [row["size"] for row in rows]
    ours = [row[row["compared"]]["time"] for row in rows]
    axes.plot(sizes, ours, marker=".", label="unisono")
    for name, label in PEERS.items():
        times = [row["peers"][name]["time"] for row in rows]
        axes.plot(sizes, times, marker=".", linewidth=1, label=label)
    style(axes, sizes=sizes, yscale="log", ylabel="µs", title=title)


def main() -> None:
    """Draw what is kept."""
    rows = [row for row in json.loads(KEPT.read_text())["rows"] if "peers" in row]
    figure, panels = pyplot("draw_engine").subplots(
        len(WORLDS), len(COLLECTIVES), figsize=(4 * len(COLLECTIVES), 7)
    )
    for n, line in zip(WORLDS, panels, strict=True):
        for name, axes in zip(COLLECTIVES, line, strict=True):
            mine = [r for r in rows if (r["n"], r["collective"]) == (n, name)]
            draw(axes, mine, f"{name}, {n} ranks")
    save(figure, PICTURE)


if __name__ == "__main__":
    main()
