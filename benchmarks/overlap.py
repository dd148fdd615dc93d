"""How much of the communication hides behind computing: DDP and FSDP on a slow link.

    sudo .venv/bin/python benchmarks/overlap.py [--rate 500mbit] [--ranks 2]
    python benchmarks/overlap.py --injected     no root: delays put in by slow_link

The ranks are hosts of their own, network namespaces whose links have a rate that the
kernel keeps. All strategies train the same small GPT and take turns, step by step:

    waited    how long a step stood still in a call or for one that it had begun
    alone     how long the same calls take with nothing to compute beside them
    hidden    1 - waited/alone: the share of the communication that cost no time

Waited is that of the rank which waited least: the other also waited for this one to
come. A figure is the middle of the rounds; every single one goes to
results/overlap.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import unisono
from unisono.parallel import DDP, FSDP, PlainDDP
from unisono.testing import Hosts, hosts_available, world_across
from unisono.units import parse_rate

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from slow_link import SlowLink

RESULTS = Path(__file__).parent / "results" / "overlap.json"
CALLS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
BUCKET_MB = 2.0
"""Small enough that a model of 20 MB has several."""
NAMES = (
    "plain_ddp",
    "ddp, overlap=False",
    "ddp",
    "fsdp, prefetch=False",
    "fsdp",
)
Row = dict[str, float]


class Watched:
    """A communicator that counts how long its caller waited for it in a step."""

    def __init__(self, comm: unisono.Communicator | SlowLink) -> None:
        """In front of `comm`."""
        self._comm = comm
        self.restart()

    def restart(self) -> None:
        """A step begins."""
        self.waited_s = 0.0
        self._made: list[tuple[Any, Any, Any]] = []

    def __getattr__(self, name: str) -> Any:
        """The communicator's own, but that time is taken."""
        found = getattr(self._comm, name)
        if name not in CALLS:
            return found

        def call(*args: Any, async_op: bool = False, **options: Any) -> Any:
            self._made.append((found, args, options))
            work = _Waited(found(*args, async_op=True, **options), self)
            return work if async_op else work.wait()

        return call

    def alone(self) -> float:
        """Make the calls of the step again, with nothing beside them: seconds."""
        self._comm.barrier()
        begun = time.perf_counter()
        for found, args, options in self._made:
            found(*args, **options)
        return time.perf_counter() - begun


class _Waited:
    def __init__(self, work: unisono.Work, link: Watched) -> None:
        self._work, self._link = work, link

    def wait(self, timeout_s: float | None = None) -> Any:
        begun = time.perf_counter()
        result = self._work.wait(timeout_s)
        self._link.waited_s += time.perf_counter() - begun
        return result

    def done(self) -> bool:
        return self._work.done()


def trained(name: str, size: list[int], link: Any) -> Callable[[], None]:
    """A step of training by a strategy on the link."""
    torch.manual_seed(0)
    net: nn.Module = import_module("parallel").Gpt(*size)  # the same as there
    after = None
    model: nn.Module
    if name == "plain_ddp":
        model = plain = PlainDDP(net, link)
        after = plain.sync
    elif name.startswith("ddp"):
        model = DDP(net, link, bucket_cap_mb=BUCKET_MB, overlap=name == "ddp")
    else:
        model = FSDP(net, link, prefetch=name == "fsdp")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    tokens = torch.randint(128, (2, 129))

    def step() -> None:
        optimizer.zero_grad()
        scores = model(tokens[:, :-1]).flatten(0, 1)
        torch.autograd.backward(
            functional.cross_entropy(scores, tokens[:, 1:].flatten())
        )
        if after is not None:
            after()
        optimizer.step()

    return step


def measured(
    comm: unisono.Communicator, size: list[int], rounds: int, bytes_per_s: float
) -> dict[str, list[Row]]:
    """Every round of every strategy."""
    torch.set_num_threads(1)
    links: dict[str, Any] = {
        name: Watched(SlowLink(comm, bytes_per_s=bytes_per_s) if bytes_per_s else comm)
        for name in NAMES
    }
    steps = {name: trained(name, size, link) for name, link in links.items()}
    found: dict[str, list[Row]] = {name: [] for name in NAMES}
    for turn in range(-2, rounds):  # the first ones learn the order of things
        for name, link in links.items():
            comm.barrier()
            link.restart()
            begun = time.perf_counter()
            steps[name]()
            took = time.perf_counter() - begun
            waited = comm.all_reduce(torch.tensor([link.waited_s]), op="min")
            most = comm.all_reduce(torch.tensor([took, link.alone()]), op="max")
            row = {"step_s": most[0], "waited_s": waited[0], "alone_s": most[1]}
            if turn >= 0:
                found[name].append({key: float(value) for key, value in row.items()})
    return found


def printed(found: dict[str, list[Row]]) -> None:
    """The table."""
    print(f"{'':<22}{'step ms':>9}{'waited':>9}{'alone':>9}{'hidden':>9}")
    for name, rows in found.items():
        middle = {key: median(row[key] for row in rows) for key in rows[0]}
        hidden = median(1 - row["waited_s"] / row["alone_s"] for row in rows)
        text = "".join(f"{1e3 * value:9.1f}" for value in middle.values())
        print(f"{name:<22}{text}{hidden:9.0%}", flush=True)


def main() -> None:
    """Measure, print, and keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", default="500mbit")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--injected", action="store_true")
    parser.add_argument("--quick", action="store_true", help="keep nothing")
    result = parser.parse_args()
    size, n = [result.width, result.layers], result.ranks
    if result.injected:
        args = (size, result.rounds, parse_rate(result.rate) / 8)
        found = unisono.spawn(measured, n, args, timeout_s=120)[0]
    else:
        if why := hosts_available():
            sys.exit(f"benchmarks/overlap.py: {why}; or take --injected")
        with Hosts(n, rate=result.rate) as links:
            world = world_across([1] * n, on=links, timeout_s=600)
            found = world.run(measured, size, result.rounds, 0.0)[0]
    how = "delays put in" if result.injected else "network namespaces"
    print(f"{n} ranks, {result.rate} ({how}), GPT of {size[1]} layers, width {size[0]}")
    printed(found)
    if not result.quick:
        kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        kept[how] = {
            "ranks": n,
            "rate": result.rate,
            "size": size,
            "machine": f"{platform.machine()}, torch {torch.__version__}",
            "rounds": found,
        }
        RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
        print(f"written to {RESULTS}")


if __name__ == "__main__":
    # By its name, so that ranks find its functions.
    import_module("overlap").main()
