"""A lower bound of the topology, which no schedule can beat.

Cut the ranks into parts. The data that a collective must send out of a part, or into
it, has to cross the links that leave it, which have a limited total bandwidth. Any cut
gives a valid bound; the best of the cuts tried here (all ranks apart, all hosts apart,
the regions that the topology names) is usually the one that decides. The least latency
of a message that crosses the cut is added once.

For one part of m among n ranks, of b bytes in a buffer:

                  out of it          into it            all k parts together
    all_gather    b m/n              b (n-m)/n
    reduce_scatter b (n-m)/n         b m/n
    all_reduce    b                  b                  2 (k-1) b
    broadcast     b, if the root     b, if not the root (k-1) b
    reduce        b, if not the root b, if the root     (k-1) b
    scatter       b (n-m)/n, root    b m/n, if not root
    gather        b m/n, if not root b (n-m)/n, root
    all_to_all    b m (n-m)/n        b m (n-m)/n

Where b does not divide by n, the least share of a rank counts. With a codec, b are the
bytes that are sent; slow links count with what they still have, failed ones not at all.

The last column is what Patarasuk and Yuan count: each element takes k-1 crossings to be
reduced and k-1 to be distributed, by any rank.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from unisono.schedule.collective import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BARRIER,
    BROADCAST,
    GATHER,
    REDUCE,
    REDUCE_SCATTER,
    SCATTER,
    Collective,
    Ints,
)
from unisono.topology.topology import Floats, Topology, Wiring

Crossing = Callable[[Floats, Floats], tuple[Floats, Floats]]
"""From the parts of the ranks and where the root is, to what goes out and in."""

_NEED: dict[Collective, Crossing] = {
    ALL_GATHER: lambda m, _: (m, 1 - m),
    REDUCE_SCATTER: lambda m, _: (1 - m, m),
    ALL_REDUCE: lambda m, _: (np.ones_like(m), np.ones_like(m)),
    BROADCAST: lambda _, root: (root, 1 - root),
    REDUCE: lambda _, root: (1 - root, root),
    SCATTER: lambda m, root: ((1 - m) * root, m * (1 - root)),
    GATHER: lambda m, root: (m * (1 - root), (1 - m) * root),
}

_SHARED_OUT = (ALL_GATHER, REDUCE_SCATTER, SCATTER, GATHER, ALL_TO_ALL)
"""Collectives in which a rank has a share of the buffer."""


def least_time(
    what: Collective,
    topology: Topology,
    nbytes: float,
    root: int = 0,
    bandwidth: Floats | None = None,
) -> float:
    """The time that no schedule of `what` on this topology can be below.

    `bandwidth` is what the links have instead of the topology's own; 0 is none.
    """
    wiring = topology.wiring
    if topology.n == 1:
        return 0.0
    cuts = [np.concatenate([np.arange(wiring.n), _outside(wiring)])]
    cuts += [where for _, where in wiring.levels]
    rate = wiring.links.bandwidth if bandwidth is None else bandwidth
    if what in _SHARED_OUT:
        nbytes = nbytes // wiring.n * wiring.n
    return max(_across(what, wiring, where, nbytes, root, rate) for where in cuts)


def _outside(wiring: Wiring) -> Ints:
    return np.full(wiring.num_nodes - wiring.n, -1)


def _across(
    what: Collective,
    wiring: Wiring,
    where: Ints,
    nbytes: float,
    root: int,
    rate: Floats,
) -> float:
    """The bound that one way of cutting gives."""
    links, parts = wiring.links, int(where.max()) + 1
    size = np.bincount(where[: wiring.n], minlength=parts).astype(np.float64)
    if np.count_nonzero(size) < 2:
        return 0.0
    a, b = where[links.src], where[links.dst]
    apart = (a != b) & (rate > 0)
    leaves, enters = apart & (a >= 0), apart & (b >= 0)
    out: Floats = np.bincount(a[leaves], rate[leaves], minlength=parts).astype(float)
    into: Floats = np.bincount(b[enters], rate[enters], minlength=parts).astype(float)
    wait = float(links.latency[leaves | enters].min(initial=np.inf))
    if what is BARRIER:
        return wait
    there, m = size > 0, size / wiring.n
    at_root = (np.arange(parts) == where[root]).astype(np.float64)
    go, come = _need(what, m, at_root, wiring.n)
    slowest = max(_slowest(go, out, there), _slowest(come, into, there))
    k = int(np.count_nonzero(there))
    if what is ALL_REDUCE:
        slowest = max(slowest, 2 * (k - 1) / min(out.sum(), into.sum()))
    if what in (BROADCAST, REDUCE):
        slowest = max(slowest, (k - 1) / min(out.sum(), into.sum()))
    return wait + nbytes * float(slowest)


def _slowest(need: Floats, rate: Floats, there: NDArray[np.bool_]) -> float:
    """The longest that a part takes; one that has nothing to send takes no time."""
    some = there & (need > 0)
    return float((need[some] / rate[some]).max(initial=0.0))


def _need(what: Collective, m: Floats, root: Floats, n: int) -> tuple[Floats, Floats]:
    if what is ALL_TO_ALL:
        both = m * (1 - m) * n
        return both, both
    return _NEED[what](m, root)
