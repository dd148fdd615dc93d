"""How fast schedules are made and verified, and what `import unisono` costs.

    make bench          prints the table and writes benchmarks/results/verification.json

Each figure is the median of several runs; the large ones run once, in a process of
their own so that the memory is theirs alone. The peers are our own other interpreters,
in the same run: the NumPy twin of the native verifier, and the exact oracle.
"""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import unisono
from unisono.schedule import check_exactly
from unisono.schedule.domains import ChunkState, ValueState
from unisono.schedule.schedule import Schedule

RESULTS = Path(__file__).parent / "results" / "verification.json"
WORLDS = [
    ("all_reduce", "ring", 128),
    ("all_reduce", "ring", 1024),
    ("all_reduce", "circulant", 1000),
    ("all_reduce", "rabenseifner", 1024),
    ("all_reduce", "hierarchical", 1024),
    ("all_to_all", "bruck", 512),
]
LARGE = """
import resource, unisono
proof = unisono.schedule("all_reduce", "ring", n={n}).verify()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(proof.transfers, proof.seconds, peak)
"""


def median(run: Callable[[], object], times: int) -> float:
    """The median duration of `run`, in seconds."""
    took = []
    for _ in range(times):
        began = time.perf_counter()
        run()
        took.append(time.perf_counter() - began)
    return statistics.median(took)


def generate(schedule: Schedule) -> int:
    """Run through the steps; the number of transfers."""
    return sum(len(step) for step in schedule)


def with_numpy(schedule: Schedule) -> None:
    """Verify sums without the native core."""
    lot: ChunkState = ValueState(schedule, 0, schedule.num_slots, seed=1, native=False)
    for step in schedule:
        lot.run(step)
    if lot.first_wrong():
        raise SystemExit(f"{schedule.title}: wrong")


def small_worlds() -> list[dict[str, object]]:
    """Generation, and verification by each interpreter."""
    rows = []
    for collective, algorithm, n in WORLDS:
        s = unisono.schedule(collective, algorithm, n=n)
        row: dict[str, object] = {"schedule": s.title, "transfers": s.cost().transfers}
        row["generate_s"] = median(partial(generate, s), 5)
        row["verify_s"] = median(s.verify, 5)
        if s.collective.reduces:
            row["numpy_s"] = median(partial(with_numpy, s), 3)
        if n <= 128:
            row["oracle_s"] = median(partial(check_exactly, s), 1)
        rows.append(row)
        print_row(row)
    return rows


def large_worlds() -> list[dict[str, object]]:
    """The ring at thousands of ranks, with its peak memory."""
    rows = []
    for n in (4096, 10_240):
        result = _fresh(LARGE.format(n=n)).split()
        row: dict[str, object] = {
            "schedule": f"all_reduce by ring, n={n}",
            "transfers": int(result[0]),
            "verify_s": float(result[1]),
            "peak_mib": float(result[2]),
        }
        rows.append(row)
        print_row(row)
    return rows


def import_seconds() -> float:
    """What `import unisono` adds to a bare interpreter."""
    bare = median(lambda: _fresh("pass"), 9)
    return median(lambda: _fresh("import unisono"), 9) - bare


def _fresh(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    )
    return done.stdout


def print_row(row: dict[str, object]) -> None:
    """One line: the schedule, then each figure with its name."""
    parts = [
        f"{key} {value:,.4g}" if isinstance(value, float) else f"{key} {value:,}"
        for key, value in row.items()
        if key != "schedule"
    ]
    print(f"{row['schedule']:<36} {'   '.join(parts)}", flush=True)


def main() -> None:
    """Measure, print and write down."""
    rows = small_worlds() + large_worlds()
    seconds = import_seconds()
    print(f"import unisono: {seconds * 1000:.0f} ms on top of a bare interpreter")
    machine = f"{platform.machine()}, Python {platform.python_version()}"
    RESULTS.parent.mkdir(exist_ok=True)
    found = {"machine": machine, "import_s": seconds, "rows": rows}
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
