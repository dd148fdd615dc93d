"""How fast trees can be: the largest rate that all cuts allow, and trees that reach it.

Data that begins on the ranks of a set and is for all ranks has to leave the set. So no
rate is above the bandwidth that leaves the set, divided by what begins inside. By
Edmonds' theorem the least of these bounds, over all sets, is reached by trees. A flow
to each rank finds the set that decides, without looking at all sets.

Trees are whole: a link carries so many of them. `whole_trees` finds how many trees of
each root are enough to come close to the rate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from unisono.synthesize.flow import (
    Capacities,
    Flow,
    Supply,
    feasible,
    from_roots,
    in_order,
)
from unisono.synthesize.network import Network
from unisono.synthesize.regions import region_rate

MOST_CHUNKS = 1024
"""The most trees, and so chunks, of one schedule."""

MOST_EACH = 48
"""The most trees of one root, where all have as many."""

_LOSSES = (0, 5, 10, 20, 50, 100, 200, 500, 1000, 3000)
"""By how many thousandths the rate may be missed, the least first."""


@dataclass(frozen=True)
class Plan:
    """Trees of each root, and how many of them each link may carry."""

    weights: list[int]
    units: dict[int, int]

    @property
    def total(self) -> int:
        """The number of trees."""
        return sum(self.weights)


def best_rate(network: Network, weights: list[int]) -> Fraction:
    """The rate x at which `weights[i]` x bytes per second of each root i reach all."""
    graph = network.graph(network.scaled(1))
    out = [Fraction(sum(graph[i].values()), w) for i, w in enumerate(weights) if w]
    rate = min(out)
    supplied: list[int] = []
    for rank in in_order(graph, network.n):
        supplied.append(rank)
        while (slower := _slower(graph, weights, supplied, rate)) is not None:
            rate = slower
    return rate


def _slower(
    graph: Capacities, weights: list[int], supplied: list[int], rate: Fraction
) -> Fraction | None:
    """The rate that a cut before the last of `supplied` allows, if it is below `rate`.

    The ranks before it get everything at any rate up to this.
    """
    p, q = rate.as_integer_ratio()
    scaled = [{to: much * q for to, much in row.items()} for row in graph]
    supply = Supply(scaled, [w * p for w in weights])
    for rank in supplied[:-1]:
        supply.rows[rank][supply.sink] = supply.total
    inside = supply.cut_before(supplied[-1])
    if inside is None:
        return None
    enters = sum(
        much
        for a, row in enumerate(graph)
        if a not in inside
        for b, much in row.items()
        if b in inside
    )
    return Fraction(enters, sum(w for i, w in enumerate(weights) if i not in inside))


def whole_trees(network: Network, weights: list[int], rate: Fraction) -> Plan:
    """As many trees as it takes to come close to the rate, the fewest that do."""
    total = sum(weights)
    most = max(1, min(MOST_EACH, MOST_CHUNKS // total))
    for loss in _LOSSES:
        for k in range(1, most + 1):
            plan = _even(network, weights, rate, k, loss)
            if plan is not None:
                return plan
    k = most
    slowest = Fraction(1000 + _LOSSES[-1], 1000)
    while True:  # every link carries k trees of each root in the end
        slowest *= 2
        loss = int(slowest * 1000) - 1000
        plan = _even(network, weights, rate, k, loss)
        if plan is not None:
            return plan


def _even(
    network: Network, weights: list[int], rate: Fraction, k: int, loss: int
) -> Plan | None:
    units = network.scaled(k / rate * Fraction(1000 + loss, 1000))
    trees = [k * w for w in weights]
    total = sum(trees)
    graph = network.graph(units)
    into = [0] * network.num_nodes
    for row in graph:
        for to, much in row.items():
            into[to] += much
    if any(into[i] < total - trees[i] for i in range(network.n)):
        return None
    return Plan(trees, units) if feasible(graph, trees) else None


def best_free_rate(network: Network, least: Fraction) -> Fraction:
    """The rate of all trees together where any rank may be the root of any number.

    The search begins at a bound: each tree enters every rank but its root. Too high a
    rate needs more roots than trees; by how many more shows where the next guess is.
    """
    graph = network.graph(network.scaled(1))
    rate = math.floor(region_rate(network))
    while rate > least * Fraction(1001, 1000):
        excess = sum(_roots(graph, network.n, rate)) - rate
        if excess <= 0:
            return Fraction(rate)
        below = sum(_roots(graph, network.n, rate - 1)) - (rate - 1)
        rate -= max(1, -(-excess // max(1, excess - below)))
    return least


def narrowest_cut(network: Network) -> int:
    """What the narrowest cut between rank 0 and another carries."""
    graph = network.whole_graph()
    source = [sum(graph[0].values()), *[0] * (network.n - 1)]
    flows = (
        Flow(from_roots(graph, source), len(graph), rank, source[0])
        for rank in range(1, network.n)
    )
    return min(flow.value for flow in flows)


def _roots(graph: Capacities, n: int, total: int) -> list[int]:
    """The fewest roots for so many trees: each rank's number, lowered one by one."""
    weights = [total] * n
    source = len(graph)
    for rank in range(n):
        flow = Flow(from_roots(graph, weights), source, rank, 2 * total)
        weights[rank] -= min(weights[rank], flow.value - total)
    return weights


def whole_free_trees(network: Network, rate: Fraction) -> Plan | None:
    """Trees with any roots that come close to the rate; none if it takes too many."""
    for loss in _LOSSES[:4]:
        for total in range(1, min(MOST_CHUNKS, 8 * network.n) + 1):
            units = network.scaled(total / rate * Fraction(1000 + loss, 1000))
            graph = network.graph(units)
            into = sum(m for row in graph for b, m in row.items() if b < network.n)
            if into < total * (network.n - 1):
                continue
            weights = _roots(graph, network.n, total)
            if sum(weights) <= total:
                weights[0] += total - sum(weights)
                return Plan(weights, units)
    return None


def every_rank(n: int, root: int | None) -> Iterator[int]:
    """What begins on each rank: a share of every one, or all on the root."""
    return (1 if root in (None, i) else 0 for i in range(n))
