"""all_reduce on ordinary, registered and `comm.empty` arrays, taking turns.

    python benchmarks/registered.py          2 ranks, and results/registered.json
    python benchmarks/registered.py 4 8      these numbers of ranks, printed alone

A figure is the median over the rounds of the slowest rank's time. The registration
itself is timed as well, on the largest array.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import unisono
from unisono.units import format_bytes

RESULTS = Path(__file__).parent / "results" / "registered.json"
SIZES = (256 << 10, 1 << 20, 16 << 20, 64 << 20)
KINDS = ("ordinary", "registered", "comm.empty")


def rounds_of(nbytes: int) -> int:
    """More where a call is short."""
    return max(15, min(400, (256 << 20) // nbytes))


def measure(comm: Any) -> dict[str, Any]:
    """Seconds by size and kind, of the slowest rank; and of `register`."""
    found: dict[str, Any] = {}
    for nbytes in SIZES:
        count = nbytes // 4
        arrays = [np.ones(count, np.float32), np.ones(count, np.float32)]
        began = time.perf_counter()
        comm.register(arrays[1])
        registering = time.perf_counter() - began
        arrays.append(comm.empty(count))
        times: list[list[float]] = [[], [], []]
        for turn in range(rounds_of(nbytes) + 3):
            for kind, x in enumerate(arrays):
                x[:] = 1
                comm.barrier()
                began = time.perf_counter()
                comm.all_reduce(x)
                took = np.array([time.perf_counter() - began])
                slowest = float(comm.all_reduce(took, op="max")[0])
                if turn >= 3:
                    times[kind].append(slowest)
        found[str(nbytes)] = dict(zip(KINDS, map(median, times), strict=True))
        found["register"] = {"nbytes": nbytes, "seconds": registering}
        comm.unregister(arrays[1])
    return found


def lines(n: int, found: dict[str, Any]) -> list[str]:
    """A table of milliseconds."""
    made = [f"{f'{n} ranks':<12}" + "".join(f"{kind:>14}" for kind in KINDS)]
    for nbytes in SIZES:
        row = found[str(nbytes)]
        cells = "".join(f"{row[kind] * 1e3:11.3f} ms" for kind in KINDS)
        ratio = row["ordinary"] / row["registered"]
        made.append(f"{format_bytes(nbytes):<12}{cells}   {ratio:.2f} times as fast")
    once = found["register"]
    took = f"{once['seconds'] * 1e3:.1f} ms"
    made.append(f"register of {format_bytes(once['nbytes'])}: {took}")
    return made


def main() -> None:
    """Measure, print, and keep the plain run."""
    worlds = [int(n) for n in sys.argv[1:]] or [2]
    results = {}
    for n in worlds:
        results[str(n)] = unisono.spawn(measure, n)[0]
        print("\n".join(lines(n, results[str(n)])))
    if not sys.argv[1:]:
        machine = {"machine": platform.machine(), "system": platform.release()}
        RESULTS.write_text(json.dumps({**machine, "ranks": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
