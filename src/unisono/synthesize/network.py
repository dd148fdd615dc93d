"""The network that a schedule is made for: links that routes use, as whole capacities.

A transfer of a schedule names two ranks, and the topology has one route for each pair.
So a link helps only if a route uses it, and the links of a tree from rank to rank must
be routes. `Network` has the links of routes on which no third rank lies; over other
pairs a tree goes by way of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np

from unisono.errors import BadTopology, NotOffered
from unisono.schedule.collective import Ints
from unisono.simulate.conditions import SimulatedWorld
from unisono.synthesize.flow import Capacities, empty, reached
from unisono.topology.topology import Wiring

MOST_RANKS = 256
"""The most ranks that schedules are made for: the time grows with their cube."""

Path = tuple[int, ...]
"""Links one after the other."""


@dataclass(frozen=True, eq=False)
class Network:
    """Nodes, and links with whole bandwidths; ranks are the nodes 0..n-1.

    `routes` are the pairs of ranks with the links between them, none by way of a rank.
    `regions` are ways to part the nodes: all ranks apart, hosts apart; -1 is in none.
    `reached` are the links of all routes, also those by way of ranks.
    """

    name: str
    n: int
    num_nodes: int
    src: tuple[int, ...]
    dst: tuple[int, ...]
    bandwidth: tuple[int, ...]
    routes: dict[tuple[int, int], Path]
    regions: tuple[tuple[int, ...], ...] = ()
    reached: frozenset[int] = frozenset()

    @classmethod
    def of(cls, world: SimulatedWorld) -> Network:
        """The network of a topology, or the reason why there is no schedule for it."""
        wiring, n = world.topology.wiring, world.n
        if n > MOST_RANKS:
            raise NotOffered(
                f"{world.topology.name}: {n} ranks; schedules are synthesized for at "
                f"most {MOST_RANKS}"
            )
        routes, every = _routes(world)
        made = cls(
            world.topology.name,
            n,
            wiring.num_nodes,
            tuple(wiring.links.src.tolist()),
            tuple(wiring.links.dst.tolist()),
            tuple(max(1, round(b)) for b in world.bandwidth[:-1].tolist()),
            routes,
            tuple(_regions(wiring)),
            every,
        )
        made._refuse_disconnected()
        return made

    def backwards(self) -> Network:
        """The same network with every link the other way round."""
        turned = {(dst, src): path[::-1] for (src, dst), path in self.routes.items()}
        return Network(
            self.name,
            self.n,
            self.num_nodes,
            self.dst,
            self.src,
            self.bandwidth,
            turned,
            self.regions,
            self.reached,
        )

    @cached_property
    def used(self) -> frozenset[int]:
        """The links that routes use."""
        return frozenset(link for path in self.routes.values() for link in path)

    @cached_property
    def stretches(self) -> frozenset[Path]:
        """Every part of a route that is one piece."""
        parts = set()
        for path in self.routes.values():
            for first in range(len(path)):
                for end in range(first + 1, len(path) + 1):
                    parts.add(path[first:end])
        return frozenset(parts)

    @property
    def unit(self) -> int:
        """The largest bandwidth of which all are multiples."""
        return math.gcd(*(self.bandwidth[link] for link in self.used)) or 1

    def scaled(self, scale: Fraction | int) -> dict[int, int]:
        """The bandwidth of each link that is used, times `scale`, rounded down."""
        return {link: math.floor(self.bandwidth[link] * scale) for link in self.used}

    def graph(self, units: dict[int, int]) -> Capacities:
        """The nodes with what links carry between them, parallel links together."""
        graph = empty(self.num_nodes)
        for link, much in units.items():
            if much:
                row, to = graph[self.src[link]], self.dst[link]
                row[to] = row.get(to, 0) + much
        return graph

    def whole_graph(self) -> Capacities:
        """The nodes with the bandwidth of all links that any transfer takes."""
        return self.graph({link: self.bandwidth[link] for link in self.reached})

    @cached_property
    def symmetric(self) -> bool:
        """Whether between any two nodes both directions carry the same."""
        return both_ways(self.graph(self.scaled(1)))

    def _refuse_disconnected(self) -> None:
        graph = self.graph(self.scaled(1))
        for at, ways in ((0, graph), (0, self.backwards().graph(self.scaled(1)))):
            lost = set(range(self.n)) - reached(ways, [at])
            if lost:
                raise BadTopology(
                    f"{self.name}: no path between rank {at} and rank {min(lost)}; "
                    "expected links that join all ranks in both directions"
                )


def both_ways(graph: Capacities) -> bool:
    """Whether both directions of every link carry the same."""
    return all(
        graph[b].get(a) == much
        for a, row in enumerate(graph)
        for b, much in row.items()
    )


def _regions(wiring: Wiring) -> Iterator[tuple[int, ...]]:
    apart = np.full(wiring.num_nodes, -1)
    apart[: wiring.n] = np.arange(wiring.n)
    for where in (apart, *(where for _, where in wiring.levels)):
        if len(set(where[: wiring.n].tolist()) - {-1}) > 1:
            yield tuple(where.tolist())


def _routes(
    world: SimulatedWorld,
) -> tuple[dict[tuple[int, int], Path], frozenset[int]]:
    """The routes on which no third rank lies, and the links of all routes."""
    n = world.n
    src, dst = (side.ravel() for side in np.indices((n, n)))
    apart = src != dst
    table: Ints = world.route(src[apart], dst[apart])
    ends = world.topology.wiring.links.dst.tolist()
    pairs = zip(src[apart].tolist(), dst[apart].tolist(), strict=True)
    routes = {}
    for pair, row in zip(pairs, table.tolist(), strict=True):
        path = tuple(link for link in row if link >= 0)
        if all(ends[link] >= n for link in path[:-1]):
            routes[pair] = path
    return routes, frozenset(table.ravel().tolist()) - {-1}
