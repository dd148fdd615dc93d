"""Partition hosts, many times: short partitions heal, long ones raise errors.

    python benchmarks/partitions.py [partitions] [seed]

Two to four network namespaces with one to three ranks each run collectives. Their
switch then parts them in two groups, or a host vanishes. Half of the partitions are
shorter than the limit of silence: all ranks must go on and all sums be right. After the
others every rank must raise PeerLost and name ranks of the other side alone, within the
limit and a few seconds. Needs root.
"""

from __future__ import annotations

import importlib
import os
import random
import secrets
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from unisono.errors import PeerLost
from unisono.runtime.communicator import Communicator
from unisono.testing import Hosts, hosts_available, world_across
from unisono.testing.across import RunningWorld

LIMIT_S = 2
"""Of silence, after which a rank of another host is taken for dead."""
FEW_S = 5.0
"""How much later than that every rank must have raised."""


@dataclass(frozen=True)
class Case:
    """So many ranks on each host, who is on one side, and for how long."""

    ranks: tuple[int, ...]
    side: frozenset[int]
    vanishes: bool
    seconds: float

    @property
    def heals(self) -> bool:
        """Whether it is short enough to heal."""
        return self.seconds < LIMIT_S


def main() -> int:
    """Run, print, and fail if anything was not as promised."""
    if why := hosts_available():
        print(f"not run: {why}")
        return 0
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else secrets.randbits(32)
    print(f"seed        {seed}")
    failures, times, healed = 0, [], 0
    with Hosts(4) as hosts, tempfile.TemporaryDirectory() as folder:
        for number, case in enumerate(draw(seed, count)):
            flag = os.path.join(folder, str(number))
            problems, took = trial(hosts, case, flag)
            healed += case.heals and not problems
            times += took
            failures += bool(problems)
            if sys.stderr.isatty():
                print(f"\r{number + 1}", end="", file=sys.stderr)
            if problems:
                print(f"partition {number}: {case}", *problems, sep="\n  ", flush=True)
    print(f"partitions  {count}, of which {healed} healed")
    print(f"failures    {failures}")
    p50, most = np.percentile(times or [np.nan], [50, 100])
    print(f"named       p50 {p50:.1f} s, max {most:.1f} s ({len(times)} ranks)")
    return int(bool(failures))


def draw(seed: int, count: int) -> Iterator[Case]:
    """Partitions of every kind, the same for the same seed."""
    chance = random.Random(seed)
    for number in range(count):
        num_hosts = chance.choice((2, 2, 3, 3, 4))
        most = {2: 3, 3: 2, 4: 1}[num_hosts]
        ranks = tuple(chance.randint(1, most) for _ in range(num_hosts))
        vanishes = chance.random() < 0.3
        some = 1 if vanishes else chance.randint(1, num_hosts - 1)
        side = frozenset(chance.sample(range(num_hosts), some))
        short = number % 2 == 0
        seconds = chance.uniform(0.2, 0.5) * LIMIT_S if short else 600.0
        yield Case(ranks, side, vanishes, seconds)


def trial(hosts: Hosts, case: Case, flag: str) -> tuple[list[str], list[float]]:
    """What was wrong, and after how many seconds each rank had ended."""
    env = {"UNISONO_SILENCE_S": str(LIMIT_S), "UNISONO_TIMEOUT_S": "60"}
    world = world_across(case.ranks, on=hosts, env=env, grace_s=30.0, timeout_s=120)
    with world.start(go_on, flag) as running:
        try:
            await_turns(running, sum(case.ranks))
            began = time.monotonic()
            part(hosts, case)
            if case.heals:
                time.sleep(case.seconds)
                hosts.heal()
                await_turns(running, sum(case.ranks))
                open(flag, "w").close()
                running.wait()
                return judge_healed(running), []
            before = began - running._began
            took = [end.seconds - before for end in running.wait()]
            late = [f"after {s:.1f} s" for s in took if s > LIMIT_S + FEW_S]
            return judge_parted(running, case) + late, took
        except TimeoutError as why:
            return [str(why), *(end.stderr for end in running.wait(0.1))], []
        finally:
            hosts.heal()


def part(hosts: Hosts, case: Case) -> None:
    """Cut."""
    if case.vanishes:
        hosts.vanish(min(case.side))
    else:
        hosts.partition(case.side, set(range(len(case.ranks))) - case.side)


def judge_healed(running: RunningWorld) -> list[str]:
    """All ranks have continued, equally far."""
    wrong = [f"rank {e.rank}: {e.error or e.how}" for e in running.ends if e.status]
    turns = {end.result for end in running.ends}
    return wrong or [f"they went on {turns} times"] * (len(turns) != 1)


def judge_parted(running: RunningWorld, case: Case) -> list[str]:
    """All name ranks of the other side."""
    place = [host for host, n in enumerate(case.ranks) for _ in range(n)]
    wrong = []
    for end in running.ends:
        if not isinstance(end.error, PeerLost):
            wrong.append(f"rank {end.rank} ended with {end.error or end.how}")
            continue
        mine = end.host in case.side
        if any((place[rank] in case.side) == mine for rank in end.error.ranks):
            wrong.append(f"rank {end.rank} names its own side: {end.error}")
    return wrong


def await_turns(running: RunningWorld, n: int) -> None:
    """Wait until all ranks have made progress."""
    begun = [len(running.stdout(rank)) for rank in range(n)]
    until = time.monotonic() + 60
    while any(len(running.stdout(rank)) < begun[rank] + 3 for rank in range(n)):
        if time.monotonic() > until:
            raise TimeoutError("they do not go on")
        time.sleep(0.02)


def go_on(comm: Communicator, flag: str) -> int:
    """Call all_reduce in a loop until a rank sees the flag; the number of calls."""
    n, turn = comm.world_size, 0
    while True:
        x = np.full(20_000, comm.rank + turn, np.float32)
        x[0] = os.path.exists(flag)
        comm.all_reduce(x)
        if not (x[1:] == n * (n - 1) / 2 + n * turn).all():
            raise AssertionError(f"turn {turn}: a wrong sum")
        os.write(1, b".")
        if x[0]:
            return turn
        turn += 1


if __name__ == "__main__":
    # By its name, under which new processes find it.
    sys.exit(importlib.import_module("partitions").main())
