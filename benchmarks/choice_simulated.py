"""How good is the choice between hosts, with the event simulator as the truth?

    .venv/bin/python benchmarks/choice_simulated.py          two minutes, nothing is run

The networks and sizes are those of choice_hosts.py, and times are simulated by events
on a switch with such links: a message costs its sender 60 µs and a link 90 µs, as
between busy hosts, or a fifth of that. The constants of the model are those that a
probe would find there, with errors by chance: rates and times up to `ERROR` too long.
Regret is the simulated time of what is chosen over that of the best candidate.

    ordinary    the constants of an ordinary network
    rate alone  one rate as of busy hosts, latencies of an ordinary network
    busy        one rate as of busy hosts, latencies as of small calls
    probed      rates of each host, latencies as of small calls
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from functools import lru_cache, partial
from importlib import import_module
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import numpy as np

from unisono.runtime.plan.predict import (
    MODEL,
    CostModel,
    all_alike,
    fitted,
    small_calls,
)
from unisono.runtime.plan.select import choose
from unisono.simulate import simulate
from unisono.topology import Topology, load
from unisono.tune import candidates
from unisono.units import format_bytes

HOSTS: Any = import_module("choice_hosts")  # beside this file
ERROR = 1.4
LATENCIES = {"busy": (60e-6, 90e-6), "at rest": (12e-6, 18e-6)}
"""Of a message for its sender, and of a link."""
RATES = {"200mbit": 25e6, "1gbit": 125e6, "5gbit": 625e6}
TRIES = 3
"""How often the errors of a probe are drawn."""


def network(rates: list[str], costs: tuple[float, float]) -> Topology:
    """Hosts with one rank each on a switch, and links of these rates."""
    overhead, latency = costs
    text = f'ranks = {len(rates)}\nname = "hosts"\nswitches = ["hub"]\n'
    text += f'overhead = "{overhead * 1e6:g}us"\n'
    for rank, rate in enumerate(rates):
        text += f'[[links]]\nbetween = [[{rank}], ["hub"]]\nkind = "r{rate}"\n'
    for rate in set(rates):
        text += f'[kinds.r{rate}]\nlatency = "{latency * 1e6:g}us"\n'
        text += f'bandwidth = "{RATES[rate] / 1e6:g}MB/s"\n'
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "hosts.toml"
        file.write_text(text)
        return load(file)


def models(where: Topology, rates: list[str], chance: Random) -> dict[str, CostModel]:
    """What a probe of these hosts would come to, with errors by chance."""
    n = where.n
    hosts = tuple(range(n))

    def late() -> float:
        return chance.uniform(1.0, ERROR)

    pairs = {
        (a, b): late() / min(RATES[rates[a]], RATES[rates[b]])
        for a in hosts
        for b in hosts
        if a != b
    }
    seconds = [
        late() * simulate(name, where, 8 * n, "events", collective=collective).time
        for collective, name in small_calls(n)
    ]
    fastest = min(pairs.values())
    return {
        "ordinary": MODEL,
        "rate alone": all_alike(n, fastest),
        "busy": fitted(hosts, dict.fromkeys(pairs, fastest), seconds),
        "probed": fitted(hosts, pairs, seconds),
    }


@lru_cache(maxsize=64)
def timed(where: Topology, collective: str, nbytes: int, algorithm: str) -> float:
    """The simulated seconds of a call."""
    return simulate(algorithm, where, nbytes, "events", collective=collective).time


def judged() -> Iterator[dict[str, object]]:
    """Every network, latency, collective and size, by every model."""
    chance = Random(1)
    for (name, rates), (load_, costs) in (
        (one, two) for one in HOSTS.NETWORKS.items() for two in LATENCIES.items()
    ):
        where = network(rates, costs)
        hosts = tuple(range(where.n))
        known = [models(where, rates, chance) for _ in range(TRIES)]
        for collective, sizes in HOSTS.SIZES.items():
            names = candidates(collective, hosts)
            for nbytes in sizes:
                time = partial(timed, where, collective, nbytes)
                best = min(map(time, names))
                for how in known[0]:
                    for one in known:
                        found = choose(
                            *(collective, nbytes, where.n),
                            named=None,
                            reproducible=False,
                            hosts=hosts,
                            model=one[how],
                        )
                        yield {
                            "network": name,
                            "hosts": load_,
                            "collective": collective,
                            "nbytes": nbytes,
                            "how": how,
                            "chosen": found.algorithm,
                            "regret": time(found.algorithm) / best,
                        }


def main() -> None:
    """Print regrets by model and size, and keep them."""
    rows = list(judged())
    sizes = sorted({int(str(row["nbytes"])) for row in rows})
    kept: dict[str, dict[str, object]] = {}
    print(f"| constants | mean | 95 % below | {' | '.join(map(format_bytes, sizes))} |")
    for how in dict.fromkeys(str(row["how"]) for row in rows):
        mine = [row for row in rows if row["how"] == how]
        regrets = [float(str(row["regret"])) for row in mine]
        by_size = {
            str(size): fmean(
                float(str(r["regret"])) for r in mine if r["nbytes"] == size
            )
            for size in sizes
        }
        p95 = float(np.percentile(regrets, 95))
        kept[how] = {"mean": fmean(regrets), "p95": p95, "by_size": by_size}
        cells = " | ".join(f"{regret:.2f}" for regret in by_size.values())
        print(f"| {how} | {fmean(regrets):.2f} | {p95:.2f} | {cells} |")
    file = HOSTS.RESULTS.with_name("choice_simulated.json")
    file.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
