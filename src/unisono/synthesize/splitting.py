"""Switches removed: what goes through a switch becomes links from rank to rank.

A switch neither keeps nor copies data, so each unit that enters it leaves it once. A
link into the switch and a link out of it are joined to one link past the switch, unit
by unit, until none is left. Joined links must be parts of routes, since that is where
messages go. First the units of a switch are spread evenly, which is right for most; if
not all trees fit afterwards, pairs are joined one by one, each as far as all trees
still fit. (That this succeeds, where as much leaves each switch as enters it, is a
theorem of Jackson and of Frank; it does not know of routes.)
"""

from __future__ import annotations

from unisono.synthesize.flow import Capacities, empty, feasible
from unisono.synthesize.network import Network, Path
from unisono.synthesize.rate import Plan

Joined = dict[tuple[int, int, Path], int]
"""From node to node along links: how many units."""


def without_switches(network: Network, plan: Plan) -> Capacities | None:
    """How many trees go from rank to rank; None if the trees do not fit any more."""
    links: Joined = {
        (network.src[link], network.dst[link], (link,)): much
        for link, much in plan.units.items()
        if much
    }
    for switch in range(network.n, network.num_nodes):
        even = _joined(links, switch, _spread(network, links, switch))
        if feasible(_graph(even, network.num_nodes), plan.weights):
            links = even
        else:
            links = _one_by_one(network, links, switch, plan.weights)
    graph = _graph(links, network.num_nodes)[: network.n]
    return graph if feasible(graph, plan.weights) else None


def _graph(links: Joined, num_nodes: int) -> Capacities:
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


def _spread(network: Network, links: Joined, switch: int) -> dict[Pair, int]:
    """The units of a switch, shared out evenly among the pairs of its links."""
    into, out = _ends(links, switch)
    pairs = _pairs(network, into, out)
    left = {key: links[key] for key in (*into, *out)}
    choices = dict.fromkeys(left, 0)
    for a, b in pairs:
        choices[a] += 1
        choices[b] += 1
    share = {key: left[key] // max(1, choices[key]) for key in left}
    joined: dict[Pair, int] = {}
    for pair in pairs:
        _join(joined, left, pair, min(share[pair[0]], share[pair[1]]))
    moved = True
    while moved:
        moved = False
        for pair in pairs:
            moved |= _join(joined, left, pair, 1)
    return joined


def _join(joined: dict[Pair, int], left: dict[Key, int], pair: Pair, much: int) -> bool:
    much = min(much, left[pair[0]], left[pair[1]])
    if much:
        joined[pair] = joined.get(pair, 0) + much
        left[pair[0]] -= much
        left[pair[1]] -= much
    return much > 0


def _joined(links: Joined, switch: int, joined: dict[Pair, int]) -> Joined:
    """The links after joining; what is left at the switch is dropped."""
    after = {key: much for key, much in links.items() if switch not in key[:2]}
    for (a, b), much in joined.items():
        key = (a[0], b[1], a[2] + b[2])
        after[key] = after.get(key, 0) + much
    return after


def _one_by_one(
    network: Network, links: Joined, switch: int, weights: list[int]
) -> Joined:
    """Pairs joined each as far as all trees still fit."""
    into, out = _ends(links, switch)
    pairs = _pairs(network, into, out)
    any_way = [(a, b) for a in into for b in out if a[0] != b[1]]
    now = dict(links)
    for a, b in [*pairs, *any_way]:
        most = min(now[a], now[b])
        low = 0
        high = most
        while low < high:
            much = high if high == most else (low + high + 1) // 2
            if feasible(_graph(_moved(now, a, b, much), network.num_nodes), weights):
                low = much
            else:
                high = much - 1
        now = _moved(now, a, b, low)
    return {key: much for key, much in now.items() if switch not in key[:2]}


def _moved(links: Joined, a: Key, b: Key, much: int) -> Joined:
    after = dict(links)
    after[a] -= much
    after[b] -= much
    key = (a[0], b[1], a[2] + b[2])
    after[key] = after.get(key, 0) + much
    return after
