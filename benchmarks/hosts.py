"""Several ranks on each of a few hosts with slow links between: who fills the links?

    sudo .venv/bin/python benchmarks/hosts.py [hosts] [ranks per host] [rate] [size]

The hosts are network namespaces, their links have a rate that the kernel keeps. What
must cross a host's link in an all_reduce is 2(H-1)/H of the buffer in each direction;
the time that takes at the rate of a plain TCP stream is the limit. A flat ring in a bad
order of the ranks crosses at every step, for every rank.
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
from unisono.schedule.placement import written
from unisono.testing import Hosts, hosts_available, world_across
from unisono.units import format_bytes, parse_bytes

RESULTS = Path(__file__).parent / "results" / "hosts.json"
PAYLOAD = 1448 / 1514
"""Of a full packet on a link with frames of 1,514 bytes, what is ours."""


def timed(
    comm: Communicator, names: list[str], nbytes: int, calls: int
) -> dict[str, Any]:
    """Seconds of one all_reduce by each algorithm, the best of some."""
    x = np.ones(nbytes // 4, np.float32)
    best: dict[str, float] = {}
    for _ in range(calls):
        for name in names:
            comm.barrier()
            begun = time.perf_counter()
            comm.all_reduce(x, algorithm=name or None)
            took = np.array([time.perf_counter() - begun])
            comm.all_reduce(took, op="max")
            best[name] = min(best.get(name, 9e9), float(took[0]))
    chosen = comm.explain("all_reduce", x).splitlines()[0].rpartition(" by ")[2]
    return {"chosen": chosen, "best": best}


def main(
    hosts: int = 2, per_host: int = 4, rate: str = "1gbit", size: str = "16M"
) -> None:
    """Measure, print a table, and keep it."""
    if why := hosts_available():
        sys.exit(f"benchmarks/hosts.py: {why}")
    n, nbytes = hosts * per_host, parse_bytes(size)
    names, bad = ["", "direct", "ring"], "ring, the hosts in turn"
    with Hosts(hosts, rate=rate) as links:
        world = world_across([per_host] * hosts, on=links, timeout_s=300)
        result = world.run(timed, names, nbytes, 5)[0]
        result["best"][bad] = world.run(in_bad_order, nbytes, 3)[0]
    bits = float(rate.removesuffix("gbit")) * 1e9
    limit = 2 * (hosts - 1) / hosts * nbytes * 8 / (bits * PAYLOAD)
    print(f"all_reduce of {format_bytes(nbytes)} on {hosts} hosts of {per_host} ranks")
    print(f"limit of the link ({rate}): {limit * 1e3:.1f} ms")
    for name, seconds in sorted(result["best"].items(), key=lambda pair: pair[1]):
        label = name or f"chosen: {result['chosen']}"
        print(f"{seconds * 1e3:9.1f} ms {seconds / limit:6.2f} of the limit  {label}")
    kept = {"hosts": hosts, "per_host": per_host, "rate": rate, "bytes": nbytes}
    kept |= {"limit_s": limit, "seconds": result["best"], "chosen": result["chosen"]}
    kept |= {"placement": written([r // per_host for r in range(n)])}
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n")


def in_bad_order(comm: Communicator, nbytes: int, calls: int) -> float:
    """A flat ring whose neighbours are all on other hosts."""
    hosts = len(set(comm.hosts))
    place = [r for r, h in enumerate(comm.hosts) if h == comm.hosts[comm.rank]]
    turned = comm.split(0, key=place.index(comm.rank) * hosts + comm.hosts[comm.rank])
    assert turned is not None  # every rank has a color
    best = timed(turned, ["ring"], nbytes, calls)["best"]["ring"]
    return float(best)


if __name__ == "__main__":
    given = sys.argv[1:]
    # By its name, so that ranks find its functions.
    import_module("hosts").main(*map(int, given[:2]), *given[2:])
