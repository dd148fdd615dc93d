"""The quickest path between ranks of any graph, found by Dijkstra's algorithm.

Regular shapes compute their routes by arithmetic. A user's own topology cannot, nor can
any topology with a failed link. "Quickest" is for a message of 64 KiB, so that a wide
detour beats a narrow line; among equals the path with fewer links wins, then the one
found first, so that all agree.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np

from unisono.errors import BadTopology
from unisono.schedule.collective import Ints
from unisono.topology.topology import Floats, Links, Wiring

MESSAGE = 64 << 10


def seconds(links: Links) -> Floats:
    """What each link takes for a message of the usual size."""
    cost: Floats = links.latency + MESSAGE / links.bandwidth
    return cost


class Paths:
    """Quickest paths over links that are not `failed`, by source, each found once."""

    def __init__(self, name: str, links: Links, num_nodes: int, failed: Ints) -> None:
        """Sort the links that work by the node they leave."""
        self.name = name
        self.links = links
        self.cost = seconds(links).tolist()
        self.out: list[list[int]] = [[] for _ in range(num_nodes)]
        broken = set(failed.tolist())
        for link, src in enumerate(links.src.tolist()):
            if link not in broken:
                self.out[src].append(link)
        self.ends = links.dst.tolist()
        self.starts = links.src.tolist()
        self._last: dict[int, list[int]] = {}

    def path(self, src: int, dst: int) -> list[int]:
        """The links from src to dst, or BadTopology if there is no way."""
        last = self._last.get(src)
        if last is None:
            last = self._last[src] = self._search(src)
        links: list[int] = []
        at = dst
        while at != src:
            if last[at] < 0:
                raise BadTopology(
                    f"{self.name}: no path from rank {src} to rank {dst}; expected "
                    "links that join all ranks in both directions"
                )
            links.append(last[at])
            at = self.starts[last[at]]
        return links[::-1]

    def _search(self, src: int) -> list[int]:
        """For every node, the last link on the quickest path to it."""
        last = [-1] * len(self.out)
        best = [(float("inf"), 0)] * len(self.out)
        best[src] = (0.0, 0)
        queue = [(0.0, 0, src)]
        while queue:
            far, hops, at = heapq.heappop(queue)
            if (far, hops) > best[at]:
                continue
            for link in self.out[at]:
                there, to = (far + self.cost[link], hops + 1), self.ends[link]
                if there < best[to]:
                    best[to] = there
                    last[to] = link
                    heapq.heappush(queue, (*there, to))
        return last

    def table(self, src: Ints, dst: Ints) -> Ints:
        """A row of links for each pair; -1 pads."""
        rows = [
            self.path(s, d)
            for s, d in zip(src.ravel().tolist(), dst.ravel().tolist(), strict=True)
        ]
        longest = max(1, *(len(row) for row in rows)) if rows else 1
        table = np.full((len(rows), longest), -1, dtype=np.int64)
        for row, links in zip(table, rows, strict=True):
            row[: len(links)] = links
        return table


def around(name: str, wiring: Wiring, failed: Ints) -> Callable[[Ints, Ints], Ints]:
    """The usual routes, except where they use a link that has failed."""
    paths = Paths(name, wiring.links, wiring.num_nodes, failed)
    broken = np.zeros(len(wiring.links) + 1, dtype=np.bool_)
    broken[failed] = True

    def route(src: Ints, dst: Ints) -> Ints:
        usual = wiring.route(src, dst)
        hit = np.flatnonzero(broken[usual].any(axis=-1))
        if not hit.size:
            return usual
        other = paths.table(src[hit], dst[hit])
        width = max(usual.shape[-1], other.shape[-1])
        table = np.full((src.size, width), -1, dtype=np.int64)
        table[:, : usual.shape[-1]] = usual
        table[hit] = -1
        table[hit, : other.shape[-1]] = other
        return table

    return route
