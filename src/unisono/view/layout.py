"""The positions of a topology's nodes in a drawing.

Ranks are on a circle, rank 0 on top and the others clockwise, so that consecutive ranks
are neighbours in the picture. Where several ranks share a host, each host has a circle
of its own, and its part of the drawing. Where every rank has a link to every other, and
the messages go along a tree, that tree is drawn: its root on top, children below. Where
switches link switches, as in a fat tree, ranks are below and switches in levels above.
Other nodes (switches, network cards) are at the mean of their neighbours, as if every
link were a spring; and nodes that would overlap are moved apart.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from itertools import count

import numpy as np

from unisono.topology.topology import Floats, Topology, Wiring

_APART = 0.16
"""How far from each other nodes are drawn that have the same place, in radii."""
_FILLED = 0.72
"""How much of its part of the drawing the ranks of a host take."""
_DEEPEST, _WIDEST = 6, 10
"""How deep a tree may be, and how many ranks one level may have, to be drawn as one."""


Pairs = Collection[tuple[int, int]]


def place(topology: Topology, pairs: Pairs = (), root: int = 0) -> Floats:
    """Coordinates of every node, ranks first, in a square from -1 to 1.

    `pairs` are the ranks that send and receive, `root` is where a tree begins.
    """
    wiring = topology.wiring
    inner = wiring.num_nodes - wiring.n
    levels = _levels(wiring)
    if not hosts(wiring) and max(levels) > 1:
        return _layered(wiring, levels)
    tree = tree_of(wiring, pairs, root)
    ranks = _ranks(wiring) if tree is None else tree
    if not inner:
        return ranks
    return np.concatenate([ranks, _spread(_balanced(wiring, ranks))])


def _levels(wiring: Wiring) -> list[int]:
    """How many links each node is away from the nearest rank."""
    away = [0] * wiring.n + [-1] * (wiring.num_nodes - wiring.n)
    near = _neighbours(wiring)
    order = list(range(wiring.n))
    for node in order:
        for other in near[node]:
            if away[other] < 0:
                away[other] = away[node] + 1
                order.append(other)
    return away


def _neighbours(wiring: Wiring) -> dict[int, list[int]]:
    near: dict[int, list[int]] = defaultdict(list)
    for a, b in links(wiring):
        near[a].append(b)
        near[b].append(a)
    return near


def _layered(wiring: Wiring, levels: list[int]) -> Floats:
    """Ranks below, above them their switches, above these theirs: as a tree of them."""
    near, deep = _neighbours(wiring), max(levels)
    x = np.zeros(wiring.num_nodes)
    for level in range(deep + 1):
        mine = [node for node, of in enumerate(levels) if of == level]
        below = {
            node: np.mean([x[k] for k in near[node] if levels[k] < level] or [node])
            for node in mine
        }
        for at, node in enumerate(sorted(mine, key=lambda node: (below[node], node))):
            x[node] = (2 * at + 1) / len(mine) - 1
    return np.stack([x, 1 - 2 * np.array(levels) / deep], axis=1)


def hosts(wiring: Wiring) -> list[int]:
    """The host of each rank, if some ranks share one and others do not."""
    host = wiring.host.tolist()
    return host if 1 < len(set(host)) < wiring.n else []


def _ranks(wiring: Wiring) -> Floats:
    """Ranks on one circle, or on one for each host."""
    of = hosts(wiring)
    if not of:
        return _circle(wiring.n)
    names = sorted(set(of))
    columns = 2 if len(names) <= 4 else math.ceil(len(names) / 2)
    rows = math.ceil(len(names) / columns)
    size = _FILLED / np.array([columns, rows])
    ranks = np.zeros((wiring.n, 2))
    for at, name in enumerate(names):
        down, across = divmod(at, columns)
        middle = np.array([(2 * across + 1) / columns, (2 * down + 1) / rows]) - 1
        mine = [rank for rank, host in enumerate(of) if host == name]
        # Turned, so that the way from the middle of a host to the other hosts is free.
        turned = 0.5 if len(mine) == 2 else 1 / len(mine)
        ranks[mine] = middle + size * _circle(len(mine), turned * math.pi)
    return ranks


def _circle(points: int, turned: float = 0.0) -> Floats:
    turn = 2 * math.pi * np.arange(points) / points - turned
    around = np.stack([np.sin(turn), -np.cos(turn)], axis=1)
    return around if points > 1 else np.zeros((1, 2))


def tree_of(wiring: Wiring, pairs: Pairs, root: int) -> Floats | None:
    """Places in the tree that the pairs make; None if they make none to be drawn."""
    n = wiring.n
    edges = {(min(a, b), max(a, b)) for a, b in pairs}
    full = len(links(wiring)) == n * (n - 1) // 2 and wiring.num_nodes == n
    if n < 4 or not full or len(edges) != n - 1:
        return None
    near: dict[int, list[int]] = defaultdict(list)
    for a, b in sorted(edges):
        near[a].append(b)
        near[b].append(a)
    depth, order = {root: 0}, [root]
    for rank in order:
        fresh = [other for other in near[rank] if other not in depth]
        depth.update(dict.fromkeys(fresh, depth[rank] + 1))
        order += fresh
    deep = max(depth.values())
    widest = max(Counter(depth.values()).values())
    if len(order) < n or deep > _DEEPEST or widest > _WIDEST:
        return None
    across = _across(root, -1, near, count())
    x = np.array([across[rank] for rank in range(n)])
    y = np.array([depth[rank] for rank in range(n)])
    width = max(float(np.ptp(x)), 1.0)
    return np.stack([2 * (x - x.min()) / width - 1, 2 * y / deep - 1], axis=1)


def _across(
    rank: int, parent: int, near: dict[int, list[int]], leaves: Iterator[int]
) -> dict[int, float]:
    """Leaves side by side; all others in the middle of their children."""
    children = [child for child in near[rank] if child != parent]
    if not children:
        return {rank: float(next(leaves))}
    below: dict[int, float] = {}
    for child in children:
        below |= _across(child, rank, near, leaves)
    ends = below[children[0]], below[children[-1]]
    return {**below, rank: sum(ends) / 2}


def _balanced(wiring: Wiring, ring: Floats) -> Floats:
    """Every node that is no rank, at the mean of its neighbours."""
    n, inner = wiring.n, wiring.num_nodes - wiring.n
    pull = np.zeros((inner, inner))
    fixed = np.zeros((inner, 2))
    for a, b in zip(wiring.links.src.tolist(), wiring.links.dst.tolist(), strict=True):
        if a < n:
            continue
        pull[a - n, a - n] += 1
        if b < n:
            fixed[a - n] += ring[b]
        else:
            pull[a - n, b - n] -= 1
    positions = np.linalg.lstsq(pull, fixed, rcond=None)[0]
    return positions.astype(np.float64)


def _spread(points: Floats) -> Floats:
    """The same points, those in one place moved onto a small circle around it."""
    places: dict[tuple[float, float], list[int]] = defaultdict(list)
    for i, (x, y) in enumerate(points.round(3).tolist()):
        places[x + 0.0, y + 0.0].append(i)
    moved = points.copy()
    for same in places.values():
        if len(same) == 1:
            continue
        radius = _APART / (2 * math.sin(math.pi / len(same)))
        for k, i in enumerate(same):
            turn = 2 * math.pi * k / len(same)
            moved[i] += radius * np.array([math.sin(turn), -math.cos(turn)])
    return moved


def links(wiring: Wiring) -> list[tuple[int, int]]:
    """Which nodes are linked, each pair once, whatever the direction."""
    ends = zip(wiring.links.src.tolist(), wiring.links.dst.tolist(), strict=True)
    return sorted({(min(a, b), max(a, b)) for a, b in ends})


def route(wiring: Wiring, src: int, dst: int) -> list[int]:
    """The nodes a message passes from rank to rank, both ends included."""
    table = wiring.route(np.array([src]), np.array([dst]))[0]
    path = [int(link) for link in table if link >= 0]
    return [src, *(int(wiring.links.dst[link]) for link in path)]
