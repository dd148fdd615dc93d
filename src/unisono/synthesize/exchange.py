"""An all_to_all made for a topology: every pair's data by paths that load links evenly.

Each pair of ranks has a flow of its own from one to the other, and all flows share the
links. The data of a pair is cut into parts, and each part goes by one path from rank to
rank. Paths are shortest ones by lengths that grow with the load of a link: in each
round all parts are taken out one after the other and routed anew, and from round to
round a busy link counts for more.

Whatever the lengths are, the flows cannot be faster than the sum of the distances of
all pairs allows, divided by the sum of bandwidth times length. The largest of these
bounds, of all rounds, says how near the paths are to the best that any have.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import pairwise

import numpy as np

from unisono.schedule.collective import ALL_TO_ALL
from unisono.schedule.schedule import Schedule
from unisono.schedule.step import Step, copy_step
from unisono.synthesize.network import Network, Path

MOST_PARTS = 8
MOST_CHUNKS = 1 << 10
"""A pair has fewer parts where there are many pairs, but one at least."""
POWERS = 1, 1, 2, 2, 4, 4, 8, 8, 16, 16, 32, 32
"""For each round, by which power of its load a link is longer."""
FEW_RANKS = 12
"""Up to so many ranks each path is found alone; of more, those of a rank together."""
_EMPTY = 1e-3  # what an empty link counts, as a part of the busiest one


class _Loads:
    """How busy each link is, and the shortest paths by that."""

    def __init__(self, network: Network) -> None:
        self.bandwidth = network.bandwidth
        self.routes = network.routes
        self.load = dict.fromkeys(network.used, 0)
        self.hops: list[list[tuple[int, Path]]] = [[] for _ in range(network.n)]
        for (src, dst), links in network.routes.items():
            self.hops[src].append((dst, links))
        self.length = {link: 1 / self.bandwidth[link] for link in self.load}
        self.power = 1

    @property
    def busiest(self) -> float:
        """The time of the busiest link, for parts of one byte."""
        return max(much / self.bandwidth[link] for link, much in self.load.items())

    def lengthen(self, power: int) -> None:
        """Lengths by the loads of now."""
        self.power, self.most = power, self.busiest or 1.0
        for link in self.load:
            self._measure(link)

    def _measure(self, link: int) -> None:
        part = self.load[link] / self.bandwidth[link] / self.most
        self.length[link] = (part + _EMPTY) ** self.power / self.bandwidth[link]

    def add(self, path: Path, parts: int) -> None:
        """Load the links of a path from rank to rank."""
        for hop in pairwise(path):
            for link in self.routes[hop]:
                self.load[link] += parts
                self._measure(link)

    def nearest(self, src: int) -> tuple[list[float], list[int]]:
        """How far every rank is, and by which rank it is reached."""
        far = [math.inf] * len(self.hops)
        before = [-1] * len(self.hops)
        far[src], ahead = 0.0, [(0.0, src)]
        while ahead:
            here, at = heappop(ahead)
            if here > far[at]:
                continue
            for to, links in self.hops[at]:
                there = here + sum(self.length[link] for link in links)
                if there < far[to] * (1 - 1e-9):
                    far[to], before[to] = there, at
                    heappush(ahead, (there, to))
        return far, before

    def bound(self) -> float:
        """The least time of the busiest link, of any paths, by these lengths."""
        n = len(self.hops)
        distance = math.fsum(d for src in range(n) for d in self.nearest(src)[0])
        room = math.fsum(self.bandwidth[k] * self.length[k] for k in self.load)
        return distance / room


def exchange(network: Network) -> tuple[Schedule, float]:
    """The schedule, and the time per byte of a buffer that no paths are below."""
    n = network.n
    parts = max(1, min(MOST_PARTS, MOST_CHUNKS // n**2))
    loads = _Loads(network)
    loads.lengthen(1)
    least, best = loads.bound() * parts, math.inf
    paths: dict[tuple[int, int, int], Path] = {}
    kept = paths
    for power in POWERS:
        loads.lengthen(power)
        for part in range(parts):
            for src in range(n):
                _route_anew(loads, paths, src, part)
        if loads.busiest < best:
            best, kept = loads.busiest, dict(paths)
        loads.lengthen(power)
        least = max(least, loads.bound() * parts)
        if best <= least * (1 + 1e-6):
            break
    steps = list(_steps(kept, n, parts))
    schedule = Schedule(ALL_TO_ALL, n, n * n * parts, lambda: steps)
    return schedule, least / (n * parts)


def _route_anew(
    loads: _Loads, paths: dict[tuple[int, int, int], Path], src: int, part: int
) -> None:
    """Take one part of each pair from this rank out, and route it by shortest paths."""
    n = len(loads.hops)
    others = [dst for dst in range(n) if dst != src]
    groups = [[dst] for dst in others] if n <= FEW_RANKS else [others]
    for group in groups:
        for dst in group:
            if (src, dst, part) in paths:
                loads.add(paths[src, dst, part], -1)
        _, before = loads.nearest(src)
        for dst in group:
            path = [dst]
            while path[-1] != src:
                path.append(before[path[-1]])
            paths[src, dst, part] = tuple(reversed(path))
            loads.add(paths[src, dst, part], 1)


def _steps(
    paths: dict[tuple[int, int, int], Path], n: int, parts: int
) -> Iterator[Step]:
    """The first hops of all paths at once, then the second, and so on."""
    rows = [
        (hop, (src * n + dst) * parts + part, *ends)
        for (src, dst, part), path in sorted(paths.items())
        for hop, ends in enumerate(pairwise(path))
    ]
    table = np.array(rows, dtype=np.int64)
    for hop in range(int(table[:, 0].max()) + 1):
        at = table[table[:, 0] == hop]
        yield copy_step(chunk=at[:, 1], src=at[:, 2], dst=at[:, 3])
