"""Is it true? Predicted against measured times, on links with a rate that is kept.

    sudo .venv/bin/python benchmarks/truth.py            measure, judge, draw: 6 minutes
    .venv/bin/python benchmarks/truth.py judge           what was measured, judged anew
    .venv/bin/python benchmarks/truth.py memory          shared memory instead: a minute

Hosts are network namespaces with one rank each, joined by a switch; token buckets keep
their links at 50 Mbit/s, so that two cores are never the limit. From messages between
two ranks come latency and bandwidth (by `tune`'s fit), from two collectives among four
ranks (all_gather by ring, all_to_all by direct) what a link keeps while both of its
directions are busy. Everything else is held out: other collectives and algorithms, and
six and eight ranks.

What would be measured besides the links is kept out of it:

- A bucket that was idle lets 4 KiB through at once. It is neither drained nor modelled:
  the fit finds a latency of 0, for the burst makes good what latency costs.
- Queues are long (32 MiB). With short ones, packets are lost where all send to one, and
  TCP waits 200 ms, which no model of links tells.
- TCP is Reno's, without a slow start after idle times. BBR, which some systems have by
  default, remembers the share that it had in the last crowd and starts from there.
- Every call is made twice before it is timed, so that windows are open. A time is the
  least of some: from the first rank's start to the last one's end, all on one clock.

In shared memory nothing is kept out: four ranks on the cores that there are, `tune`'s
fits of messages, of all_gather and reduce_scatter by direct, and its prices for every
other candidate. The error is what it is.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

import unisono
from unisono import Communicator
from unisono.cli._plot import pyplot, save, style
from unisono.simulate import simulate
from unisono.testing import Hosts, hosts_available, world_across
from unisono.topology import Topology
from unisono.topology.presets import switch
from unisono.tune import Tuner, candidates
from unisono.tune.fit import Fit, fit
from unisono.tune.measure import Stopwatch, calls_of, elements, whole_bytes

RESULTS = Path(__file__).parent / "results" / "truth.json"
PICTURE = Path(__file__).parent.parent / "docs" / "truth.svg"
RATE, QUEUE = "50mbit", "32M"
WORLDS = 4, 6, 8
SIZES = [64 << 10, 128 << 10, 256 << 10, 512 << 10]
ROUNDS = 4
ITEM = 4

CALIBRATED = {"all_gather": "ring", "all_to_all": "direct"}
"""Among the first of WORLDS; never judged, in none of them."""

JUDGED = {
    "all_reduce": "naive recursive_doubling direct rabenseifner ring ring:both tree"
    " circulant double_tree chain swing pat butterfly parameter_server",
    "all_gather": "direct recursive_doubling circulant ring:both pat",
    "reduce_scatter": "direct ring halving_doubling circulant swing",
    "broadcast": "naive tree direct+direct chain double_tree",
    "reduce": "naive tree direct+direct chain double_tree",
    "all_to_all": "bruck ring",
    "gather": "direct tree",
    "scatter": "direct tree",
}

Row = dict[str, Any]


# Measuring


def settled() -> None:
    """TCP as the docstring says, for the host that this is called on."""
    for name, value in (
        ("congestion_control", "reno"),
        ("slow_start_after_idle", "0"),
    ):
        Path(f"/proc/sys/net/ipv4/tcp_{name}").write_text(value)


def timed(
    comm: Communicator, calls: dict[str, Callable[[], object]]
) -> dict[str, float]:
    """Seconds from the first start to the last end, the least of some rounds."""
    for call in calls.values():
        call()
        call()
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(ROUNDS):
        for name, call in calls.items():
            comm.barrier()
            begun = np.array([-time.perf_counter()])
            call()
            ended = np.array([time.perf_counter()])
            comm.all_reduce(begun, op="max")
            comm.all_reduce(ended, op="max")
            best[name] = min(best[name], float((ended + begun)[0]))
    return best


def there_and_back(comm: Communicator, nbytes: int) -> Callable[[], None]:
    """A message from rank 0 to rank 1, and another back."""
    x, y = np.zeros(nbytes, np.uint8), np.empty(nbytes, np.uint8)

    def call() -> None:
        if comm.rank == 0:
            comm.send(x, 1)
            comm.recv(y, 1)
        elif comm.rank == 1:
            comm.recv(y, 0)
            comm.send(x, 0)

    return call


def measured(comm: Communicator) -> list[Row]:
    """Everything that one world has to be asked."""
    n = comm.world_size
    rows: list[Row] = []
    for nbytes in SIZES:
        seconds = timed(comm, {"": there_and_back(comm, nbytes)})[""] / 2
        rows.append(_row("message", "", n, nbytes, seconds))
    for collective, result in JUDGED.items():
        names = [*result.split(), *filter(None, [CALIBRATED.get(collective)])]
        for nbytes in SIZES:
            count = elements(collective, nbytes, n, ITEM)
            calls = calls_of(comm, collective, count, "float32", names)
            whole = whole_bytes(collective, count, n, ITEM)
            for name, seconds in timed(comm, calls).items():
                rows.append(_row(collective, name, n, whole, seconds))
    return rows


def _row(collective: str, algorithm: str, n: int, nbytes: int, seconds: float) -> Row:
    return {
        "collective": collective,
        "algorithm": algorithm,
        "n": n,
        "nbytes": nbytes,
        "measured": seconds,
    }


def measure() -> list[Row]:
    """All worlds, one after the other, on the same hosts."""
    if why := hosts_available():
        sys.exit(f"benchmarks/truth.py: {why}")
    rows: list[Row] = []
    with Hosts(max(WORLDS), rate=RATE, queue=QUEUE) as hosts:
        for host in hosts:
            host.call(settled)
        for n in WORLDS:
            world = world_across([1] * n, on=hosts, timeout_s=900)
            rows += world.run(measured)[0]
            print(f"# {n} ranks measured", flush=True)
    return rows


# Judging


def topology(n: int, message: Fit, duplex: float) -> Topology:
    """A switch with links as they were found to be."""
    line = message.pieces[-1]
    plain = switch(n, line.bandwidth, line.latency / 2)
    return plain.but(overhead=0.0, duplex=duplex, streams=True)


def predicted(row: Row, message: Fit, duplex: float) -> float:
    """Seconds, by events."""
    where = topology(row["n"], message, duplex)
    record = {"collective": row["collective"]}
    return simulate(row["algorithm"], where, row["nbytes"], "events", **record).time


def calibrated(rows: list[Row]) -> tuple[Fit, float]:
    """Latency and bandwidth from messages, `duplex` from two collectives."""
    first = [row for row in rows if row["n"] == WORLDS[0]]
    sent = [row for row in first if row["collective"] == "message"]
    message = fit([r["nbytes"] for r in sent], [r["measured"] for r in sent])
    known = [row for row in first if _calibrates(row)]

    def off(duplex: float) -> float:
        ratios = [predicted(row, message, duplex) / row["measured"] for row in known]
        return float(np.square(np.log(ratios)).sum())

    return message, min(np.arange(60, 101) / 100, key=off)


def _calibrates(row: Row) -> bool:
    return bool(CALIBRATED.get(row["collective"]) == row["algorithm"])


def judge(rows: list[Row]) -> dict[str, Any]:
    """The error of every prediction that was held out."""
    message, duplex = calibrated(rows)
    held = [r for r in rows if r["collective"] != "message" and not _calibrates(r)]
    for row in held:
        row["predicted"] = predicted(row, message, duplex)
        row["error"] = row["predicted"] / row["measured"] - 1
    errors = np.abs([row["error"] for row in held])
    line = message.pieces[-1]
    return {
        "rate": RATE,
        "latency": line.latency,
        "bandwidth": line.bandwidth,
        "duplex": float(duplex),
        "cases": len(held),
        "median": float(np.median(errors)),
        "p90": float(np.percentile(errors, 90)),
        "rows": rows,
    }


# Shared memory


def in_memory(comm: Communicator) -> list[Row]:
    """What `tune` predicts from its fits, and what comes out."""
    tuner = Tuner(comm)
    tuner.links()
    watch, n = Stopwatch(comm, batch_s=5e-3, rounds=5), comm.world_size
    rows: list[Row] = []
    for collective in ("all_reduce", "all_gather", "reduce_scatter", "broadcast"):
        known = collective in ("all_gather", "reduce_scatter")
        names = candidates(collective, comm.hosts)
        names = [name for name in names if not (known and name == "direct")]
        for nbytes in (64 << 10, 512 << 10, 4 << 20):
            count = elements(collective, nbytes, n, ITEM)
            calls = calls_of(comm, collective, count, "float32", names)
            whole = whole_bytes(collective, count, n, ITEM)
            for name, times in watch.race(calls).items():
                row = _row(collective, name, n, whole, float(np.median(times)))
                found = tuner.costs.seconds(collective, name, comm.hosts, whole)
                rows.append(
                    row | {"predicted": found, "error": found / row["measured"] - 1}
                )
    return rows


def memory() -> None:
    """Judge the prices of `tune` on four ranks of this machine."""
    rows = unisono.spawn(in_memory, 4, timeout_s=600)[0]
    errors = np.abs([row["error"] for row in rows])
    median, p90 = float(np.median(errors)), float(np.percentile(errors, 90))
    record = {
        "cases": len(rows),
        "median": median,
        "p90": p90,
        "load": os.getloadavg()[0],
    }
    RESULTS.with_name("truth_memory.json").write_text(
        json.dumps({**record, "rows": rows}, indent=1) + "\n"
    )
    print(f"{len(rows)} cases: median {median:.0%}, p90 {p90:.0%}")


def draw(result: dict[str, Any]) -> None:
    """Predicted over measured, a point for each case; on the line they are equal."""
    plot = pyplot("benchmarks/truth.py")
    plot.rcParams["svg.hashsalt"] = "unisono"
    figure, axes = plot.subplots(figsize=(6.4, 5.2))
    held = [row for row in result["rows"] if "predicted" in row]
    for n in WORLDS:
        mine = [row for row in held if row["n"] == n]
        x, y = ([row[key] * 1e3 for row in mine] for key in ("measured", "predicted"))
        axes.scatter(x, y, s=12, label=f"{n} ranks", alpha=0.7)
    ends = [f(row["measured"] for row in held) * 1e3 for f in (min, max)]
    axes.plot(ends, ends, color="black", linewidth=1, label="equal")
    axes.fill_between(
        ends,
        [0.75 * e for e in ends],
        [1.25 * e for e in ends],
        color="grey",
        alpha=0.15,
        label="25 % either way",
    )
    style(
        axes,
        xscale="log",
        yscale="log",
        xlabel="measured, ms",
        ylabel="predicted, ms",
        title=f"{result['cases']} held-out cases: median error {result['median']:.1%}, "
        f"90 % below {result['p90']:.1%}",
    )
    save(figure, PICTURE)


def main() -> None:
    """Measure (unless switched off), compare, draw, and write the results."""
    if sys.argv[1:] == ["memory"]:
        memory()
        return
    if sys.argv[1:] == ["judge"]:
        rows = json.loads(RESULTS.read_text())["rows"]
    else:
        rows = measure()
        RESULTS.write_text(json.dumps({"rows": rows}))  # judged anew if that fails
    result = judge(rows)
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    worst = [row for row in result["rows"] if "error" in row]
    for row in sorted(worst, key=lambda r: -abs(r["error"]))[:12]:
        print(
            f"{row['error']:+.0%} {row['collective']} by {row['algorithm']}, "
            f"n = {row['n']}, {row['nbytes'] >> 10} KiB"
        )
    print(
        f"{result['bandwidth'] / 1e6:.2f} MB/s, duplex {result['duplex']:.2f}; "
        f"{result['cases']} cases: median {result['median']:.1%}, "
        f"p90 {result['p90']:.1%}; "
        "asked for: 10 %, 25 %"
    )
    draw(result)


if __name__ == "__main__":
    # By its name, so that ranks find its functions.
    import_module("truth").main()
