"""How good is the choice between hosts without a table, with probed links and without?

    sudo .venv/bin/python benchmarks/choice_hosts.py [NETWORK ...]     a minute for each

Hosts are network namespaces with one rank each; their links have the rates below. For
some collectives and sizes every candidate of `tune` is measured in turns. Regret is the
time of what `choose` takes over that of the best: once with the constants of an
ordinary network, once with the links as they were probed when the ranks met. Every
second turn says who is best, the others what is lost to it; of the turns the least
counts, for what disturbs a turn only makes it longer. `error` is how far the expected
time of the chosen is from the measured one. Results go to benchmarks/results/.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from unisono import Communicator
from unisono.runtime.plan.predict import MODEL
from unisono.runtime.plan.select import choose
from unisono.runtime.world import links
from unisono.testing import Hosts, hosts_available, world_across
from unisono.tune import candidates
from unisono.tune.measure import Call, calls_of, elements, whole_bytes
from unisono.units import format_bytes

CHOICE: Any = import_module("choice")  # beside this file
RESULTS = Path(__file__).parent / "results" / "choice_hosts.json"
NETWORKS = {
    "3 x 200M": ["200mbit"] * 3,
    "4 x 200M": ["200mbit"] * 4,
    "3 x 1G": ["1gbit"] * 3,
    "4 x 1G": ["1gbit"] * 4,
    "3 x 5G": ["5gbit"] * 3,
    "4 x 5G": ["5gbit"] * 4,
    "200M 1G 1G": ["200mbit", "1gbit", "1gbit"],
    "200M 200M 1G 1G": ["200mbit", "200mbit", "1gbit", "1gbit"],
    "1G 5G 5G 5G": ["1gbit", "5gbit", "5gbit", "5gbit"],
}
SIZES = {
    "all_reduce": [4 << 10, 64 << 10, 1 << 20, 16 << 20],
    "broadcast": [4 << 10, 64 << 10, 1 << 20],
    "all_gather": [4 << 10, 64 << 10, 1 << 20],
}
ITEM = 4
TURNS = 8
SHARE_S = 5.0
"""How long a size is measured, about; at least four turns are made."""
NEAR = 2.0
"""Who is raced: all who came within so many times the best when they were tried."""
LARGE = 64 << 10
HOPELESS = 1.6
"""Who was so far behind at a large size is not tried at a larger one."""

Row = dict[str, Any]


def judged(comm: Communicator) -> list[Row]:
    """Every candidate at every size, and what would be chosen."""
    begun = time.perf_counter()
    model = links.probed(comm, 60.0)
    took = time.perf_counter() - begun
    found = []
    n = comm.world_size
    for collective, sizes in SIZES.items():
        left: list[str] = candidates(collective, comm.hosts)
        for wanted in sizes:
            count = elements(collective, wanted, n, ITEM)
            nbytes = whole_bytes(collective, count, n, ITEM)
            picks = {
                how: choose(
                    *(collective, nbytes, n),
                    named=None,
                    reproducible=False,
                    hosts=comm.hosts,
                    model=given,
                )
                for how, given in (("before", None), ("after", model))
            }
            chosen = [pick.algorithm for pick in picks.values()]
            calls = calls_of(comm, collective, count, "float32", [*left, *chosen])
            times = raced(comm, calls, chosen)
            if wanted >= LARGE:  # who is far behind remains so
                least = min(min(t) for t in times.values())
                left = [k for k in left if min(times[k]) < HOPELESS * least]
                left = comm.broadcast_object(left)
            row: Row = {"collective": collective, "nbytes": nbytes}
            row |= {"probe_s": took, "steady": model.start != MODEL.start}
            for how, pick in picks.items():
                row[how] = CHOICE.compared(times, pick.algorithm, min)
                error = pick.predicted / min(times[pick.algorithm]) - 1
                row[how]["error"] = error
            found.append(row)
    return found


def raced(
    comm: Communicator, calls: dict[str, Call], chosen: list[str]
) -> dict[str, list[float]]:
    """The seconds of each call in each turn; of those far behind only of two."""
    for call in calls.values():
        call()
    times = {name: [timed(comm, call) for _ in "ab"] for name, call in calls.items()}
    best = min(min(seconds) for seconds in times.values())
    near = [k for k, seconds in times.items() if min(seconds) < NEAR * best]
    near = comm.broadcast_object(list(dict.fromkeys([*near, *chosen])))
    turns = int(SHARE_S / sum(min(times[name]) for name in near))
    turns = int(comm.broadcast_object(max(4, min(TURNS, turns // 2 * 2))))
    count = int(comm.broadcast_object(max(1, min(8, int(1e-3 / best)))))
    for _ in range(turns):
        for name in near:
            times[name].append(timed(comm, calls[name], count))
    return times


def timed(comm: Communicator, call: Call, count: int = 1) -> float:
    """The seconds of a call, from the first start to the last end, by one clock."""
    comm.barrier()
    ends = np.array([-time.perf_counter(), 0.0])
    for _ in range(count):
        call()
    ends[1] = time.perf_counter()
    return float(comm.all_reduce(ends, op="max").sum()) / count


def summary(rows: list[Row], how: str) -> dict[str, float]:
    """What is asked for, of one way to choose."""
    error = median(abs(row[how]["error"]) for row in rows)
    return {**CHOICE.regret([row[how] for row in rows]), "error": error}


def main(names: list[str]) -> None:
    """Measure, print a table, and keep it."""
    if why := hosts_available():
        sys.exit(f"benchmarks/choice_hosts.py: {why}")
    ours: Any = import_module("choice_hosts")  # so that ranks can import what they run
    kept: dict[str, list[Row]] = {}
    if RESULTS.exists() and names:
        kept = json.loads(RESULTS.read_text())["networks"]
    for name in names or NETWORKS:
        rates = NETWORKS[name]
        with Hosts(len(rates)) as hosts:
            for number, rate in enumerate(rates):
                hosts.limit(number, rate)
            world = world_across(
                [1] * len(rates), on=hosts, timeout_s=600, env={"UNISONO_PROBE": "0"}
            )
            kept[name] = world.run(ours.judged)[0]
        for row in kept[name]:
            print(
                f"{name:16} {row['collective']:10} {format_bytes(row['nbytes']):>8}  "
                + "   ".join(
                    f"{how} {row[how]['ratio']:.2f} {row[how]['chosen']} "
                    f"({row[how]['error']:+.0%})"
                    for how in ("before", "after")
                )
                + f"   best {row['after']['best']}",
                flush=True,
            )
        report(name, kept[name])
    rows = [row for found in kept.values() for row in found]
    total = {how: summary(rows, how) for how in ("before", "after")}
    report("all", rows)
    record = {**total, "load": os.getloadavg()[0], "networks": kept}
    RESULTS.write_text(json.dumps(record, indent=1) + "\n")


def report(name: str, rows: list[Row]) -> None:
    """The summary as a row of the table in docs/tuning.md."""
    cells = []
    for how in ("before", "after"):
        found = summary(rows, how)
        cells += [
            f"{found['mean']:.2f}",
            f"{found['p95']:.2f}",
            f"{found['error']:.0%}",
        ]
    probe = max(row["probe_s"] for row in rows) * 1e3
    at_rest = "" if all(row["steady"] for row in rows) else ", hosts were busy"
    cells += [f"{summary(rows, 'after')['noise']:.2f}", f"{probe:.0f} ms{at_rest}"]
    print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    import_module("choice_hosts").main(sys.argv[1:])
