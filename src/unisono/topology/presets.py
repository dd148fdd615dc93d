"""Regular shapes, whose routes are computed by arithmetic.

    ring:8            neighbours linked, messages go the shorter way round
    full:8            a link from every rank to every other
    switch:8          one switch that never blocks
    torus:4x4x4       neighbours along every dimension, one dimension after the other
    fat-tree:4        three levels of switches with 4 ports each, 16 ranks
    dragonfly:5x4x2   5 groups of 4 routers with 2 ranks each, groups linked in pairs

All take `bandwidth` (bytes per second) and `latency` (of one link) as options, as in
`ring:8,bandwidth=25e9,latency=1us`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from unisono.errors import BadTopology
from unisono.schedule.collective import Ints
from unisono.topology.topology import LinkBundle, Topology, Wiring, lay, padded

BANDWIDTH = 25e9
LATENCY = 1e-6
OVERHEAD = 0.5e-6


def _family(
    make: Callable[..., Topology], scale: int, **options: float
) -> Callable[[int], Topology]:
    return lambda k: make(k, **options)


def ring(n: int, bandwidth: float = BANDWIDTH, latency: float = LATENCY) -> Topology:
    """Each rank is linked to its two neighbours, and passes on what is for others."""
    whole = torus((n,), bandwidth=bandwidth, latency=latency)
    again = _family(ring, n, bandwidth=bandwidth, latency=latency)
    return whole.but(name=f"ring:{n}", shape=(), scale=n, grown=again)


def full(n: int, bandwidth: float = BANDWIDTH, latency: float = LATENCY) -> Topology:
    """A link of its own from each rank to each other."""

    def route(src: Ints, dst: Ints) -> Ints:
        link = src * (n - 1) + dst - (dst > src)
        return padded([np.where(src == dst, -1, link)])

    def wire() -> Wiring:
        src = np.repeat(np.arange(n), n - 1)
        place = np.tile(np.arange(n - 1), n)
        dst = place + (place >= src)
        return Wiring(n, lay([LinkBundle("link", src, dst, latency, bandwidth)]), route)

    again = _family(full, n, bandwidth=bandwidth, latency=latency)
    return Topology(f"full:{n}", n, wire, OVERHEAD, scale=n, grown=again)


def switch(n: int, bandwidth: float = BANDWIDTH, latency: float = LATENCY) -> Topology:
    """One switch that never blocks; each rank has one port."""

    def route(src: Ints, dst: Ints) -> Ints:
        apart = src != dst
        return padded([np.where(apart, src, -1), np.where(apart, n + dst, -1)])

    def wire() -> Wiring:
        rank, hub = np.arange(n), np.full(n, n)
        cables = [
            LinkBundle("port", rank, hub, latency, bandwidth),
            LinkBundle("port", hub, rank, latency, bandwidth),
        ]
        return Wiring(n, lay(cables), route, (("switch", 1),))

    again = _family(switch, n, bandwidth=bandwidth, latency=latency)
    return Topology(f"switch:{n}", n, wire, OVERHEAD, scale=n, grown=again)


def torus(
    sides: tuple[int, ...], bandwidth: float = BANDWIDTH, latency: float = LATENCY
) -> Topology:
    """Neighbours along every dimension; the last coordinate changes fastest.

    Along a side of two both neighbours are the same rank, and there is one link to it.
    """
    n = math.prod(sides)
    ways = [1 if side == 2 else 2 for side in sides]
    first, each = np.cumsum([0, *ways[:-1]]), sum(ways)

    def route(src: Ints, dst: Ints) -> Ints:
        here = np.array(np.unravel_index(src, sides))
        there = np.array(np.unravel_index(dst, sides))
        columns = [np.full(src.shape, -1)]
        for dim, side in enumerate(sides):
            away = (there[dim] - here[dim]) % side
            back = away > side // 2
            hops = np.where(back, side - away, away)
            for hop in range(int(hops.max(initial=0))):
                link = np.ravel_multi_index(tuple(here), sides) * each + first[dim]
                going = hop < hops
                columns.append(np.where(going, link + back, -1))
                here[dim] = (here[dim] + np.where(going, 1 - 2 * back, 0)) % side
        return padded(columns[1:] or columns)

    def wire() -> Wiring:
        rank = np.arange(n)
        at = np.array(np.unravel_index(rank, sides))
        near = np.empty((n, each), dtype=np.int64)
        for dim, side in enumerate(sides):
            for way, step in enumerate((1, -1)[: ways[dim]]):
                moved = at.copy()
                moved[dim] = (moved[dim] + step) % side
                near[:, first[dim] + way] = np.ravel_multi_index(tuple(moved), sides)
        src = np.repeat(rank, each)
        links = lay([LinkBundle("link", src, near.ravel(), latency, bandwidth)])
        longest = int(np.argmax(sides))
        halves = at[longest] * 2 // sides[longest]
        return Wiring(n, links, route, levels=(("half", halves),) if n > 1 else ())

    def grown(last: int) -> Topology:
        return torus((*sides[:-1], last), bandwidth=bandwidth, latency=latency)

    name = f"torus:{'x'.join(map(str, sides))}"
    return Topology(name, n, wire, OVERHEAD, shape=sides, scale=sides[-1], grown=grown)


def fat_tree(
    ports: int, bandwidth: float = BANDWIDTH, latency: float = LATENCY
) -> Topology:
    """Three levels of switches with `ports` ports each, as many links up as down."""
    if ports < 2 or ports % 2:
        raise BadTopology(f"fat-tree:{ports}: expected an even number of ports")
    half = ports // 2
    n, pod = ports * half * half, half * half
    edge0, agg0 = n, n + ports * half
    core0 = agg0 + ports * half

    def route(src: Ints, dst: Ints) -> Ints:
        """Up to the switches that the destination's number picks, and down again."""
        edge, to = src // half, dst // half
        plane, spine = dst % half, dst // half % half
        near, same = edge == to, src // pod == dst // pod
        up = n * 2 + edge * half + plane
        top = n * 2 + 2 * n + (src // pod * half + plane) * half + spine
        down = n * 2 + 3 * n + (dst // pod * half + plane) * half + spine
        back = n * 2 + n + to * half + plane
        none = np.full_like(src, -1)
        table = padded(
            [
                src,
                np.where(near, none, up),
                np.where(same, none, top),
                np.where(same, none, down),
                np.where(near, none, back),
                n + dst,
            ]
        )
        return np.where((src == dst)[..., None], -1, table)

    def wire() -> Wiring:
        rank, every = np.arange(n), np.arange(n)  # each level has n links up
        edge = edge0 + rank // half
        low, agg = edge0 + every // half, agg0 + every // pod * half + every % half
        high = agg0 + every // half
        core = core0 + every // half % half * half + every % half
        cables = []
        for a, b in ((rank, edge), (low, agg), (high, core)):
            cables.append(LinkBundle("link", a, b, latency, bandwidth))
            cables.append(LinkBundle("link", b, a, latency, bandwidth))
        switches = np.arange(ports * half)
        pods = np.concatenate(
            [rank // pod, switches // half, switches // half, np.full(pod, -1)]
        )
        parts = (("edge", ports * half), ("agg", ports * half), ("core", pod))
        return Wiring(n, lay(cables), route, parts, (("pod", pods),))

    return Topology(f"fat-tree:{ports}", n, wire, OVERHEAD)


def dragonfly(
    sides: tuple[int, int, int], bandwidth: float = BANDWIDTH, latency: float = LATENCY
) -> Topology:
    """Groups of routers, all linked inside; one link between each pair of groups."""
    groups, routers, ranks = sides
    n, num = math.prod(sides), groups * routers
    local0 = 2 * n
    global0 = local0 + num * (routers - 1)

    def inside(group: Ints, a: Ints, b: Ints) -> Ints:
        link = local0 + (group * routers + a) * (routers - 1) + b - (b > a)
        return np.where(a == b, -1, link)

    def gate(group: Ints, other: Ints) -> Ints:
        return (other - (other > group)) % routers

    def route(src: Ints, dst: Ints) -> Ints:
        g, h = src // (routers * ranks), dst // (routers * ranks)
        a, b = src // ranks % routers, dst // ranks % routers
        out = np.where(g == h, b, gate(g, h))
        into = np.where(g == h, b, gate(h, g))
        far = np.where(g == h, -1, global0 + g * (groups - 1) + h - (h > g))
        table = padded([src, inside(g, a, out), far, inside(h, into, b), n + dst])
        return np.where((src == dst)[..., None], -1, table)

    def wire() -> Wiring:
        rank, router = np.arange(n), n + np.arange(n) // ranks
        a = np.repeat(np.arange(num), routers - 1)
        place = np.tile(np.arange(routers - 1), num)
        b = a // routers * routers + place + (place >= a % routers)
        g = np.repeat(np.arange(groups), groups - 1)
        place = np.tile(np.arange(groups - 1), groups)
        h = place + (place >= g)
        from_, to = g * routers + gate(g, h), h * routers + gate(h, g)
        cables = [
            LinkBundle("port", rank, router, latency, bandwidth),
            LinkBundle("port", router, rank, latency, bandwidth),
            LinkBundle("local", n + a, n + b, latency, bandwidth),
            LinkBundle("global", n + from_, n + to, 5 * latency, bandwidth),
        ]
        group = np.concatenate([rank // (routers * ranks), np.arange(num) // routers])
        return Wiring(n, lay(cables), route, (("router", num),), (("group", group),))

    name = f"dragonfly:{'x'.join(map(str, sides))}"
    return Topology(name, n, wire, OVERHEAD)
