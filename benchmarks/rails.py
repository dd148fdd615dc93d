"""Two hosts with two network cards each, of different speed: how much of both is used?

    sudo .venv/bin/python benchmarks/rails.py [size] [rate rate ...]

The hosts are network namespaces, their links have rates that the kernel keeps (300mbit
and 100mbit if none are given). What must cross a host's link is the buffer once in each
direction for an all_reduce on two ranks, and once in one direction for a send; the time
that takes at the sum of the rates is the limit. Each call is measured over both cards
and over the first alone. The bytes that each card carried are those of the kernel.
"""

from __future__ import annotations

import json
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from unisono import Communicator
from unisono.testing import Hosts, hosts_available, world_across
from unisono.units import format_bytes, parse_bytes, parse_rate

RESULTS = Path(__file__).parent / "results" / "rails.json"
PAYLOAD = 1448 / 1514
"""Of a full packet on a link with frames of 1,514 bytes, what is ours."""
CALLS = ("all_reduce", "send")


def carried(cards: int) -> list[int]:
    """The bytes that this host has sent over each card."""
    counters = "/sys/class/net/eth{}/statistics/tx_bytes"
    return [int(Path(counters.format(k)).read_text()) for k in range(cards)]


def timed(comm: Communicator, nbytes: int, rounds: int, cards: int) -> dict[str, Any]:
    """Seconds of each call, the median of some, and what each card carried."""
    x = np.ones(nbytes // 4, np.float32)
    found: dict[str, Any] = {}
    for name in CALLS:
        took = []
        for _ in range(rounds + 1):  # the first opens the streams
            comm.barrier()
            before, begun = carried(cards), time.perf_counter()
            if name == "all_reduce":
                comm.all_reduce(x)
            elif comm.rank == 0:
                comm.send(x, 1)
            else:
                comm.recv(x, 0)
            mine = np.array([time.perf_counter() - begun])
            comm.all_reduce(mine, op="max")
            took.append(float(mine[0]))
        after = carried(cards)
        bytes_of = [a - b for a, b in zip(after, before, strict=True)]
        found[name] = {"seconds": float(np.median(took[1:])), "bytes": bytes_of}
    found["explained"] = comm.explain("all_reduce", x)
    return found


def main(size: str = "64M", *rates: str) -> None:
    """Measure, print a table, and keep it."""
    if why := hosts_available():
        sys.exit(f"benchmarks/rails.py: {why}")
    rates = rates or ("300mbit", "100mbit")
    nbytes, every = parse_bytes(size), sum(map(parse_rate, rates))
    limit = nbytes * 8 / (every * PAYLOAD)
    names = [f"eth{k}" for k in range(len(rates))]
    kept: dict[str, Any] = {"bytes": nbytes, "rates": rates, "limit_s": limit}
    print(f"{format_bytes(nbytes)} over {', '.join(rates)}: limit {limit * 1e3:.1f} ms")
    with Hosts(2, rate=rates[0], rails=rates[1:]) as hosts:
        for used in (names, names[:1]):
            env = {"UNISONO_INTERFACE": ",".join(used)}
            world = world_across([1, 1], on=hosts, timeout_s=300, env=env)
            result = world.run(timed, nbytes, 5, len(rates))[0]
            for name in CALLS:
                seconds, sent = result[name]["seconds"], result[name]["bytes"]
                share = ", ".join(f"{bytes_ / sum(sent):.0%}" for bytes_ in sent)
                print(
                    f"{name:<11} {'+'.join(used):<10} {seconds * 1e3:9.1f} ms: "
                    f"{limit / seconds:.1%} of the limit; by card {share}"
                )
            kept["+".join(used)] = {name: result[name] for name in CALLS}
            print(result["explained"])
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    # By its own name, as the ranks of other hosts import it.
    sys.path.insert(0, str(Path(__file__).parent))
    import_module("rails").main(*sys.argv[1:])
