"""The rate that no sum is above, by the worst way to part the ranks into regions.

Each rank is in one region, a switch in one or in none. A transfer between two regions
enters the region of its receiver, whichever route it takes. And an element of an
all_reduce takes 2 (k - 1) transfers between k regions at least: before k - 1 of them no
region can have something of all, since fewer do not connect k regions. Of the others,
each gets something of all by a later transfer, and none of these has two receivers. So
the time per byte is at least 2 (k - 1) over the bandwidth that enters regions.

Of all ways to part the ranks the worst is found without looking at each. At a rate x a
way to part them counts (k - 1) x less what enters: x is too high exactly if one counts
more than 0. What counts most is found by numbers on ranks, which sum up to at least x
less what enters in every set with a rank. They begin at x, and one rank after the other
is lowered as far as a flow to it says. Then each rank is in a set whose sum is exactly
that, and two such sets with a rank in common are together one such set, by
submodularity of cuts: these are the regions. Numbers may be below 0. Without that,
regions could leave ranks out, and the count of transfers would not hold. The regions
tell the next x, which is lower, until none are found that forbid it.

Regions found have no switch in common where both directions carry the same. Elsewhere a
switch stays with the first of them: the bound is then true, perhaps not the best.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

from unisono.synthesize.flow import Capacities, Flow, backwards
from unisono.synthesize.network import Network


def region_rate(network: Network) -> Fraction:
    """The rate that no trees are above, whatever their roots, and half that of a sum.

    It begins with the regions that the topology names.
    """
    graph = network.whole_graph()
    rate = min(_enters(graph, where) for where in network.regions)
    while True:
        where = worst_regions(graph, network.n, rate)
        if max(where) < 1:
            return rate
        slower = _enters(graph, where)
        if slower >= rate:
            return rate
        rate = slower


def worst_regions(graph: Capacities, n: int, rate: Fraction) -> tuple[int, ...]:
    """The regions that forbid this rate most; one region if none forbid it.

    For each node the region it is in; -1 is in none.
    """
    p, q = rate.as_integer_ratio()
    turned = backwards([{b: m * q for b, m in row.items()} for row in graph])
    number = [p] * n
    region: dict[int, int] = {}
    for rank in range(n):
        if rank not in region:
            inside = _lower(turned, number, rank, p)
            _merge(region, inside, rank, n)
    return _numbered(region, len(graph))


def _lower(turned: Capacities, number: list[int], rank: int, total: int) -> set[int]:
    """Lower the number of the rank as far as it can be; the set that stops it.

    The flow goes from the rank back to a source. A number below 0 is a link from the
    rank to where it is; this adds the sum of those numbers to every cut.
    """
    source = len(turned)
    rows = [dict(row) for row in turned]
    below = 0
    for other, much in enumerate(number):
        if other == rank:
            continue
        if much > 0:
            rows[other][source] = much
        elif much < 0:
            rows[rank][other] = rows[rank].get(other, 0) - much
            below -= much
    most = sum(rows[rank].values()) + total
    flow = Flow([*rows, {}], rank, source, most)
    number[rank] = total - (flow.value - below)
    return flow.cut()


def _merge(region: dict[int, int], inside: Iterable[int], rank: int, n: int) -> None:
    """Make one region, named by the rank, of this set and all that share ranks."""
    nodes = set(inside)
    shared = {region[at] for at in nodes if at < n and at in region}
    for at, name in list(region.items()):
        if name in shared:
            region[at] = rank
    for at in nodes:
        region.setdefault(at, rank)


def _numbered(region: dict[int, int], num_nodes: int) -> tuple[int, ...]:
    names = {name: i for i, name in enumerate(sorted(set(region.values())))}
    return tuple(names[region[at]] if at in region else -1 for at in range(num_nodes))


def _enters(graph: Capacities, where: tuple[int, ...]) -> Fraction:
    """The bound of regions: a tree enters each but that of its root."""
    into = sum(
        much
        for a, row in enumerate(graph)
        for b, much in row.items()
        if where[b] not in (-1, where[a])
    )
    return Fraction(into, len(set(where) - {-1}) - 1)
