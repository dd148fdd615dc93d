"""Ranks are killed and replaced, over and over: does training come out right?

    python benchmarks/churn.py [kills] [seed]         30 kills on one host, 30 on two
    python benchmarks/churn.py --schedules 1000000    the rules of agreement, simulated

The program is examples/elastic.py with four ranks. It must end with the weights of a
run in which nobody died, on all ranks.
"""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from rank_churn import Churn
from shrink_simulation import FailureSchedule, simulate

EXAMPLE = Path(__file__).parents[1] / "examples" / "elastic.py"
EVERY = 20
LOT = 5000


def main() -> int:
    """Run what was asked for; 1 if anything was not as promised."""
    args = sys.argv[1:]
    if args[:1] == ["--schedules"]:
        return simulated(int(args[1]))
    kills = int(args[0]) if args else 30
    seed = int(args[1]) if len(args) > 1 else secrets.randbits(32)
    print(f"seed {seed}")
    return sum(churned(kills, seed, hosts) for hosts in (0, 2))


def churned(kills: int, seed: int, hosts: int) -> int:
    """One run, against one of a single rank."""
    command = [sys.executable, str(EXAMPLE), str(EVERY * (kills + 2))]
    alone = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    right = re.sub(r"\d+ ranks", "4 ranks", alone.splitlines()[-1])
    churn = Churn(command, ranks=4, hosts=hosts, pause_s=0.01)
    report = churn.run(kills=kills, seed=seed, every=EVERY, timeout_s=60 + 10 * kills)
    good = report.ends == [right] * 4 and report.kills >= kills
    where = f"{hosts} hosts" if hosts else "one host"
    print(f"{where}: {report.kills} kills in {report.seconds:.0f} s, {report.ends}")
    if not good:
        print(f"expected {right} on 4 ranks\n{report.output}")
    return int(not good)


def simulated(count: int) -> int:
    """Schedules from 0 on."""
    began = time.monotonic()
    lots = range(0, count, LOT)
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        wrong = [one for some in pool.map(_lot, lots) for one in some]
    print(f"{count} schedules, {len(wrong)} wrong, {time.monotonic() - began:.0f} s")
    for one in wrong[:5]:
        print(one)
    return int(bool(wrong))


def _lot(first: int) -> list[str]:
    wrong = []
    for seed in range(first, first + LOT):
        try:
            simulate(FailureSchedule.random(seed))
        except AssertionError as why:
            wrong.append(f"seed {seed}: {why}")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
