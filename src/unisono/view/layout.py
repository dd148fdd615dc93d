"""The positions of a topology's nodes in a drawing.

Ranks are on a circle, rank 0 on top and the others clockwise, so that consecutive ranks
are neighbours in the picture. Other nodes (switches, network cards) are at the mean of
their neighbours, as if every link were a spring; and nodes that would overlap are moved
apart.
"""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np

from unisono.topology.topology import Floats, Topology, Wiring

_APART = 0.16
"""How far from each other nodes are drawn that have the same place, in radii."""


def place(topology: Topology) -> Floats:
    """Coordinates of every node, ranks first, within a circle of radius 1."""
    wiring = topology.wiring
    turn = 2 * math.pi * np.arange(wiring.n) / wiring.n
    ring = np.stack([np.sin(turn), -np.cos(turn)], axis=1)
    if wiring.n == 1:
        ring = np.zeros((1, 2))
    inner = wiring.num_nodes - wiring.n
    if not inner:
        return ring
    return np.concatenate([ring, _spread(_balanced(wiring, ring))])


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
