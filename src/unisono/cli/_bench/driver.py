"""Turns: every system measures the same case within the same second.

The processes of all systems run as long as the benchmark, and only one system is active
at a time. For each case all of them prepare (one call, checked) and determine how many
calls make a batch of a few hundredths of a second. Then they alternate in rounds, each
round beginning with another system, so that a load on the machine slows all of them.
From 1 MiB on, copies of memory are measured as well, which gives the floor; on GPUs the
speed of a copy is measured once.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from unisono.cli._bench.cases import IN_PLACE, OUT_OF_PLACE, Case, least_bytes
from unisono.cli._bench.devices import DeviceUse
from unisono.cli._bench.figures import FLOOR_FROM, BenchRow, Timing
from unisono.cli._bench.groups import SystemGroup

_PROBE_S = 1e-3
_FEWEST_SINGLE, _MOST_SINGLE = 20, 1000


@dataclass(frozen=True)
class BenchSettings:
    """How long to measure; zero iterations or a negative warm-up mean: find out."""

    rounds: int = 5
    iterations: int = 0
    warmup: int = -1
    check: bool = True
    shared: bool = False
    batch_s: float = 0.02
    fewest: int = 5
    most: int = 20_000


@dataclass
class Contender:
    """One system, with one algorithm, in one place."""

    group: SystemGroup
    place: str
    algorithm: str = ""
    times: Timing = field(default_factory=Timing)

    @property
    def key(self) -> str:
        """The name under which the workers keep it."""
        return f"{self.place} {self.algorithm}"

    def prepare(self, case: Case, plan: BenchSettings) -> None:
        """Have every rank bind the call, run it once, and check it."""
        answers = self.group.ask(
            {
                "do": "prepare",
                "key": self.key,
                "case": case.plain(),
                "place": self.place,
                "algorithm": self.algorithm,
                "shared": plan.shared and self.group.name == "unisono",
                "check": plan.check,
            }
        )
        for answer in answers:
            if "refused" in answer:
                self.times.refused = str(answer["refused"])
                return
        if plan.check:
            self.times.wrong = sum(answer["wrong"] for answer in answers)
        self.times.algorithm = answers[0]["algorithm"]

    def calibrate(self, plan: BenchSettings) -> None:
        """Find out how many calls make a batch."""
        if plan.iterations:
            self.times.iterations = plan.iterations
            return
        seconds = self.batch(1, 1)
        if seconds < _PROBE_S:
            seconds = self.batch(math.ceil(_PROBE_S / max(seconds, 1e-7)), 2)
        wanted = math.ceil(plan.batch_s / max(seconds, 1e-9))
        self.times.iterations = min(plan.most, max(plan.fewest, wanted))

    def batch(self, iterations: int, warmup: int) -> float:
        """The seconds per call of one batch, of the slowest rank."""
        answers = self.group.ask(
            {
                "do": "measure",
                "key": self.key,
                "iterations": iterations,
                "warmup": warmup,
            }
        )
        return max(float(answer["seconds"]) for answer in answers)

    def round(self, plan: BenchSettings) -> None:
        """One more turn."""
        iterations = self.times.iterations
        warmup = plan.warmup if plan.warmup >= 0 else max(1, iterations // 10)
        self.times.rounds.append(self.batch(iterations, warmup))

    def singly(self) -> None:
        """Time single calls."""
        count = min(_MOST_SINGLE, max(_FEWEST_SINGLE, self.times.iterations))
        answers = self.group.ask({"do": "each", "key": self.key, "iterations": count})
        self.times.by_rank = [answer["seconds"] for answer in answers]


def measure(
    case: Case,
    groups: Sequence[SystemGroup],
    algorithms: Sequence[str],
    plan: BenchSettings,
    progress: Callable[[str], None] = lambda _: None,
    device: DeviceUse | None = None,
) -> list[BenchRow]:
    """One row per algorithm of unisono, whose group is the first; "" is its choice."""
    ours = [Contender(groups[0], p, a) for a in algorithms for p in case.places]
    peers = [Contender(group, case.compared) for group in groups[1:]]
    for group in groups:
        group.ask({"do": "forget"})
    for contender in (*ours, *peers):
        progress(f"{contender.group.name} prepares")
        contender.prepare(case, plan)
    able = [c for c in (*ours, *peers) if not c.times.refused]
    for contender in able:
        contender.calibrate(plan)
    copies: list[float] = []
    for turn in range(plan.rounds):
        progress(f"round {turn + 1} of {plan.rounds}")
        start = turn % max(1, len(able))
        for contender in able[start:] + able[:start]:
            contender.round(plan)
        if case.size >= FLOOR_FROM and device is None:
            copies.append(memory_bandwidth(groups[0]))
    for contender in ours:
        if not contender.times.refused:
            contender.singly()
    floor_s = _floor(case, copies, shared=plan.shared)
    return _rows(case, ours, peers, floor_s, device)


def _rows(
    case: Case,
    ours: Sequence[Contender],
    peers: Sequence[Contender],
    floor_s: float,
    device: DeviceUse | None,
) -> list[BenchRow]:
    timings: dict[str, dict[str, Timing]] = {}
    for contender in ours:
        timings.setdefault(contender.algorithm, {})[contender.place] = contender.times
    others = {c.group.name: c.times for c in peers}
    return [
        BenchRow(case, by.get(OUT_OF_PLACE), by.get(IN_PLACE), others, floor_s, device)
        for by in timings.values()
    ]


def memory_bandwidth(group: SystemGroup) -> float:
    """Bytes per second that the ranks, as many as have a core, read and write."""
    answers = group.ask({"do": "copy", "ranks": _busy(group.n), "repeats": 2})
    return sum(float(answer["bandwidth"]) for answer in answers)


def device_use(groups: Sequence[SystemGroup], most: int) -> DeviceUse | None:
    """The GPUs of unisono's ranks, ready for arrays of `most` bytes, or None."""
    ours = groups[0]
    if not ours.devices:
        return None
    use = DeviceUse.of(ours.devices)
    use.refuse_too_large(most, len(groups))
    for group in groups:
        group.ask({"do": "reserve", "nbytes": most})
    if most < FLOOR_FROM or not use.is_one_device:
        return use
    speed = float(ours.ask({"do": "device_copy"})[0]["bandwidth"])
    return replace(use, copy_speed=speed)


def _busy(n: int) -> int:
    """How many ranks can run at the same time."""
    if hasattr(os, "sched_getaffinity"):
        return min(n, len(os.sched_getaffinity(0)))
    return min(n, os.cpu_count() or 1)


def _floor(case: Case, copies: Sequence[float], *, shared: bool) -> float:
    """The seconds in which memory alone could do it."""
    if not copies:
        return math.nan
    bandwidth = median(copies)
    together, busiest = least_bytes(case, shared=shared)
    return max(together, busiest * _busy(case.n)) / bandwidth
