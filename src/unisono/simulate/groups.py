"""Collectives of groups: every group of a mesh axis calls the same one at once.

Training splits the world along axes. With 8-way tensor parallelism on 64 hosts there
are 64 groups of 8 neighbours along one axis and 8 groups of 64 along the other, and all
groups of an axis communicate at the same time, over links that they may share. So they
are simulated together, step by step, on the whole topology.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from unisono.algorithms import schedule as make
from unisono.algorithms.hierarchical import telling
from unisono.errors import BadArgument, UsageError
from unisono.schedule.collective import Ints
from unisono.simulate.conditions import Conditions, SimulatedWorld
from unisono.simulate.engines import Fabric, modelled
from unisono.simulate.engines.engine import OURS
from unisono.simulate.messages import chunk_bytes
from unisono.simulate.steps import by_steps
from unisono.topology.topology import Topology

USUAL = {
    "all_reduce": ("ring", "rabenseifner", "recursive_doubling", "circulant"),
    "all_gather": ("ring", "recursive_doubling", "circulant"),
    "reduce_scatter": ("ring", "halving_doubling", "circulant"),
}
"""What is compared if nothing is named; hierarchies too, where hosts have several."""


@dataclass(eq=False)
class EqualGroups:
    """Groups of ranks of one size; `members` has a row for each."""

    topology: Topology
    members: Ints
    algorithm: str = "auto"
    engine: str = OURS
    _known: dict[tuple[str, int], tuple[float, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Every rank is in one group."""
        everyone = np.sort(self.members.ravel())
        if not np.array_equal(everyone, np.arange(self.topology.n)):
            raise BadArgument("groups: expected every rank in exactly one of them")
        self._world: SimulatedWorld | None = None
        self._model = None if self.engine == OURS else modelled(self.engine)

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
            found = self._model.time(collective, self._fabric, nbytes)
            named = f"{self.engine}'s {found.algorithm}, {found.protocol}"
            self._known[key] = found.seconds, named
        if key not in self._known:
            times = [
                (self._simulated(collective, name, nbytes), name)
                for name in self._names(collective)
            ]
            self._known[key] = min(times)
        return self._known[key]

    @cached_property
    def _fabric(self) -> Fabric:
        """What a group has of the machine, while all others communicate as well."""
        whole = Fabric.of(self.topology)
        host = self.topology.wiring.host[self.members[0]]
        hosts = int(np.unique(host).size)
        near = self.size // hosts
        share = near / whole.per_host
        return replace(whole, hosts=hosts, per_host=near, across=whole.across * share)

    def _names(self, collective: str) -> Sequence[str]:
        if self.algorithm != "auto":
            return [self.algorithm]
        names = list(USUAL[collective])
        host = self.topology.wiring.host[self.members[0]].tolist()
        if 1 < len(set(host)) < len(host):
            names.append(f"hierarchical:{telling(host)}")
        return [name for name in names if self._offered(collective, name)]

    def _offered(self, collective: str, name: str) -> bool:
        try:
            make(collective, name, self.size)
        except UsageError:  # not for this number of ranks
            return False
        return True

    def _simulated(self, collective: str, name: str, nbytes: int) -> float:
        schedule = make(collective, name, self.size)
        self._world = self._world or SimulatedWorld.of(self.topology, Conditions())
        sizes = chunk_bytes(schedule, nbytes)
        clocks = by_steps(schedule, self._world, sizes, members=self.members)
        return float(clocks.clock.max())
