"""Prices of collectives on the groups of a mesh: by closed form, or simulated.

The groups of an axis are known by sizes and strides: `((8, 1),)` are eight neighbours,
`((16, 64), (2, 8))` sixteen by two ranks. All groups communicate at the same time.

The closed form asks what one message from every rank to the next of its group costs on
the topology, A + B·bytes. An all_gather on n ranks then takes log2(n) A and, since each
rank receives all but its own part, (n-1)/n B; where hosts have several ranks of a group
it is made across hosts first and then inside, if that is quicker. A reduce_scatter
costs as much, an all_reduce both. The simulation compares all algorithms that
`EqualGroups` knows, step by step; groups that are too large for it have the closed
form.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from math import prod

import numpy as np

from unisono.algorithms.choices import SEGMENTS
from unisono.schedule.collective import Ints
from unisono.search.space import Choice
from unisono.simulate.conditions import Conditions, SimulatedWorld
from unisono.simulate.groups import MOST_CHOSEN, EqualGroups
from unisono.simulate.steps import StepPattern
from unisono.topology import Topology

Groups = tuple[tuple[int, int], ...]
"""Sizes and strides, from the outermost to neighbours."""
MOST_SIMULATED = 1 << 19
"""Ranks times ranks of a group up to which its collectives are simulated by steps."""


def groups(choice: Choice, *axes: str) -> Groups:
    """The groups of one axis, or of several together."""
    found = sorted(
        ((choice.strides[a], getattr(choice.axes, a)) for a in axes), reverse=True
    )
    joined: list[tuple[int, int]] = []
    for stride, size in found:
        if size == 1:
            continue
        if joined and joined[-1][1] == stride * size:
            joined[-1] = joined[-1][0] * size, stride
        else:
            joined.append((size, stride))
    return tuple(joined)


@dataclass(eq=False)
class Network:
    """A topology with all prices that have been asked for."""

    topology: Topology
    _groups: dict[tuple[Groups, str], EqualGroups] = field(default_factory=dict)
    _shifts: dict[Groups, tuple[float, float]] = field(default_factory=dict)
    _inside: dict[Groups, tuple[Groups, Groups]] = field(default_factory=dict)

    @cached_property
    def world(self) -> SimulatedWorld:
        """The topology as simulators have it."""
        return SimulatedWorld.of(self.topology, Conditions())

    def members(self, of: Groups) -> Ints:
        """A row of ranks for each group."""
        ranks = np.arange(self.topology.n)
        first = np.ones(ranks.size, dtype=bool)
        offsets = np.zeros(1, dtype=np.int64)
        for size, stride in of:
            first &= ranks // stride % size == 0
            steps = np.arange(size) * stride
            offsets = (offsets[:, None] + steps[None, :]).ravel()
        return ranks[first][:, None] + offsets[None, :]

    def closed(self, of: Groups, collective: str, nbytes: float) -> float:
        """Seconds by closed form."""
        if not of or not nbytes:
            return 0.0
        if collective == "all_to_all":
            n = _size(of)
            a, b = self._shift(of)
            return (n - 1) * (a + b * nbytes / n)
        times = 2 if collective == "all_reduce" else 1
        whole = self._gather(of, nbytes)
        across, inside = self._levels(of)
        if across and inside:
            cuts = SEGMENTS if _size(of) <= MOST_CHOSEN else (1,)
            whole = min(whole, *(self._two(across, inside, nbytes, k) for k in cuts))
        return times * whole

    def _two(self, across: Groups, inside: Groups, nbytes: float, cut: int) -> float:
        """On two levels, in segments: one is inside while another is across."""
        one = self._gather(across, nbytes / _size(inside) / cut)
        two = self._gather(inside, nbytes / cut)
        return one + two + (cut - 1) * max(one, two)

    def _gather(self, of: Groups, nbytes: float) -> float:
        n = _size(of)
        a, b = self._shift(of)
        return (n - 1).bit_length() * a + (n - 1) / n * b * nbytes

    def _levels(self, of: Groups) -> tuple[Groups, Groups]:
        """The groups of ranks on different hosts, and of those on the same."""
        each = self.topology.per_host
        if of not in self._inside:
            across: list[tuple[int, int]] = []
            inside: list[tuple[int, int]] = []
            for size, stride in of:
                near = 1 if not each else max(1, min(size, each // stride))
                near = near if size % near == 0 else 1
                across += [(size // near, stride * near)] if size > near else []
                inside += [(near, stride)] if near > 1 else []
            self._inside[of] = tuple(across), tuple(inside)
        return self._inside[of]

    def simulated(self, of: Groups, collective: str, nbytes: float) -> float:
        """Seconds as simulated by steps, with the quickest algorithm."""
        if not of or not nbytes:
            return 0.0
        if _size(of) * self.topology.n > MOST_SIMULATED:
            return self.closed(of, collective, nbytes)
        named = "direct" if collective == "all_to_all" else "auto"
        key = of, named
        if key not in self._groups:
            self._groups[key] = EqualGroups(self.topology, self.members(of), named)
        return self._groups[key].time(collective, round(nbytes))[0]

    def shift(self, of: Groups, nbytes: float) -> float:
        """Seconds until every rank has sent to the next of its group."""
        if not of or not nbytes:
            return 0.0
        a, b = self._shift(of)
        return a + b * nbytes

    def _shift(self, of: Groups) -> tuple[float, float]:
        if of not in self._shifts:
            ranks = self.members(of)
            pairs = ranks * self.topology.n + np.roll(ranks, -1, axis=1)
            pattern = StepPattern.of(np.sort(pairs.ravel()), self.world)
            load = pattern.load(np.ones(pattern.src.size), self.world.bandwidth.size)
            a = float((pattern.latency + pattern.waits).max())
            self._shifts[of] = a, float((load / pattern.bandwidth).max())
        return self._shifts[of]


def _size(of: Groups) -> int:
    return prod(size for size, _ in of)
