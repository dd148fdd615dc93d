"""How good is the choice? The time of what was chosen over the best that was measured.

    python benchmarks/choice.py [tuned] [quick]       5 to 10 minutes on a quiet machine

For all_reduce of 8 B to 64 MiB on 2, 4, 8 and 13 ranks of this machine every candidate
(algorithm, segments, radix, levels) is tried, and those near the best are raced in many
short turns, together with what `choose` takes. Half of the turns say who is best, the
other half what the choice loses to it, so that none is best by chance; of the turns the
lower quartile counts, for what disturbs a turn only ever makes it longer. The ratio is
1 where the choice is the best.

With `tuned` each world is first tuned into a table of its own, made in an earlier run
of the ranks than the one that judges it, so that the choice is not judged by the very
times that made it. With `quick`: three sizes, two worlds. Each world has 140 seconds;
sizes that it does not come to are named, and are those in between.

Where others are at work, or ranks outnumber cores, one and the same algorithm differs
from turn to turn, and no choice can be measured better than that: how much the best
differs from itself is reported as well (`noise`, what the ratio would be if it had been
chosen). Results go to benchmarks/results/choice.json, or choice_tuned.json.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

import unisono
from unisono import Communicator
from unisono.runtime.plan.select import choose
from unisono.runtime.plan.tuned import Tuned, read
from unisono.tune import Effort, candidates, tune
from unisono.tune.measure import Call, Stopwatch, calls_of
from unisono.units import format_bytes

RESULTS = Path(__file__).parent / "results"
WORLDS = 2, 4, 8, 13
SIZES = [8 << (2 * k) for k in range(12)] + [64 << 20]
ITEM = 4
NEAR = 1.5
"""Who is raced: all who came within so many times the best when they were tried."""
HOPELESS = 4.0
"""Who was so far behind at a large size is not tried at a larger one."""
LARGE = 1 << 20
TURNS = 16
BUDGET_S = 140.0


def prepared(comm: Communicator, sizes: list[int], where: str) -> None:
    """Make the table by which this world is then judged."""
    tune(comm, Effort(("all_reduce",), tuple(sizes)), save_to=Path(where))


def judged(comm: Communicator, sizes: list[int], where: str) -> list[dict[str, Any]]:
    """Every candidate at every size, and what would be chosen."""
    table = Tuned(read(Path(where)).worlds) if where else None
    names = candidates("all_reduce", comm.hosts)
    found: list[dict[str, Any]] = []
    hopeless: dict[str, int] = {}
    until = time.monotonic() + BUDGET_S
    for nbytes in spread(sizes):
        if comm.broadcast_object(time.monotonic() > until):
            break
        chosen = choose(
            "all_reduce",
            nbytes,
            comm.world_size,
            named=None,
            reproducible=False,
            tuned=table,
            itemsize=ITEM,
        )
        hopeful = [
            name
            for name in dict.fromkeys([*names, chosen.algorithm])
            if nbytes < hopeless.get(name, nbytes + 1) or name == chosen.algorithm
        ]
        calls = calls_of(comm, "all_reduce", nbytes // ITEM, "float32", hopeful)
        tried = {k: min(v) for k, v in Stopwatch(comm, 2e-3, 2).race(calls).items()}
        best = min(tried.values())
        for name in tried:
            if nbytes >= LARGE and tried[name] > HOPELESS * best:
                hopeless[name] = min(nbytes, hopeless.get(name, nbytes))
        near = sorted(tried, key=tried.__getitem__)
        near = [k for k in near if tried[k] <= NEAR * best][:6]
        near = list(dict.fromkeys([*near, chosen.algorithm]))
        times = raced(comm, {name: calls[name] for name in near})
        found.append(
            {
                "n": comm.world_size,
                "size": nbytes,
                "by": chosen.by,
                **compared(times, chosen.algorithm),
                "tried": len(tried),
            }
        )
    return found


def raced(comm: Communicator, calls: dict[str, Call]) -> dict[str, list[float]]:
    """Many short turns; fewer where a call takes long."""
    took = Stopwatch(comm, 1e-3, 1).race(calls)
    slowest = max(t[0] for t in took.values())
    turns = int(comm.broadcast_object(max(6, min(TURNS, int(1.0 / slowest) // 2 * 2))))
    return Stopwatch(comm, 3e-3, turns).race(calls)


def quick_quarter(times: Sequence[float]) -> float:
    """The time that one turn in four stays below."""
    return float(np.percentile(times, 25))


def compared(
    times: dict[str, list[float]],
    chosen: str,
    typical: Callable[[Sequence[float]], float] = quick_quarter,
) -> dict[str, Any]:
    """Who is best by the even turns, and how they compare in the odd ones."""
    best = min(times, key=lambda name: typical(times[name][::2]))
    mine, theirs = (typical(times[name][1::2]) for name in (chosen, best))
    again = typical(times[best][::2]) / theirs
    return {
        "chosen": chosen,
        "seconds": mine,
        "best": best,
        "best_seconds": theirs,
        "ratio": mine / theirs,
        "noise": max(again, 1 / again),
    }


def regret(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """What is asked for, of what `compared` found."""
    ratios = [row["ratio"] for row in rows]
    return {
        "mean": fmean(ratios),
        "p95": float(np.percentile(ratios, 95)),
        "noise": median(row["noise"] for row in rows),
    }


def spread(sizes: Sequence[int]) -> list[int]:
    """The ends first, then what lies in between, ever closer."""
    left, order = [(0, len(sizes) - 1)], [0, len(sizes) - 1]
    while left:
        low, high = left.pop(0)
        middle = (low + high) // 2
        if middle not in (low, high):
            order.append(middle)
            left += [(low, middle), (middle, high)]
    return [sizes[k] for k in dict.fromkeys(order)]


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What is asked for, and where it is lost."""
    return {
        **regret(rows),
        "by_ranks": {
            str(n): fmean(row["ratio"] for row in rows if row["n"] == n)
            for n in sorted({row["n"] for row in rows})
        },
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
    }


def main() -> None:
    """Measure, print a table, and keep it."""
    quick, tuned = "quick" in sys.argv[1:], "tuned" in sys.argv[1:]
    sizes = [8, 32 << 10, 2 << 20] if quick else SIZES
    worlds = (2, 4) if quick else WORLDS
    ours: Any = import_module("choice")  # so that ranks can import what they run
    rows: list[dict[str, Any]] = []
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for n in worlds:
            where = str(Path(folder) / f"{n}.json") if tuned else ""
            if tuned:
                unisono.spawn(ours.prepared, n, (sizes, where), timeout_s=900)
            found = unisono.spawn(ours.judged, n, (sizes, where), timeout_s=900)[0]
            found.sort(key=lambda row: row["size"])
            missing = set(sizes) - {row["size"] for row in found}
            if missing:
                print(f"# {n} ranks: no time for {sorted(missing)}")
            rows += found
            for row in found:
                print(
                    f"{n:>3}  {format_bytes(row['size']):>9}  {row['ratio']:.2f}  "
                    f"{row['chosen']} ({row['by']}), best {row['best']}; "
                    f"noise {row['noise']:.2f}",
                    flush=True,
                )
    record = {"tuned": tuned, **summary(rows), "seconds": time.monotonic() - begun}
    print(f"mean {record['mean']:.3f}, p95 {record['p95']:.3f}; asked for: 1.05, 1.20")
    print(
        f"noise {record['noise']:.3f}, {record['seconds']:.0f} s, {record['by_ranks']}"
    )
    if not quick:
        file = RESULTS / ("choice_tuned.json" if tuned else "choice.json")
        file.write_text(json.dumps({**record, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
