"""What a plan of messages takes, and what ranks know at its end.

    Costs       what a message from rank to rank takes, and which links it uses
    Goal        what ranks know at first, and what they must know at the end
    Plan        who sends to whom in each step: pairs of ranks, nothing else
    played      the messages that a plan comes to, the time, and what is missing

A plan does not say what is sent: all that helps the receiver is. Times are those of the
simulation by steps (`simulate/steps.py`), for one size and few ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from unisono.simulate.conditions import SimulatedWorld
from unisono.topology.topology import Floats


@dataclass(frozen=True)
class Costs:
    """Seconds of a message: of its sender, of its bytes, of its route, of its sum."""

    n: int
    overhead: float
    latency: Floats
    byte: Floats
    rate: Floats
    links: tuple[tuple[tuple[int, ...], ...], ...]
    num_links: int
    reduce: float

    @classmethod
    def of(cls, world: SimulatedWorld) -> Costs:
        """Those of the routes of a topology under its conditions."""
        n = world.n
        src, dst = (a.ravel() for a in np.divmod(np.arange(n * n), n))
        none = world.bandwidth.size - 1
        routes = world.route(src, dst) % world.bandwidth.size
        rate = world.bandwidth[routes].min(axis=1, initial=np.inf)
        used = [[k for k in row if k != none] for row in routes.tolist()]
        return cls(
            n,
            world.overhead,
            world.latency[routes].sum(axis=1).reshape(n, n),
            (1 / rate).reshape(n, n),
            world.bandwidth[:-1],
            tuple(tuple(tuple(used[a * n + b]) for b in range(n)) for a in range(n)),
            none,
            world.reduce,
        )

    def backwards(self) -> Costs:
        """With every link turned round."""
        turned = tuple(zip(*self.links, strict=True))
        return replace(
            self, latency=self.latency.T, byte=self.byte.T, links=tuple(turned)
        )

    @cached_property
    def rates(self) -> list[float]:
        """The bandwidth of each link, as plain numbers."""
        return [float(rate) for rate in self.rate]

    @cached_property
    def latencies(self) -> list[list[float]]:
        """The latency from rank to rank, as plain numbers."""
        found: list[list[float]] = self.latency.tolist()
        return found

    def whole(self, nbytes: float) -> Floats:
        """The seconds of a message of so many bytes between any two ranks."""
        found = self.overhead + nbytes * self.byte + self.latency
        np.fill_diagonal(found, 0.0)
        return np.asarray(found)

    def shortest(self, nbytes: float) -> Floats:
        """The seconds by the quickest way over any ranks."""
        best = self.whole(nbytes)
        for via in range(self.n):
            best = np.minimum(best, best[:, via, None] + best[None, via, :])
        return best


@dataclass(frozen=True)
class Goal:
    """Masks of parts that ranks know at first; at the end each knows `every`.

    With `sums` what arrives is added up: it must have no part that is there already,
    or replace all that is. Otherwise a message has the parts that its receiver lacks.
    `part` are the bytes of a part, with `sums` those of any sum.
    """

    first: tuple[int, ...]
    every: int
    part: float
    sums: bool


Plan = tuple[tuple[tuple[int, int], ...], ...]
"""For each step, the pairs of ranks of which one sends to the other."""


class Message(NamedTuple):
    """Parts that go from rank to rank; `copies` if they replace what is there."""

    src: int
    dst: int
    mask: int
    copies: bool


@dataclass(frozen=True)
class Played:
    """The messages of each step that help, when all is over, what ranks then lack."""

    steps: tuple[tuple[Message, ...], ...]
    seconds: float
    missing: int

    @property
    def plan(self) -> Plan:
        """The pairs that send something."""
        return tuple(tuple((m.src, m.dst) for m in step) for step in self.steps)


def played(plan: Plan, costs: Costs, goal: Goal) -> Played:
    """Play a plan through; pairs that cannot help are left out."""
    know, clock = list(goal.first), [0.0] * costs.n
    busy = [0.0] * costs.num_links
    steps = []
    for pairs in plan:
        sent, know = _sent(pairs, know, goal)
        if sent:
            clock = _timed(sent, clock, busy, costs, goal)
            steps.append(tuple(sent))
    missing = sum((goal.every & ~known).bit_count() for known in know)
    return Played(tuple(steps), max(clock), missing)


def _sent(
    pairs: Sequence[tuple[int, int]], know: Sequence[int], goal: Goal
) -> tuple[list[Message], list[int]]:
    """The messages of a step, and what ranks know after it."""
    then, sent = list(know), []
    taking: set[int] = set()
    for src, dst in pairs:
        mine, theirs = know[src], then[dst]
        copies = False
        if not goal.sums:
            mine &= ~theirs
        elif mine & theirs:
            copies = not theirs & ~mine and mine != theirs and dst not in taking
            mine = mine if copies else 0
        if mine:
            sent.append(Message(src, dst, mine, copies))
            then[dst] = mine if copies else theirs | mine
            taking.add(dst)
    return sent, then


def _timed(
    step: Sequence[Message],
    clock: list[float],
    busy: list[float],
    costs: Costs,
    goal: Goal,
) -> list[float]:
    """When ranks end a step; `busy` is set to when its messages have left the links."""
    count, adds = [0] * costs.n, [0.0] * costs.n
    load: dict[int, float] = {}
    sizes = []
    for src, dst, mask, copies in step:
        count[src] += 1
        nbytes = goal.part * (1 if goal.sums else mask.bit_count())
        sizes.append(nbytes)
        if goal.sums and not copies:
            adds[dst] += nbytes * costs.reduce
        for link in costs.links[src][dst]:
            load[link] = load.get(link, 0.0) + nbytes
    after, through = list(clock), []
    for src, dst, _, _ in step:
        start, lasts = clock[src] + count[src] * costs.overhead, 0.0
        for link in costs.links[src][dst]:
            start = max(start, busy[link])
            lasts = max(lasts, load[link] / costs.rates[link])
        through.append((src, dst, start + lasts))
    for src, dst, drained in through:
        after[src] = max(after[src], drained)
        after[dst] = max(after[dst], drained + costs.latencies[src][dst])
        for link in costs.links[src][dst]:
            busy[link] = max(busy[link], drained)
    return [when + more for when, more in zip(after, adds, strict=True)]
