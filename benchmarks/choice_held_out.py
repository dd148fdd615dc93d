"""How good is the choice between hosts in cases that it was not made for?

    .venv/bin/python benchmarks/choice_held_out.py [SEED] [NETWORKS]     ten minutes

Networks are drawn by a seed: 2 to 8 hosts of one rank or several, links of 100 Mbit/s
to 400 Gbit/s, equal or not, latencies, memory and adding of machines from slow to fast.
Every collective has sizes of 1 KiB to 256 MiB, drawn as well. As in
choice_simulated.py the event simulator is the truth, and regret is the simulated time
of what is chosen over that of the best candidate of `tune`, which are more than the
choice is made from. The links are probed in the simulation by the same rules
(`runtime/world/bursts.py`): they have their latency, and times are up to 1.4 times too
long by chance.

In the simulator a message costs its sender time, and its receiver none. Between hosts
it costs both. So each schedule is simulated backwards as well, where receivers send,
without adding; the longer time counts.

Seeds are for different uses. `TUNING` is for looking at single cases and changing the
model. `HELD_OUT` is the judgment: no constant is changed because of its cases. Seed 2
was that before candidates were simulated.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from importlib import import_module
from random import Random
from statistics import fmean
from typing import Any

import numpy as np

from unisono.algorithms import schedule
from unisono.runtime.plan.predict import (
    MODEL,
    CostModel,
    fitted,
    small_calls,
)
from unisono.runtime.plan.select import choose
from unisono.runtime.world import bursts, links
from unisono.schedule.collective import COLLECTIVES
from unisono.simulate import simulate
from unisono.topology import Topology
from unisono.topology.files import loads
from unisono.tune import candidates
from unisono.units import format_bytes

SIMULATED: Any = import_module("choice_simulated")  # beside this file
TUNING, HELD_OUT = 1, 3
NETWORKS = 40
SIZES = 2
"""How many are drawn for each collective."""
SMALLEST, LARGEST = 10, 28
"""Powers of two, of bytes."""
MOST_RANKS = 16
READERS = 4
"""So many ranks of a host read from the same memory without slowing each other."""
WORST = 12

Row = dict[str, Any]


@dataclass(frozen=True)
class Network:
    """Hosts on one switch; ranks of a host share its link, and its memory."""

    ranks: tuple[int, ...]
    rates: tuple[float, ...]
    overhead: float
    latency: float
    memory: float
    memory_latency: float
    reduce: float
    duplex: float
    streams: bool

    @property
    def hosts(self) -> tuple[int, ...]:
        """The host of each rank."""
        return tuple(h for h, count in enumerate(self.ranks) for _ in range(count))

    @property
    def family(self) -> str:
        """What is told apart in the table."""
        many = "several ranks a host" if max(self.ranks) > 1 else "a rank a host"
        return f"{many}, {'equal' if len(set(self.rates)) == 1 else 'unequal'} links"

    @property
    def speed(self) -> str:
        """The fastest link, by powers of ten."""
        fastest = max(self.rates) * 8
        limits = {"below 1 Gbit/s": 1e9, "1 to 10": 1e10, "10 to 100": 1e11}
        return next((k for k, most in limits.items() if fastest < most), "above 100")

    def __str__(self) -> str:
        """One line for people."""
        rates = "/".join(f"{rate * 8e-9:.3g}" for rate in self.rates)
        return (
            f"{'+'.join(map(str, self.ranks))} ranks, {rates} Gbit/s, "
            f"{self.overhead * 1e6:.3g} us a message, {self.latency * 1e6:.3g} us a "
            f"link, memory {self.memory / 1e9:.2g} GB/s"
        )

    @cached_property
    def both_ways(self) -> tuple[Topology, Topology]:
        """As the simulator has it; and for schedules that are simulated backwards."""
        return self._topology("is_read", "reads"), self._topology("reads", "is_read")

    def seconds(self, collective: str, nbytes: int, algorithm: str) -> float:
        """The simulated seconds of a call."""
        there, back = self.both_ways
        made = schedule(collective, algorithm, there.n)
        return max(
            simulate(made, there, nbytes, "events").time,
            simulate(made.mirror(), back, nbytes, "events", reduce=0.0).time,
        )

    def _topology(self, out: str, into: str) -> Topology:
        n, hubs = sum(self.ranks), [f"host{h}" for h in range(len(self.ranks))]
        text = f'ranks = {n}\nname = "drawn"\nswitches = {[*hubs, "hub"]}\n'
        text += f"overhead = {self.overhead}\nreduce = {self.reduce}\n"
        text += f"duplex = {self.duplex}\nstreams = {str(self.streams).lower()}\n"
        groups = [
            [r for r, host in enumerate(self.hosts) if host == h]
            for h in range(len(self.ranks))
        ]
        text += f"hosts = {groups}\n"
        text += _kind("reads", self.memory_latency, self.memory)
        text += _kind("is_read", self.memory_latency, READERS * self.memory)
        for h, rate in enumerate(self.rates):
            text += _one_way(groups[h], [f"host{h}"], out)
            text += _one_way([f"host{h}"], groups[h], into)
            text += _kind(f"link{h}", self.latency, rate)
            text += _one_way([f"host{h}"], ["hub"], f"link{h}")
            text += _one_way(["hub"], [f"host{h}"], f"link{h}")
        return loads(text)


def _kind(name: str, latency: float, rate: float) -> str:
    return f"[kinds.{name}]\nlatency = {latency}\nbandwidth = {rate}\n"


def _one_way(src: object, dst: object, kind: str) -> str:
    return f'[[links]]\nfrom = {src}\nto = {dst}\nkind = "{kind}"\n'


def drawn(chance: Random) -> Network:
    """A network by chance: all times and rates are spread evenly in logarithms."""

    def between(low: float, high: float) -> float:
        return float(low * (high / low) ** chance.random())

    num = chance.randint(2, 8)
    each = [1] * num
    if chance.random() < 0.5:
        most = max(2, min(8, MOST_RANKS // num))
        each = [chance.randint(2, most)] * num
        if chance.random() < 0.25:
            each = [chance.randint(1, most) for _ in range(num - 1)] + [most]
    fastest = between(12.5e6, 50e9)
    rates = [fastest] * num
    if chance.random() < 0.4:
        rates = [chance.choice((1.0, 0.5, between(0.1, 1.0))) * fastest for _ in rates]
    return Network(
        tuple(each),
        tuple(rates),
        between(1e-6, 60e-6 if max(each) == 1 else 5e-6),
        between(1e-6, 100e-6),
        between(5e9, 40e9),
        between(0.2e-6, 2e-6),
        between(4e9, 20e9),
        chance.uniform(0.85, 1.0),
        chance.random() < 0.5,
    )


def probed(given: Network, chance: Random) -> CostModel:
    """What a probe would find there, with errors by chance."""

    def late() -> float:
        return chance.uniform(1.0, SIMULATED.ERROR)

    hosts, num = given.hosts, len(given.ranks)
    pairs = [(a, b) for a in range(num) for b in range(num) if a != b]
    idle = 2 * (given.overhead + 2 * given.latency)  # a question, and its answer

    def burst(pair: tuple[int, int], nbytes: int) -> float:
        rate = min(given.rates[host] for host in pair)
        return late() * (idle + nbytes / rate)

    added = late() / given.reduce
    model = replace(MODEL, byte_inside=late() / given.memory, added_byte=added)
    found, left = bursts.Bursts({}), links.BURSTS_S
    further = [(b - a) % num for a, b in pairs]
    for wanted in (1,), tuple(range(2, num)):
        some = [pair for pair, k in zip(pairs, further, strict=True) if k in wanted]
        part = links.FIRST_PART if wanted == (1,) and num > 2 else 1.0
        kept = left * (1 - part)
        if some and (wanted == (1,) or (found.differ() and left > 0)):
            left -= grown(found, some, len(wanted), left - kept, burst)
    seconds = [
        late() * given.seconds(collective, 8 * len(hosts), name)
        for collective, name in small_calls(len(hosts))
    ]
    return fitted(hosts, found.told(), seconds, model)


def grown(
    found: bursts.Bursts,
    pairs: list[tuple[int, int]],
    shifts: int,
    left: float,
    burst: Callable[[tuple[int, int], int], float],
) -> float:
    """Bursts of these pairs as a probe makes them; the seconds taken."""
    took = 0.0

    def exchanged(
        sizes: dict[tuple[int, int], int] | None, repeats: int, _: float
    ) -> dict[tuple[int, int], float]:
        nonlocal took
        wanted = dict.fromkeys(pairs, bursts.SHORT) if sizes is None else sizes
        times = {pair: burst(pair, nbytes) for pair, nbytes in wanted.items()}
        took += repeats * shifts * max(times.values())
        return times

    bursts.grown(found, shifts, lambda: left - took, exchanged)
    return took


@dataclass(frozen=True)
class Drawn:
    """A network, its number, and the sizes of each collective."""

    seed: int
    number: int
    given: Network
    sizes: dict[str, list[int]]


def all_drawn(seed: int, networks: int) -> Iterator[Drawn]:
    """What is judged."""
    chance = Random(seed)
    for number in range(networks):
        given = drawn(chance)
        sizes = {
            collective: [
                round(2 ** chance.uniform(SMALLEST, LARGEST)) & ~3 for _ in range(SIZES)
            ]
            for collective in COLLECTIVES
        }
        yield Drawn(seed, number, given, sizes | {"barrier": [0]})


def judged(case: Drawn) -> list[Row]:
    """Every collective and size, by the usual constants and as probed."""
    given, rows = case.given, []
    errors = Random(f"{case.seed} {case.number}")
    models = {"ordinary": MODEL, "probed": probed(given, errors)}
    for collective, sizes in case.sizes.items():
        names = candidates(collective, given.hosts)
        for nbytes in sizes:
            time = cache(partial(given.seconds, collective, nbytes))
            best = min(names, key=time)
            row = {"network": case.number, "about": str(given), "family": given.family}
            row |= {"speed": given.speed, "streams": given.streams}
            row |= {"collective": collective, "nbytes": nbytes}
            row |= {"best": best, "seconds": time(best)}
            for how, model in models.items():
                found = choose(
                    *(collective, nbytes, len(given.hosts)),
                    named=None,
                    reproducible=False,
                    hosts=given.hosts,
                    model=model,
                )
                took = time(found.algorithm)
                row[how] = {
                    "chosen": found.algorithm,
                    "regret": took / time(best),
                    "error": found.predicted / took - 1,
                }
            rows.append(row)
    return rows


def summary(rows: list[Row], how: str) -> dict[str, float]:
    """What is asked for."""
    regrets = [row[how]["regret"] for row in rows]
    errors = [abs(row[how]["error"]) for row in rows]
    return {
        "cases": len(rows),
        "mean": fmean(regrets),
        "p95": float(np.percentile(regrets, 95)),
        "error": float(np.median(errors)),
    }


def by(rows: list[Row], name: str, key: Callable[[Row], str]) -> dict[str, Any]:
    """Print a table of what rows have in common, and return it."""
    print(f"\n| {name} | cases | ordinary | 95 % below | probed | 95 % below | error |")
    print("|---|---|---|---|---|---|---|")
    found: dict[str, Any] = {}
    for group in sorted({key(row) for row in rows}):
        mine = [row for row in rows if key(row) == group]
        first, second = (summary(mine, how) for how in ("ordinary", "probed"))
        found[group] = second
        print(
            f"| {group} | {len(mine)} | {first['mean']:.3f} | {first['p95']:.2f} | "
            f"{second['mean']:.3f} | {second['p95']:.2f} | {second['error']:.0%} |"
        )
    return found


def size_of(row: Row) -> str:
    """Of four ranges."""
    if not row["nbytes"]:
        return "nothing"
    limits = {"1 to 16 KiB": 16 << 10, "16 to 256 KiB": 256 << 10, "to 4 MiB": 4 << 20}
    return next((k for k, most in limits.items() if row["nbytes"] < most), "to 256 MiB")


def main(seed: int = HELD_OUT, networks: int = NETWORKS) -> None:
    """Print what is lost where, and keep it."""
    with ProcessPoolExecutor() as pool:
        each = pool.map(judged, all_drawn(seed, networks))
        rows = [row for some in each for row in some]
    kept: Row = {"seed": seed, "networks": networks}
    kept["all"] = by(rows, "all", lambda _: "all")["all"]
    for name, key in (
        ("family", lambda row: row["family"]),
        ("collective", lambda row: row["collective"]),
        ("size", size_of),
        ("fastest link", lambda row: row["speed"]),
        ("messages", lambda row: "side by side" if row["streams"] else "in turn"),
    ):
        kept[name] = by(rows, name, key)
    print()
    worst = sorted(rows, key=lambda row: -row["probed"]["regret"])[:WORST]
    for row in worst:
        mine = row["probed"]
        print(
            f"{mine['regret']:.2f} {row['collective']} {format_bytes(row['nbytes'])}: "
            f"{mine['chosen']} instead of {row['best']} ({row['about']})"
        )
    kept["worst"] = worst
    if (seed, networks) == (HELD_OUT, NETWORKS):
        file = SIMULATED.HOSTS.RESULTS.with_name("choice_held_out.json")
        file.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
