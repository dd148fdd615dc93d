"""Is a synthesized schedule faster where links differ, when it is run?

    sudo .venv/bin/python benchmarks/synthesis_hosts.py          two to four minutes

Hosts are network namespaces with one rank each, on a switch, with links of 200, 200,
1000 and 1000 Mbit/s. An all_reduce is synthesized for that, written to a file, and run
in turns with the candidates of the library; of the turns the least counts.
"""

from __future__ import annotations

import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from unisono import Communicator
from unisono.synthesize import save, synthesize
from unisono.testing import Hosts, hosts_available, world_across
from unisono.topology import load
from unisono.tune import candidates
from unisono.tune.measure import Call, calls_of
from unisono.units import format_bytes, parse_rate

RATES = "200mbit", "200mbit", "1gbit", "1gbit"
SIZES = 1 << 20, 4 << 20, 16 << 20
SEGMENTS = 4, 8, 16, 32
TRIES, TURNS = 2, 4
NEAR = 1.35
ITEM = 4

TOPOLOGY = """ranks = {n}
name = "{name}"
switches = ["switch"]
{links}
"""
LINK = """[kinds.link{i}]
latency = "20us"
bandwidth = "{rate}MB/s"
[[links]]
between = [[{i}], ["switch"]]
kind = "link{i}"
"""


def made_for(rates: tuple[str, ...], file: Path) -> None:
    """Write the schedule for hosts with these rates on a switch."""
    mega = [parse_rate(rate) / 8e6 for rate in rates]
    text = "\n".join(LINK.format(i=i, rate=rate) for i, rate in enumerate(mega))
    name = "/".join(rates)
    where = file.with_suffix(".toml")
    where.write_text(TOPOLOGY.format(n=len(rates), name=name, links=text))
    save(synthesize("all_reduce", load(where)), file)


def raced(comm: Communicator, file: str) -> list[tuple[int, dict[str, float]]]:
    """The least time of every candidate and of ours, at every size."""
    ours = [f"{file}:segments={count}" for count in SEGMENTS]
    names = [*candidates("all_reduce", comm.hosts), *ours]
    found = []
    for nbytes in SIZES:
        calls = calls_of(comm, "all_reduce", nbytes // ITEM, "float32", names)
        best = dict.fromkeys(names, float("inf"))
        for turn in range(TRIES + TURNS):
            for name in list(calls):
                best[name] = min(best[name], timed(comm, calls[name]))
            if turn + 1 == TRIES:
                limit = NEAR * min(best.values())
                near = [k for k in calls if best[k] <= limit or k in ours]
                calls = {name: calls[name] for name in comm.broadcast_object(near)}
        names = list(calls)
        found.append((nbytes, {name: best[name] for name in calls}))
    return found


def timed(comm: Communicator, call: Call) -> float:
    """The seconds of a call, from the first start to the last end, by one clock."""
    comm.barrier()
    ends = np.array([-time.perf_counter(), 0.0])
    call()
    ends[1] = time.perf_counter()
    return float(comm.all_reduce(ends, op="max").sum())


def main() -> None:
    """Measure and print."""
    if why := hosts_available():
        sys.exit(f"benchmarks/synthesis_hosts.py: {why}")
    ours: Any = import_module("synthesis_hosts")  # so that ranks can import it
    with tempfile.TemporaryDirectory() as folder, Hosts(len(RATES)) as hosts:
        file = Path(folder) / "ours.py"
        made_for(RATES, file)
        for number, rate in enumerate(RATES):
            hosts.limit(number, rate)
        world = world_across([1] * len(RATES), on=hosts, timeout_s=900)
        for nbytes, times in world.run(ours.raced, str(file))[0]:
            (best, name), (mine, how) = (
                min((t, k) for k, t in times.items() if (str(file) in k) == own)
                for own in (False, True)
            )
            print(
                f"| {format_bytes(nbytes)} | {mine * 1e3:.1f} ms, "
                f"{how.rpartition(':')[2]} | {best * 1e3:.1f} ms, {name} | "
                f"{best / mine:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    import_module("synthesis_hosts").main()
