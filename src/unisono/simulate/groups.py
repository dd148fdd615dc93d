"""Collectives of groups: every group of a mesh axis calls the same one at once.

Training splits the world along axes. With 8-way tensor parallelism on 64 hosts there
are 64 groups of 8 neighbours along one axis and 8 groups of 64 along the other, and all
groups of an axis communicate at the same time, over links that they may share. So they
are simulated together, step by step, on the whole topology; of groups that are alike
and share no links (`alike`) one is simulated.

A ring among many ranks has as many steps, each like the one before. Of these the first
are simulated, until a step takes as long as the one before it did, and the rest is that
time for each step: within 0.3 % of all steps. Other algorithms of many ranks have few
steps with many transfers. They are simulated for some sizes at once, and sizes between
these are interpolated: time is convex in the size, so it is at most too long.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice

import numpy as np

from unisono.algorithms import schedule as make
from unisono.algorithms.choices import can_be_made, chosen_from, spelled
from unisono.algorithms.hierarchical import telling
from unisono.errors import BadArgument
from unisono.schedule.collective import Ints
from unisono.schedule.counts import Floats
from unisono.schedule.placement import numbered
from unisono.schedule.schedule import Schedule
from unisono.schedule.step import Step
from unisono.simulate.alike import representatives
from unisono.simulate.conditions import Conditions, SimulatedWorld
from unisono.simulate.engines import Fabric, MeasuredEngine, engine, modelled
from unisono.simulate.engines.engine import OURS, Engine
from unisono.simulate.messages import chunk_bytes
from unisono.simulate.steps import by_steps
from unisono.topology.topology import Topology

USUAL = {
    "all_reduce": ("ring", "rabenseifner", "recursive_doubling", "circulant"),
    "all_gather": ("ring", "recursive_doubling", "circulant"),
    "reduce_scatter": ("ring", "halving_doubling", "circulant"),
}
"""What is compared if nothing is named, with what the runtime chooses from."""
MOST_CHOSEN = 16
"""In groups of more ranks the runtime's hierarchies in segments are left out."""

HALVES = {"all_reduce": ("reduce_scatter", "all_gather")}
MANY = 128
"""From more ranks in a ring on, only its first steps are simulated."""
FIRST = 8
SCALES = 0.25, 0.5, 1.0, 2.0, 4.0
"""Multiples of a size that are simulated with it, in groups of many ranks."""


@dataclass(eq=False)
class EqualGroups:
    """Groups of ranks of one size; `members` has a row for each."""

    topology: Topology
    members: Ints
    algorithm: str = "auto"
    engine: str = OURS
    _known: dict[tuple[str, int], tuple[float, str]] = field(default_factory=dict)
    _curves: dict[tuple[str, str], tuple[list[float], list[float]]] = field(
        default_factory=dict
    )
    _won: dict[str, dict[str, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Every rank is in one group."""
        everyone = np.sort(self.members.ravel())
        if not np.array_equal(everyone, np.arange(self.topology.n)):
            raise BadArgument("groups: expected every rank in exactly one of them")
        self._model = None if self.engine == OURS else self._modelled()

    @property
    def size(self) -> int:
        """How many ranks a group has."""
        return int(self.members.shape[1])

    def time(self, collective: str, nbytes: int) -> tuple[float, str]:
        """Seconds until all groups are through, and the algorithm, the quickest tried.

        `nbytes` is the size of a whole buffer: of what an all_gather ends with.
        """
        if self.size == 1 or nbytes == 0:
            return 0.0, "nothing to do"
        key = collective, nbytes
        if key not in self._known and self._model is not None:
            self._known[key] = self._called(self._model, collective, nbytes)
        if key not in self._known:
            self._known[key] = self._quickest(collective, nbytes)
        return self._known[key]

    def _modelled(self) -> Engine | MeasuredEngine:
        """The engine; one of measured times if one group is the whole machine."""
        return engine(self.engine) if len(self.members) == 1 else modelled(self.engine)

    def _called(
        self, model: Engine | MeasuredEngine, collective: str, nbytes: int
    ) -> tuple[float, str]:
        """Seconds of a call of another library, and by what."""
        if isinstance(model, MeasuredEngine):
            return model.find(collective, self.size).at(nbytes), "measured"
        found = model.time(collective, self._fabric, nbytes)
        return found.seconds, f"{self.engine}'s {found.algorithm}, {found.protocol}"

    def _quickest(self, collective: str, nbytes: int) -> tuple[float, str]:
        """The quickest by simulation, those first that were quickest before.

        Of the others the simulation ends when they have taken longer.
        """
        won = self._won.setdefault(collective, {})
        best = math.inf, ""
        names = sorted(self.names(collective), key=lambda name: -won.get(name, 0))
        for name in names:
            found = self._simulated(collective, name, nbytes, best[0]), name
            best = min(best, found)
        won[best[1]] = won.get(best[1], 0) + 1
        return best

    @cached_property
    def _fabric(self) -> Fabric:
        """What a group has of the machine, while all others communicate as well."""
        whole = Fabric.of(self.topology)
        host = self.topology.wiring.host[self.members[0]]
        hosts = int(np.unique(host).size)
        near = self.size // hosts
        share = near / whole.per_host
        return replace(whole, hosts=hosts, per_host=near, across=whole.across * share)

    def names(self, collective: str) -> Sequence[str]:
        """The algorithms of which the quickest is taken."""
        if self.algorithm != "auto":
            return [self.algorithm]
        names = list(USUAL.get(collective, ()))
        hosts = numbered(self.topology.wiring.host[self.members[0]].tolist())
        if 1 < len(set(hosts)) < len(hosts):
            names.append(f"hierarchical:{telling(hosts)}")
        if self.size <= MOST_CHOSEN or not names:
            names += [spelled(*choice) for choice in chosen_from(collective, hosts)]
        names = list(dict.fromkeys(names))
        return [name for name in names if can_be_made(collective, name, self.size)]

    def _simulated(
        self, collective: str, name: str, nbytes: int, until: float
    ) -> float:
        """Seconds; of what takes longer than `until`, some time beyond that."""
        if name == "ring" and self.size > MANY:
            halves = HALVES.get(collective, (collective,))
            return sum(self._ring(half, nbytes) for half in halves)
        schedule = make(collective, name, self.size)
        if self.size <= MANY:
            return self._stepped(schedule, nbytes, schedule, until)
        sizes, times = self._curves.get((collective, name), ([0.0], [0.0]))
        if not sizes[0] <= nbytes <= sizes[-1]:
            sizes = [nbytes * scale for scale in SCALES]
            times = self._at(schedule, nbytes, SCALES).tolist()
            self._curves[collective, name] = sizes, times
        return float(np.interp(nbytes, sizes, times))

    def _ring(self, collective: str, nbytes: int) -> float:
        """A ring by its first steps; all of them, if these differ."""
        whole = make(collective, "ring", self.size)
        counts = FIRST, 2 * FIRST, 3 * FIRST
        parts = [whole.but(make=_first(whole, count)) for count in counts]
        one, two, three = (self._stepped(part, nbytes, whole) for part in parts)
        if not math.isclose(three - two, two - one, rel_tol=1e-6):
            return self._stepped(whole, nbytes, whole)
        return three + (self.size - 1 - counts[-1]) * (three - two) / FIRST

    def _stepped(
        self, steps: Schedule, nbytes: int, whole: Schedule, until: float = math.inf
    ) -> float:
        return float(self._at(steps, nbytes, (1.0,), whole, until)[0])

    def _at(
        self,
        steps: Schedule,
        nbytes: int,
        scales: Sequence[float],
        whole: Schedule | None = None,
        until: float = math.inf,
    ) -> Floats:
        """The seconds for these multiples of so many bytes."""
        sizes = chunk_bytes(whole or steps, nbytes)
        times = np.asarray(scales)
        groups = self._simulated_of
        clocks = by_steps(steps, self._world, sizes, times, members=groups, until=until)
        return np.asarray(clocks.clock.max(axis=1))

    @cached_property
    def _world(self) -> SimulatedWorld:
        return SimulatedWorld.of(self.topology, Conditions())

    @cached_property
    def _simulated_of(self) -> Ints:
        """The groups that tell the time of all."""
        return representatives(self.members, self._world)


def _first(schedule: Schedule, count: int) -> Callable[[], Iterator[Step]]:
    return lambda: islice(schedule, count)
