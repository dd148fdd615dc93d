"""How good is the choice between hosts without a table, with probed links and without?

    sudo .venv/bin/python benchmarks/choice_hosts.py [NETWORK ...]
        [--minutes 11] [--congestion reno]

Hosts are network namespaces with one rank each; their links have the rates below. For
some collectives and sizes every candidate of `tune` is measured in turns. Regret is the
time of what `choose` takes over that of the best: once with the constants of an
ordinary network, once with the links as they were probed when the ranks met. Every
second turn says who is best, the others what is lost to it; of the turns the least
counts, for what disturbs a turn only makes it longer. In a turn all ranks wait for each
other before each call, or broadcasts would overlap, which no expected time tells.
`error` is how far the expected time of the chosen is from the measured one. Results go
to benchmarks/results/.

All networks take as long as `--minutes` says, about; what a network has no time for is
named, and not judged. Results are written after each network. Hosts have the congestion
control of this system; `--congestion reno` is what every system allows them.
"""

from __future__ import annotations

import argparse
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
MINUTES = 11.0
STARTING_S = 8.0
"""How long ranks take to start on a network, and to try who is far behind."""
TRIED_PART = 0.5
"""Of the time for a size, that in which candidates are tried, before some are raced."""
LEAST_TURNS = 4
LONG, MANY = 4 << 20, 4
"""From so many bytes on a size has so many times as much time as another."""
NEAR = 2.0
"""Who is raced: all who came within so many times the best when they were tried."""
LARGE = 64 << 10
HOPELESS = 1.6
"""Who was so far behind at a large size is not tried at a larger one."""

CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")
Row = dict[str, Any]


def judged(comm: Communicator, limit_s: float) -> list[Row]:
    """Every candidate at every size, as far as there is time, and what is chosen."""
    until = time.monotonic() + limit_s
    share_s = limit_s / sum(weight(s) for sizes in SIZES.values() for s in sizes)
    comm.barrier()
    begun = time.perf_counter()
    model = links.probed(comm, 60.0)
    took = time.perf_counter() - begun
    found = []
    n = comm.world_size
    for collective, sizes in SIZES.items():
        left: list[str] = candidates(collective, comm.hosts)
        for wanted in sizes:
            if comm.broadcast_object(time.monotonic() > until):
                break
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
            calls = calls_of(comm, collective, count, "float32", [*chosen, *left])
            times = raced(comm, calls, chosen, weight(wanted) * share_s)
            if wanted >= LARGE:  # who is far behind remains so
                least = min(min(t) for t in times.values())
                left = [k for k in left if min(times.get(k, [0.0])) < HOPELESS * least]
                left = comm.broadcast_object(left)
            row: Row = {"collective": collective, "nbytes": nbytes}
            row |= {"probe_s": took, "steady": model.start != MODEL.start}
            for how, pick in picks.items():
                row[how] = CHOICE.compared(times, pick.algorithm, min)
                error = pick.predicted / min(times[pick.algorithm]) - 1
                row[how]["error"] = error
            found.append(row)
    return found


def weight(nbytes: int) -> int:
    """How many shares of the time a size has."""
    return MANY if nbytes >= LONG else 1


def raced(
    comm: Communicator, calls: dict[str, Call], chosen: list[str], share_s: float
) -> dict[str, list[float]]:
    """The seconds of each call in each turn; of those far behind only of two.

    All in about `share_s`: who is not tried in its first part is not judged.
    """
    until = time.monotonic() + TRIED_PART * share_s
    times: dict[str, list[float]] = {}
    for name, call in calls.items():  # the chosen ones first
        if name not in chosen and comm.broadcast_object(time.monotonic() > until):
            break
        call()
        times[name] = [timed(comm, call), timed(comm, call)]
    best = min(min(seconds) for seconds in times.values())
    near = sorted(times, key=lambda name: min(times[name]))
    near = [name for name in near if min(times[name]) < NEAR * best]
    left = (1 - TRIED_PART) * share_s
    while len(near) > 2 and LEAST_TURNS * sum(min(times[k]) for k in near) > left:
        near.pop()
    near = comm.broadcast_object(list(dict.fromkeys([*near, *chosen])))
    turns = int(left / sum(min(times[name]) for name in near))
    turns = int(comm.broadcast_object(max(LEAST_TURNS, min(TURNS, turns // 2 * 2))))
    count = int(comm.broadcast_object(max(1, min(8, int(1e-3 / best)))))
    for _ in range(turns):
        for name in near:
            times[name].append(timed(comm, calls[name], count))
    return times


def timed(comm: Communicator, call: Call, count: int = 1) -> float:
    """The seconds of a call, from the first start to the last end, by one clock.

    The least of some, each of which all ranks begin together.
    """
    ends = np.empty((2, count))
    for k in range(count):
        comm.barrier()
        ends[0, k] = -time.perf_counter()
        call()
        ends[1, k] = time.perf_counter()
    return float(comm.all_reduce(ends, op="max").sum(axis=0).min())


def summary(rows: list[Row], how: str) -> dict[str, float]:
    """What is asked for, of one way to choose."""
    error = median(abs(row[how]["error"]) for row in rows)
    return {**CHOICE.regret([row[how] for row in rows]), "error": error}


def settled(congestion: str) -> None:
    """The congestion control of the host that this is called on."""
    CONGESTION.write_text(congestion)


def main() -> None:
    """Measure, print a table, and keep it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("networks", nargs="*", choices=[*NETWORKS, []])
    parser.add_argument("--minutes", type=float, default=MINUTES)
    parser.add_argument("--congestion", default="")
    args = parser.parse_args()
    names = args.networks or [*NETWORKS]
    limit_s = 60 * args.minutes / len(names) - STARTING_S
    if limit_s <= 0:
        least = STARTING_S * len(names) / 60
        parser.error(f"--minutes: {len(names)} networks start in {least:.1f} minutes")
    if why := hosts_available():
        sys.exit(f"benchmarks/choice_hosts.py: {why}")
    kept: dict[str, list[Row]] = {}
    if RESULTS.exists() and args.networks:
        kept = json.loads(RESULTS.read_text())["networks"]
    used = args.congestion or CONGESTION.read_text().strip()
    for name in names:
        kept[name] = measured(NETWORKS[name], limit_s, args.congestion)
        show(name, kept[name])
        keep(kept, used)
    report("all", together(kept))


def together(kept: dict[str, list[Row]]) -> list[Row]:
    """The rows of all networks."""
    return [row for found in kept.values() for row in found]


def keep(kept: dict[str, list[Row]], congestion: str) -> None:
    """Write what was found so far, if there is anything."""
    if not (rows := together(kept)):
        return
    total = {how: summary(rows, how) for how in ("before", "after")}
    load = os.getloadavg()[0]
    record = {**total, "congestion": congestion, "load": load, "networks": kept}
    RESULTS.write_text(json.dumps(record, indent=1) + "\n")


def measured(rates: list[str], limit_s: float, congestion: str) -> list[Row]:
    """What ranks on hosts with links of these rates find."""
    ours: Any = import_module("choice_hosts")  # so that ranks can import what they run
    with Hosts(len(rates)) as hosts:
        for number, rate in enumerate(rates):
            hosts.limit(number, rate)
            if congestion:
                hosts[number].call(settled, congestion)
        world = world_across(
            [1] * len(rates), on=hosts, timeout_s=600, env={"UNISONO_PROBE": "0"}
        )
        rows: list[Row] = world.run(ours.judged, limit_s)[0]
        return rows


def show(name: str, rows: list[Row]) -> None:
    """What was found on a network, and for what there was no time."""
    for row in rows:
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
    missing = sum(map(len, SIZES.values())) - len(rows)
    if missing:
        print(f"{name:16} no time for {missing} sizes", flush=True)
    report(name, rows)


def report(name: str, rows: list[Row]) -> None:
    """The summary as a row of the table in docs/tuning.md; of no rows there is none."""
    if not rows:
        return
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
    import_module("choice_hosts").main()
