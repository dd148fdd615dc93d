"""How good is the choice? The time of what was chosen over the best that was measured.

    python benchmarks/choice.py [quick] [tuned]

For all_reduce of 8 B to 64 MiB on 2, 4, 8 and 13 ranks of this machine every candidate
(algorithm, segments, radix, levels) is measured, in turns; so is what `choose` takes.
The ratio is 1 where the choice is the best. With `tuned` each world is first tuned into
a table of its own, made in an earlier run of the ranks than the one that judges it, so
that the choice is not judged by the very times that made it. With `quick`: three sizes,
two worlds. On a machine with fewer cores than ranks, or with others at work, repeated
measurements of one and the same algorithm differ, and the ratio cannot come closer to 1
than they do: that spread is told as well.
"""

from __future__ import annotations

import json
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

import unisono
from unisono import Communicator
from unisono.runtime.select import choose
from unisono.runtime.tuned import Tuned, read
from unisono.tune import Effort, candidates, tune
from unisono.tune.measure import Stopwatch, call_of
from unisono.units import format_bytes

RESULTS = Path(__file__).parent / "results" / "choice.json"
WORLDS = 2, 4, 8, 13
SIZES = [8 << (2 * k) for k in range(12)] + [64 << 20]
ITEM = 4


def prepared(comm: Communicator, sizes: list[int], where: str) -> None:
    """Make the table by which this world is then judged."""
    tune(comm, Effort(("all_reduce",), tuple(sizes)), save_to=Path(where))


def judged(comm: Communicator, sizes: list[int], where: str) -> list[dict[str, Any]]:
    """Every candidate at every size, and what would be chosen."""
    watch = Stopwatch(comm, batch_s=0.01, rounds=6)
    table = Tuned(read(Path(where)).worlds) if where else None
    names = candidates("all_reduce", comm.hosts)
    found = []
    for nbytes in sizes:
        chosen = choose(
            "all_reduce",
            nbytes,
            comm.world_size,
            named=None,
            reproducible=False,
            tuned=table,
            itemsize=ITEM,
        )
        all_names = list(dict.fromkeys([*names, chosen.algorithm]))
        calls = {
            name: call_of(comm, "all_reduce", nbytes // ITEM, "float32", name)
            for name in all_names
        }
        times = watch.race(calls)
        # Who is best of many by the same times that are then compared has been lucky:
        # one half of the rounds finds the best, the other tells its time.
        best = min(times, key=lambda name: median(times[name][::2]))
        mine, theirs = times[chosen.algorithm][1::2], times[best][1::2]
        found.append(
            {
                "n": comm.world_size,
                "size": nbytes,
                "chosen": chosen.algorithm,
                "by": chosen.by,
                "seconds": median(mine),
                "best": best,
                "best_seconds": median(theirs),
                "ratio": median(mine) / median(theirs),
                "spread": max(mine) / min(mine),
            }
        )
    return found


def main() -> None:
    """Measure, print a table, and keep it."""
    quick, tuned = "quick" in sys.argv[1:], "tuned" in sys.argv[1:]
    sizes = [8, 32 << 10, 2 << 20] if quick else SIZES
    worlds = (2, 4) if quick else WORLDS
    ours: Any = import_module("choice")  # so that ranks can import what they run
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for n in worlds:
            where = str(Path(folder) / f"{n}.json") if tuned else ""
            if tuned:
                unisono.spawn(ours.prepared, n, (sizes, where), timeout_s=600)
            found = unisono.spawn(ours.judged, n, (sizes, where), timeout_s=600)[0]
            rows += found
            for row in found:
                print(
                    f"{n:>3}  {format_bytes(row['size']):>9}  {row['ratio']:.2f}  "
                    f"{row['chosen']} ({row['by']}), best {row['best']}; "
                    f"spread {row['spread']:.2f}",
                    flush=True,
                )
    ratios = [row["ratio"] for row in rows]
    told = {
        "tuned": tuned,
        "mean": fmean(ratios),
        "p95": float(np.percentile(ratios, 95)),
        "median_spread": median(row["spread"] for row in rows),
        "rows": rows,
    }
    print(f"mean {told['mean']:.3f}, p95 {told['p95']:.3f}; asked for: 1.05, 1.20")
    if not quick:
        RESULTS.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
