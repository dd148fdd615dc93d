"""Switches removed: what goes through a switch becomes links from rank to rank.

A switch neither keeps nor copies data, so each unit that enters it leaves it once. A
link into the switch and a link out of it are joined to one link past the switch, unit
by unit, until none is left. Joined links must be parts of routes, since that is where
messages go. The units of a switch are spread evenly among its pairs of links. If not
all trees fit afterwards, there are sets of nodes that not enough enters any more. These
are remembered, the units are spread again, each pair only as far as these sets allow,
and so on until all trees fit. Pairs that are no part of a route are joined last, where
the trees need more. (That this succeeds, where as much leaves each switch as enters it,
is a theorem of Jackson and of Frank; it does not know of routes.)

The switches farthest from all ranks are the first to go, while few links lead to each:
later, links between all pairs of ranks would. Where routes then load a link with more
than it has, the first pairs are joined as far as they can be instead of all evenly, and
both are tried with the switches in the order of their numbers; the best is taken.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction

from unisono.synthesize.flow import (
    Capacities,
    broken_cuts,
    by_distance,
    empty,
    feasible,
)
from unisono.synthesize.network import Network, Path
from unisono.synthesize.rate import Plan

Joined = dict[tuple[int, int, Path], int]
"""From node to node along links: how many units."""


def without_switches(
    network: Network, plan: Plan, by_number: bool = False
) -> Capacities | None:
    """How many trees go from rank to rank; None if the trees do not fit any more.

    `by_number` is the order in which switches are removed, and the only one tried.
    """
    best: Capacities | None = None
    least = Fraction(0)
    orders = [_inmost_first(network), list(range(network.n, network.num_nodes))]
    for order in orders[by_number:]:
        for evenly in (True, False):
            links = _removed(network, plan, order, evenly)
            if links is None:
                continue
            graph = _graph(links, network.n)
            busiest = _busiest(network, plan, graph)
            if best is None or busiest < least:
                best, least = graph, busiest
            if least <= 1:
                return best
    return best


def _busiest(network: Network, plan: Plan, graph: Capacities) -> Fraction:
    """What goes over the busiest link, by routes, as a part of what it may carry."""
    load = dict.fromkeys(plan.units, 0)
    for a, row in enumerate(graph):
        for b, much in row.items():
            for link in network.routes.get((a, b), ()):
                load[link] += much
    return max(Fraction(load[i], much) for i, much in plan.units.items() if much)


def _removed(
    network: Network, plan: Plan, order: Iterable[int], evenly: bool
) -> Joined | None:
    """The links from rank to rank; None if the trees do not fit any more."""
    links: Joined = {
        (network.src[link], network.dst[link], (link,)): much
        for link, much in plan.units.items()
        if much
    }
    known: list[frozenset[int]] = []
    for switch in order:
        after = _without(network, links, switch, plan.weights, known, evenly)
        if after is None:
            return None
        links = after
    return links


def _inmost_first(network: Network) -> list[int]:
    """The switches that links lead to, the farthest from all ranks first."""
    near = by_distance(network.graph(network.scaled(1)), range(network.n))
    return near[: network.n - 1 : -1]


def _graph(links: Joined, num_nodes: int) -> Capacities:
    """What goes from node to node, parallel links together."""
    graph = empty(num_nodes)
    for (a, b, _), much in links.items():
        if much and a != b:
            graph[a][b] = graph[a].get(b, 0) + much
    return graph


Key = tuple[int, int, Path]
Pair = tuple[Key, Key]


def _ends(links: Joined, switch: int) -> tuple[list[Key], list[Key]]:
    into = sorted(key for key, much in links.items() if key[1] == switch and much)
    out = sorted(key for key, much in links.items() if key[0] == switch and much)
    return into, out


def _pairs(network: Network, into: list[Key], out: list[Key]) -> list[Pair]:
    """Links that may be joined, in turns: each with the next, then the one after."""
    return [
        (a, b)
        for turn in range(len(out))
        for at, a in enumerate(into)
        for b in [out[(at + turn) % len(out)]]
        if a[0] != b[1] and a[2] + b[2] in network.stretches
    ]


def _without(
    network: Network,
    links: Joined,
    switch: int,
    weights: list[int],
    known: list[frozenset[int]],
    evenly: bool,
) -> Joined | None:
    """The links without this switch, if all trees still fit.

    Sets that were in the way are added to `known`.
    """
    into, out = _ends(links, switch)
    ways = [_pairs(network, into, out)]
    first = True
    while True:
        cuts = _Cuts.of(links, switch, weights, known)
        left = {key: links[key] for key in (*into, *out)}
        joined: dict[Pair, int] = {}
        for pairs in ways:
            _spread(joined, left, pairs, cuts, evenly or first)
        first = False
        after = _joined(links, switch, joined)
        if feasible(_graph(after, network.num_nodes), weights):
            return after  # what is left at the switch is not needed
        before = after | {key: much for key, much in left.items() if much}
        broken = broken_cuts(_graph(before, network.num_nodes), weights)
        more = [nodes for nodes in broken if nodes not in known]
        if more:  # none is met again: pairs are joined as far as it allows
            known += more
        elif len(ways) == 1:
            ways.append([(a, b) for a in into for b in out if a[0] != b[1]])
        else:
            return None


@dataclass
class _Cuts:
    """How much less may enter sets of nodes, when the units of a switch are joined."""

    sets: list[frozenset[int]]
    room: list[int]
    switch: int
    _losing: dict[tuple[int, int], list[int]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        links: Joined,
        switch: int,
        weights: list[int],
        known: Iterable[frozenset[int]],
    ) -> _Cuts:
        """Those of the known sets that can lose too much here."""
        made = cls([], [], switch)
        most = sum(much for key, much in links.items() if key[1] == switch)
        for nodes in known:
            enters = sum(
                much
                for (a, b, _), much in links.items()
                if b in nodes and a not in nodes
            )
            begins = sum(weights[at] for at in nodes if at < len(weights))
            room = enters + begins - sum(weights)
            if room < most:
                made.sets.append(nodes)
                made.room.append(room)
        return made

    def losing(self, pair: Pair) -> list[int]:
        """The sets that units of this pair enter now, and not when they are joined."""
        a, b = pair[0][0], pair[1][1]
        if (a, b) not in self._losing:
            self._losing[a, b] = [
                i
                for i, nodes in enumerate(self.sets)
                if (a in nodes) == (b in nodes) != (self.switch in nodes)
            ]
        return self._losing[a, b]


def _spread(
    joined: dict[Pair, int],
    left: dict[Key, int],
    pairs: list[Pair],
    cuts: _Cuts,
    evenly: bool,
) -> None:
    """Join what is left of the units, shared out evenly or the first pairs first."""
    while pairs:
        choices = dict.fromkeys(left, 0)
        for a, b in pairs:
            choices[a] += 1
            choices[b] += 1
        share = {
            key: max(1, much // max(1, choices[key])) if evenly else much
            for key, much in left.items()
        }
        pairs = [
            (a, b)
            for a, b in pairs
            if _join(joined, left, (a, b), min(share[a], share[b]), cuts)
        ]


def _join(
    joined: dict[Pair, int],
    left: dict[Key, int],
    pair: Pair,
    much: int,
    cuts: _Cuts,
) -> bool:
    """Join as many units of a pair as there are and as all sets allow; whether any."""
    much = min(much, left[pair[0]], left[pair[1]])
    if not much:
        return False
    losing = cuts.losing(pair)
    much = min(much, *(cuts.room[i] for i in losing)) if losing else much
    if much <= 0:
        return False
    for i in losing:
        cuts.room[i] -= much
    joined[pair] = joined.get(pair, 0) + much
    left[pair[0]] -= much
    left[pair[1]] -= much
    return True


def _joined(links: Joined, switch: int, joined: dict[Pair, int]) -> Joined:
    """The links after joining; what is left at the switch is dropped."""
    after = {key: much for key, much in links.items() if switch not in key[:2]}
    for (a, b), much in joined.items():
        key = (a[0], b[1], a[2] + b[2])
        after[key] = after.get(key, 0) + much
    return after
