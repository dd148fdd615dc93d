"""The ways in which libraries do collectives: how many steps, and how many bytes.

    ring         every rank passes chunks to the next; many rings, so all cards are used
    tree         chains inside hosts, double binary trees between them
    switch       the switch of a host adds up and copies (NVLS)
    switch_tree  the same in each host, double binary trees between them (NVLSTree)
    switches     the same in each host, and the switches of the network (NVLS, SHARP)
    collnet      shares inside hosts, and the switches of the network (CollNetDirect)
    doubling     recursive doubling: all of it, log2 times
    halving      half of it to a partner, half of that to the next; then back again
    pairs        every rank to every other, as in an all_to_all

Counted for a buffer of 1 byte: steps inside a host and across hosts, what a rank moves
inside, and what a host's cards move.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from unisono.simulate.engines.fabric import Fabric

_PASSES = {
    "all_reduce": 2.0,
    "all_gather": 1.0,
    "reduce_scatter": 1.0,
    "broadcast": 1.0,
    "reduce": 1.0,
}
"""How often data goes around a ring."""
_SHARED = ("all_reduce", "all_gather", "reduce_scatter")
"""A rank passes all but its own share on; else all."""


@dataclass(frozen=True)
class Work:
    """What a path does: steps, and bytes moved for each byte of the buffer."""

    steps_inside: float
    steps_across: float
    bytes_inside: float
    bytes_across: float


def ring(what: str, fabric: Fabric) -> Work | None:
    """Every link of the ring carries what a rank passes on."""
    if what not in _PASSES:
        return None
    n, hosts, passes = fabric.ranks, fabric.hosts, _PASSES[what]
    across = passes * (hosts - 1)
    moved = passes * ((n - 1) / n if what in _SHARED else 1.0)
    return Work(
        passes * (n - 1) - across,
        across,
        moved if fabric.per_host > 1 else 0.0,
        moved if hosts > 1 else 0.0,
    )


def tree(what: str, fabric: Fabric) -> Work | None:
    """Up and down; a host sends as much as it would in a ring of hosts."""
    if what != "all_reduce":
        return None
    near = fabric.per_host
    return Work(
        2.0 * (near - 1),
        2.0 * math.log2(fabric.hosts),
        2.0 * (near - 1) / near,
        2.0 * (fabric.hosts - 1) / fabric.hosts,
    )


def switch(what: str, fabric: Fabric) -> Work | None:
    """All that a rank has goes to the switch, and its share of the sum comes back."""
    if what != "all_reduce" or not fabric.sums or fabric.hosts > 1:
        return None
    return Work(1.0, 0.0, 1.0 + 1.0 / fabric.per_host, 0.0)


def switch_tree(what: str, fabric: Fabric) -> Work | None:
    """The switches of hosts, and trees between hosts."""
    if what != "all_reduce" or not fabric.sums or fabric.hosts == 1:
        return None
    hosts = fabric.hosts
    return Work(
        1.0,
        2.0 * math.log2(hosts),
        1.0 + 1.0 / fabric.per_host,
        2.0 * (hosts - 1) / hosts,
    )


def switches(what: str, fabric: Fabric) -> Work | None:
    """As `switch` inside; a host's cards send its sum, and get that of all hosts."""
    if not _in_network(what, fabric) or not fabric.sums or fabric.per_host == 1:
        return None
    return Work(1.0, 1.0, 1.0 + 1.0 / fabric.per_host, 1.0)


def collnet(what: str, fabric: Fabric) -> Work | None:
    """Each rank adds up its share of its host's sum; the network adds up those."""
    if not _in_network(what, fabric):
        return None
    near = fabric.per_host
    return Work(2.0 if near > 1 else 0.0, 1.0, 2.0 * (near - 1) / near, 1.0)


def _in_network(what: str, fabric: Fabric) -> bool:
    """Whether the network's switches can make the sum: once out, once back."""
    return what == "all_reduce" and fabric.network_sums and fabric.hosts > 1


def doubling(what: str, fabric: Fabric) -> Work | None:
    """Everything to a partner at twice the distance, until all have it."""
    if what not in ("all_reduce", "barrier"):
        return None
    near, far = (math.ceil(math.log2(x)) for x in (fabric.per_host, fabric.hosts))
    return Work(near, far, float(near), float(far * fabric.per_host))


def halving(what: str, fabric: Fabric) -> Work | None:
    """Rabenseifner: neighbours first, so that a host sends its share alone."""
    if what != "all_reduce":
        return None
    near, far = fabric.per_host, fabric.hosts
    return Work(
        2.0 * math.ceil(math.log2(near)),
        2.0 * math.ceil(math.log2(far)),
        2.0 * (near - 1) / near,
        2.0 * (far - 1) / far,
    )


def pairs(what: str, fabric: Fabric) -> Work | None:
    """Each rank's share for each other; those for other hosts share the cards."""
    if what != "all_to_all":
        return None
    n, near = fabric.ranks, fabric.per_host
    return Work(
        float(near - 1),
        float(n - near),
        (near - 1) / n,
        near * (n - near) / n,
    )


PATTERNS: dict[str, Callable[[str, Fabric], Work | None]] = {
    "ring": ring,
    "tree": tree,
    "switch": switch,
    "switch_tree": switch_tree,
    "switches": switches,
    "collnet": collnet,
    "doubling": doubling,
    "halving": halving,
    "pairs": pairs,
}
"""By the names that engines.toml uses; None is: not for this collective or machine."""
