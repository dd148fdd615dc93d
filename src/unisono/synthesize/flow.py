"""The largest flow through a graph with whole capacities, by Dinic's algorithm.

Capacities are a dictionary of neighbours for each node. Python's whole numbers have no
limit, so a flow is exact whatever the bandwidths are.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

Capacities = list[dict[int, int]]
"""For each node, what the links to its neighbours carry."""


def empty(num_nodes: int) -> Capacities:
    """A graph without links."""
    return [{} for _ in range(num_nodes)]


class Flow:
    """The flow from `source` to `sink`, up to `limit`; `value` is how much it is."""

    def __init__(
        self, capacities: Capacities, source: int, sink: int, limit: int
    ) -> None:
        """Find it: augment along shortest paths until none is left."""
        self.residual = list(capacities)
        self._own: set[int] = set()  # rows that were copied, since they change
        self.source, self.sink = source, sink
        self.value = 0
        while self.value < limit:
            level = self._levels()
            if level[sink] < 0:
                break
            self._block(level, limit)

    def _levels(self) -> list[int]:
        """How far each node is from the source, up to the sink; -1 is not reached."""
        level = [-1] * len(self.residual)
        level[self.source] = 0
        reached = [self.source]
        for at in reached:
            if level[self.sink] >= 0:
                break
            for to in self.residual[at]:
                if level[to] < 0:
                    level[to] = level[at] + 1
                    reached.append(to)
        return level

    def _block(self, level: list[int], limit: int) -> None:
        """Augment along paths of this length until the sink is cut off."""
        residual, sink = self.residual, self.sink
        path = [self.source]
        while path and self.value < limit:
            at = path[-1]
            if at == sink:
                self._augment(path, limit)
                path = [self.source]
                continue
            deeper = level[at] + 1
            row = residual[at]
            if sink in row:
                path.append(sink)
                continue
            for to in row:
                if level[to] == deeper and to != sink:
                    path.append(to)
                    break
            else:
                level[at] = -1
                path.pop()

    def _augment(self, path: list[int], limit: int) -> None:
        residual = self.residual
        for at in path:
            if at not in self._own:
                self._own.add(at)
                residual[at] = dict(residual[at])
        hops = list(pairwise(path))
        much = min(limit - self.value, *(residual[a][b] for a, b in hops))
        self.value += much
        for a, b in hops:
            left = residual[a][b] - much
            if left:
                residual[a][b] = left
            else:
                del residual[a][b]
            residual[b][a] = residual[b].get(a, 0) + much

    def cut(self) -> set[int]:
        """The nodes that the source still reaches, where the flow is the largest."""
        return reached(self.residual, [self.source])


def reached(capacities: Capacities, sources: Iterable[int]) -> set[int]:
    """The nodes that can be reached from any of these."""
    return set(by_distance(capacities, sources))


def by_distance(capacities: Capacities, sources: Iterable[int]) -> list[int]:
    """The nodes that can be reached from any of these, the nearest first."""
    order = list(sources)
    found = set(order)
    for at in order:
        for to in capacities[at]:
            if to not in found:
                found.add(to)
                order.append(to)
    return order


def from_roots(capacities: Capacities, weights: list[int]) -> Capacities:
    """The graph with one more node, from which rank i gets `weights[i]`."""
    return [*capacities, {i: w for i, w in enumerate(weights) if w}]


def backwards(capacities: Capacities) -> Capacities:
    """The graph with every link the other way round."""
    turned = empty(len(capacities))
    for a, row in enumerate(capacities):
        for b, much in row.items():
            turned[b][a] = much
    return turned


class Supply:
    """Whether every rank can get everything: `weights[i]` trees of each root i fit.

    That is Edmonds' condition: as much as there is flows from all roots together to
    each rank. Flows are searched from the rank back to the roots. A rank that is known
    to get everything counts as a root of everything for the others, which keeps most
    searches short.
    """

    def __init__(self, capacities: Capacities, weights: list[int]) -> None:
        """Prepare the graph; nothing is searched yet."""
        self.total, self.sink = sum(weights), len(capacities)
        self.rows = backwards(capacities)
        for rank, weight in enumerate(weights):
            if weight:
                self.rows[rank][self.sink] = weight
        self.rows.append({})

    def cut_before(self, rank: int) -> set[int] | None:
        """A set of nodes with this rank that not enough enters; None if there is none.

        After None the rank counts as supplied.
        """
        flow = Flow(self.rows, rank, self.sink, self.total)
        if flow.value < self.total:
            return flow.cut()
        self.rows[rank][self.sink] = self.total
        return None


def in_order(capacities: Capacities, n: int) -> list[int]:
    """The ranks, each near to one before."""
    ranks = [at for at in by_distance(capacities, [0]) if at < n]
    return ranks + sorted(set(range(n)) - set(ranks))


def feasible(capacities: Capacities, weights: list[int]) -> bool:
    """Whether every rank can get everything."""
    supply = Supply(capacities, weights)
    order = in_order(capacities, len(weights))
    return all(supply.cut_before(rank) is None for rank in order)


def broken_cuts(capacities: Capacities, weights: list[int]) -> list[frozenset[int]]:
    """Sets of nodes that not enough enters, each with a rank that is in none before."""
    supply = Supply(capacities, weights)
    found: list[frozenset[int]] = []
    for rank in in_order(capacities, len(weights)):
        if not any(rank in nodes for nodes in found):
            inside = supply.cut_before(rank)
            if inside is not None:
                found.append(frozenset(inside))
    return found
