"""What recording a trace costs: the same calls with it on and off, in turns.

    python benchmarks/trace_cost.py -n 2 --json cost.json

In every round each rank makes a short burst of calls with the trace off and one with it
on, one directly after the other, in an order that changes from round to round, timed by
its slowest rank. Told are the medians, and the ratio of the quickest tenths: on a
machine that does other things as well, these are the bursts that nothing came between.
`step` computes between calls, as training does.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import unisono
from unisono.runtime.observe import tracing

SIZES = (8, 4 << 10, 64 << 10, 1 << 20, 16 << 20)
BURST_S = 0.003


def calls(comm: unisono.Communicator, nbytes: int) -> Callable[[], None]:
    """An all_reduce of so many bytes."""
    x = np.ones(nbytes // 4, np.float32)
    return lambda: comm.all_reduce(x)


def step(comm: unisono.Communicator) -> Callable[[], None]:
    """A small training step: four times some work and a bucket of 64 KiB."""
    a, x = np.ones(1 << 16, np.float32), np.ones(1 << 14, np.float32)

    def once() -> None:
        for _ in range(4):
            np.sqrt(a, out=a)
            comm.all_reduce(x)

    return once


def burst(comm: unisono.Communicator, once: Callable[[], None], times: int) -> float:
    """Seconds that the slowest rank takes for so many."""
    comm.barrier()
    began = time.perf_counter()
    for _ in range(times):
        once()
    took = np.array([time.perf_counter() - began])
    return float(comm.all_reduce(took, op="max")[0])


def compare(
    comm: unisono.Communicator, once: Callable[[], None], rounds: int
) -> dict[str, Any]:
    """How long it takes with the trace off and on."""
    book = comm.core.session.logbook
    burst(comm, once, 10)
    each = burst(comm, once, 10) / 10
    times = max(2, int(BURST_S / each))
    found: dict[bool, list[float]] = {False: [], True: []}
    for number in range(rounds):
        for on in (False, True) if number % 2 else (True, False):
            (tracing.start if on else tracing.stop)(book)
            found[on].append(burst(comm, once, times) / times)
    tracing.stop(book)
    tenth = {
        on: sorted(times)[max(1, rounds // 10) // 2] for on, times in found.items()
    }
    return {
        "off_us": median(found[False]) * 1e6,
        "on_us": median(found[True]) * 1e6,
        "quick_off_us": tenth[False] * 1e6,
        "quick_on_us": tenth[True] * 1e6,
        "ratio": tenth[True] / tenth[False],
        "rounds": rounds,
        "times": times,
    }


def rank_main(
    comm: unisono.Communicator, rounds: int, sizes: list[int]
) -> list[dict[str, Any]]:
    """What one rank does."""
    rows = []
    for nbytes in sizes:
        result = compare(comm, calls(comm, nbytes), rounds)
        rows.append({"what": "all_reduce", "bytes": nbytes, **result})
    rows.append({"what": "step", "bytes": 4 << 16, **compare(comm, step(comm), rounds)})
    return rows


def main() -> None:
    """Measure, print a table, and keep it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows, *_ = unisono.spawn(rank_main, args.n, args=(args.rounds, list(args.sizes)))
    for row in rows:
        sys.stdout.write(
            f"{row['what']:<11} {row['bytes']:>9} B   off {row['quick_off_us']:>9.2f} "
            f"µs   on {row['quick_on_us']:>9.2f} µs   {(row['ratio'] - 1) * 100:+6.2f} "
            f"%   medians {row['off_us']:.2f}, {row['on_us']:.2f} µs\n"
        )
    if args.json:
        about = {"ranks": args.n, "machine": platform.processor(), "rows": rows}
        args.json.write_text(json.dumps(about, indent=1))


if __name__ == "__main__":
    main()
