"""The predicted time of a schedule between hosts, by a simple cost model.

A step takes as long as the slower of two concurrent parts. The network: a start-up
time, less where steps do not wait for each other, as those of a pipeline; a time for
every message that the busiest rank has in flight; and the bytes of the busiest host.
The ranks: a start-up time, and the bytes that the busiest rank reads. To both are added
the bytes that the busiest rank reduces. Steps follow each other. Encoding and decoding
is work of the ranks, concurrent with the network.

The parameters are those of ordinary machines on a good network, unless the links were
probed (`fitted`): then those of the network are what was measured, and each host has a
rate of its own. All ranks must get the same result, so whole chunks are counted, and
the order of floating-point operations is fixed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import median

import numpy as np

from unisono.algorithms import Spec, schedule
from unisono.schedule.traffic import Floats, Traffic, traffic


@dataclass(frozen=True)
class CostModel:
    """Times in seconds, and seconds per byte.

    Where two ranks send to each other in a step, every byte is slower by `mutual`: both
    directions of their links are busy. A rank can receive from `ports` others at once
    without loss; each further sender makes every byte slower by `crowding`. Where a
    rank exchanges messages with several others at once, bytes are slower by `shared`.
    `encoded` and `decoded` are seconds per element. `leaving` and `entering` are the
    seconds per byte of each host's link, if they were probed; without them every link
    has `byte`.
    """

    start: float = 25e-6
    message: float = 15e-6
    byte: float = 1e-9
    ports: int = 8
    crowding: float = 0.02
    mutual: float = 0.1
    shared: float = 0.0
    start_inside: float = 2e-6
    byte_inside: float = 1e-10
    added_byte: float = 1e-10
    encoded: float = 6e-10
    decoded: float = 3e-10
    leaving: tuple[float, ...] = ()
    entering: tuple[float, ...] = ()

    def of(self, hosts: Sequence[int]) -> CostModel:
        """The model of some of the hosts, by their numbers, in this order."""
        if not self.leaving:
            return self
        ends = (
            tuple(rates[h] for h in hosts) for rates in (self.leaving, self.entering)
        )
        leaving, entering = ends
        return replace(self, leaving=leaving, entering=entering)


MODEL = CostModel()

SHARED_BY_BBR = 0.1
"""What streams lose that share a link, under TCP's BBR, beside one that has it alone.

It paces each by the share that it had in the last crowd. Measured on four hosts, times
over what rates allow, divided by that of ring or chain: double_tree of a broadcast 0.96
to 1.11, of an all_reduce 0.76 to 1.11; direct 0.94 to 1.19, at 50 Mbit/s 1.32.
"""

ALIKE = 1.3
"""Rates that differ by less are taken for equal: no probe is more exact."""


@dataclass(frozen=True)
class StepCost:
    """The time of one step: the larger of two linear functions of the bytes."""

    across: float
    across_byte: float
    inside: float
    inside_byte: float

    def at(self, nbytes: int) -> float:
        """Seconds for buffers of `nbytes`."""
        return max(
            self.across + self.across_byte * nbytes,
            self.inside + self.inside_byte * nbytes,
        )


def predicted(
    collective: str,
    algorithm: str,
    segments: int,
    hosts: tuple[int, ...],
    nbytes: int,
    model: CostModel = MODEL,
) -> float:
    """The predicted seconds of a call whose schedule is split into segments."""
    costs = step_costs(collective, algorithm, segments, hosts, model)
    # Not sum, whose rounding differs between versions of Python.
    return math.fsum(cost.at(nbytes) for cost in costs)


def predicted_coded(
    costs: Sequence[StepCost], nbytes: int, small: int, coding: float, *, inside: bool
) -> float:
    """The predicted seconds of a call whose codes have `small` bytes, not `nbytes`.

    `coding` are the seconds that the busiest rank encodes and decodes. `inside`: ranks
    of one host exchange codes, too.
    """
    taken = math.fsum(cost.inside_byte for cost in costs) or 1.0
    within = small if inside else nbytes
    steps = (
        max(
            cost.across + cost.across_byte * small,
            cost.inside
            + cost.inside_byte * within
            + coding * (cost.inside_byte / taken),
        )
        for cost in costs
    )
    return math.fsum(steps)


@lru_cache(maxsize=1024)
def step_costs(
    collective: str,
    algorithm: str | Spec,
    segments: int,
    hosts: tuple[int, ...],
    model: CostModel = MODEL,
) -> tuple[StepCost, ...]:
    """The cost of every step, for any size."""
    whole = _traffic(collective, algorithm, hosts)
    return _costs(whole, segments, model)


@lru_cache(maxsize=256)
def _traffic(collective: str, algorithm: str | Spec, hosts: tuple[int, ...]) -> Traffic:
    return traffic(schedule(collective, algorithm, len(hosts)), hosts)


def _costs(whole: Traffic, segments: int, model: CostModel) -> tuple[StepCost, ...]:
    counted = whole.split(segments)
    busiest = (
        rows.max(axis=1).tolist()
        for rows in (
            _seconds_across(counted, model),
            counted.taken,
            counted.added,
            counted.peers,
            counted.mutual,
        )
    )
    crossed = int(np.count_nonzero(counted.peers.max(axis=1)))
    start = model.start * min(1.0, counted.depth / max(1, crossed))
    found = []
    for crossing, taken, added, peers, mutual in zip(*busiest, strict=True):
        slowdown = 1 + model.crowding * max(0, peers - model.ports)
        if mutual:
            slowdown += model.mutual
        # All steps of a pipeline go on at once, and a peer counts for each of them.
        if (peers if segments == 1 else whole.fan) > 1:
            slowdown += model.shared
        adding = model.added_byte * (added / counted.unit)
        found.append(
            StepCost(
                (start + model.message * peers) if peers else 0.0,
                slowdown * (crossing / counted.unit) + adding,
                model.start_inside,
                model.byte_inside * (taken / counted.unit) + adding,
            )
        )
    return tuple(found)


def _seconds_across(counted: Traffic, model: CostModel) -> Floats:
    """Of each step and host, the seconds on its link if each chunk had one byte."""
    leaving, entering = (
        np.asarray(rates) if rates else np.full(counted.leaves.shape[1], model.byte)
        for rates in (model.leaving, model.entering)
    )
    found: Floats = np.maximum(counted.leaves * leaving, counted.enters * entering)
    return found


def small_calls(n: int) -> tuple[tuple[str, str], ...]:
    """Calls of few bytes, as collective and algorithm: of few messages, and of more.

    The first one is that by which ranks agree. Two of each kind, where there are, since
    a time alone may be wrong by chance; the most different ones first. Among many
    nobody sends to all.
    """
    if n <= 2:
        return (("all_reduce", "naive"),)
    if n <= 8:
        names = "ring", "circulant", "butterfly:radix=4"
        return ("all_reduce", "naive"), *(("all_gather", name) for name in names)
    many = "direct" if n <= 32 else "butterfly:radix=8"
    names = many, "circulant", "butterfly:radix=4"
    first = "all_reduce", "recursive_doubling"
    return first, *(("all_gather", name) for name in names)


def fitted(
    hosts: tuple[int, ...],
    pairs: Mapping[tuple[int, int], float],
    seconds: Sequence[float],
    model: CostModel = MODEL,
    alike: float = ALIKE,
) -> CostModel:
    """The model with the constants of a network, from a probe of its links.

    `pairs` are the seconds per byte from host to host; a host's link is as fast as the
    fastest of its pairs. `seconds` are the times of `small_calls`, or none: then
    latencies are the usual ones. Rates that differ by less than `alike` times are taken
    for equal.
    """
    num_hosts = max(hosts) + 1
    ends: list[tuple[float, ...]] = []
    for end in (0, 1):
        best = [
            min((t for pair, t in pairs.items() if pair[end] == host), default=0.0)
            for host in range(num_hosts)
        ]
        ends.append(_alike([rate or model.byte for rate in best], alike))
    start, message = model.start, model.message
    if seconds:
        start, message = per_step(hosts, seconds, model)
    leaving, entering = ends
    return replace(
        model,
        start=start,
        message=message,
        byte=max(*leaving, *entering),
        leaving=leaving,
        entering=entering,
    )


def all_alike(num_hosts: int, byte: float, model: CostModel = MODEL) -> CostModel:
    """The model with links that all take `byte` seconds per byte."""
    rates = (byte,) * num_hosts
    return replace(model, byte=byte, leaving=rates, entering=rates)


def _alike(rates: Sequence[float], alike: float) -> tuple[float, ...]:
    """Rates of which similar ones are made equal."""
    found: dict[float, float] = {}
    group: list[float] = []
    for rate in [*sorted(rates), math.inf]:
        if group and rate > alike * group[0]:
            found |= dict.fromkeys(group, median(group))
            group = []
        group.append(rate)
    return tuple(found[rate] for rate in rates)


def per_step(
    hosts: tuple[int, ...], seconds: Sequence[float], model: CostModel
) -> tuple[float, float]:
    """What a step costs, and each message of it, from the times of `small_calls`.

    Of the first of them, if there are fewer times.
    """
    steps, messages = zip(
        *(
            _counted_messages(*call, hosts)
            for call in small_calls(len(hosts))[: len(seconds)]
        ),
        strict=True,
    )
    share = model.message / (model.start + model.message)
    usual = [(1 - share) * a + share * b for a, b in zip(steps, messages, strict=True)]
    each = seconds[0] / usual[0]
    start, message = (1 - share) * each, share * each
    # The least squares of relative errors: a / t * start + b / t * message = 1.
    rows = [(a / t, b / t) for a, b, t in zip(steps, messages, seconds, strict=True)]
    aa, ab, bb, a, b = (
        math.fsum(column)
        for column in zip(*((x * x, x * y, y * y, x, y) for x, y in rows), strict=True)
    )
    determinant = aa * bb - ab * ab
    if determinant > 1e-9 * aa * bb:
        start = (a * bb - b * ab) / determinant
        message = (aa * b - ab * a) / determinant
    least = LEAST_SHARE * each
    return max(start, least), max(message, least)


LEAST_SHARE = 0.1
"""Of a step with one message, both parts cost at least so much."""


def _counted_messages(
    collective: str, algorithm: str, hosts: tuple[int, ...]
) -> tuple[int, int]:
    """How many messages wait for each other, and all of the busiest rank."""
    counted = _traffic(collective, algorithm, hosts)
    return counted.depth, int(counted.peers.max(axis=1).sum())
