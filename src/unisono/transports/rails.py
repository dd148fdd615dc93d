"""Several network cards of a host that carry the data of its streams together.

UNISONO_INTERFACE names them in order of preference, separated by commas: interfaces
(eth0,eth1), networks (10.0.0.0/24,10.1.0.0/24) or addresses. Each is a *rail*. A rank
listens at the address of each of its rails, and the rank table says which these are.
The first carries everything but streams; the lanes of a stream are spread over all,
each bound to the address of its card (`transports/streams.py`).

A rail of this host is joined to the rail of the other that the kernel's route leads to
from there, and what is left over in the order in which it was named, bound to the card
as well. So both ends need not name theirs in the same order. Rails of IPv4 and IPv6 are
never joined to each other. Of two hosts with different numbers of rails the smaller
number is used; with one there is no spreading.

A rail over which a rank cannot be reached is left out towards this rank for as long as
the world lasts: its lanes go the usual way instead. The log says so once, and
`comm.explain` from then on.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from unisono.errors import PeerLost, TransportError
from unisono.transports.addresses import Address, Rail
from unisono.transports.connect import Connection, Source
from unisono.transports.handshake import Purpose
from unisono.transports.listener import Listener

_RAIL_S = 3.0
"""How long a rail is tried: as one attempt to connect."""

_LOG = logging.getLogger("unisono")


@dataclass(frozen=True)
class Pair:
    """A rail of this host, and the address of the peer's that it leads to."""

    rail: Rail
    to: Address
    routed: bool
    """Whether the kernel's own route there leaves by this rail."""

    @property
    def source(self) -> Source:
        """Where the connection begins; at a given card if the route would not."""
        return Source(self.rail.host, "" if self.routed else self.rail.interface)


Route = Callable[[Address], str]
"""The address of this host from which the kernel's route to another leaves, or ""."""


def route_from(to: Address) -> str:
    """What the kernel says; nothing is sent."""
    try:
        family, where = to.resolve()[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0])
    except (OSError, TransportError):
        return ""


def joined(
    mine: Sequence[Rail], theirs: Sequence[Address], route: Route = route_from
) -> tuple[Pair, ...]:
    """Which rail leads to which, in this host's order; none if there is just one."""
    if min(len(mine), len(theirs)) < 2:
        return ()
    leaves = {to: route(to) for to in theirs}
    found: dict[Rail, Pair] = {}
    left = list(theirs)
    for rail in mine:
        direct = next((to for to in left if leaves[to] == rail.host), None)
        if direct is not None:
            found[rail] = Pair(rail, direct, routed=True)
            left.remove(direct)
    for rail in mine:
        alike = (to for to in left if (":" in to.host) == (":" in rail.host))
        if rail not in found and (to := next(alike, None)) is not None:
            found[rail] = Pair(rail, to, routed=False)
            left.remove(to)
    pairs = tuple(found[rail] for rail in mine if rail in found)
    return pairs if len(pairs) > 1 else ()


class Rails:
    """The rails of one rank towards each of the others."""

    def __init__(
        self,
        listener: Listener,
        mine: Sequence[Rail],
        theirs: Sequence[Sequence[Address]],
    ) -> None:
        """`theirs` are the addresses of the rails of every rank."""
        self._listener, self._mine, self._theirs = listener, tuple(mine), theirs
        self._pairs: dict[int, tuple[Pair, ...]] = {}
        self._failed: dict[tuple[int, Pair], str] = {}

    def towards(self, peer: int) -> tuple[Pair, ...]:
        """Those that lead to a rank; none if its lanes go the usual way."""
        if peer not in self._pairs:
            self._pairs[peer] = joined(self._mine, self._theirs[peer])
        return self._pairs[peer]

    def count(self, peer: int) -> int:
        """How many lead to a rank, at least one."""
        return max(1, len(self.towards(peer)))

    def connect(
        self,
        peer: int,
        purpose: Purpose,
        lane: int,
        timeout_s: float,
        lost: Callable[[], str],
    ) -> Connection:
        """The connection of a lane: over its rail, or the usual way."""
        pairs = self.towards(peer)
        pair = pairs[lane % len(pairs)] if pairs else None
        if pair is not None and (peer, pair) not in self._failed:
            try:
                return self._listener.connect(
                    peer, purpose, min(_RAIL_S, timeout_s / 2), lost, over=pair
                )
            except PeerLost:
                raise
            except TransportError as why:
                self._leave_out(peer, pair, why)
        return self._listener.connect(peer, purpose, timeout_s, lost)

    def __str__(self) -> str:
        """As `explain` shows it; "" if there is one network card alone."""
        if len(self._mine) < 2:
            return ""
        named = ", ".join(map(str, self._mine))
        text = f"; over {named}, each as much as it can carry"
        for (peer, pair), why in self._failed.items():
            text += f"; not {pair.rail} to rank {peer}: {why}"
        for peer, pairs in self._pairs.items():
            if len(pairs) < len(self._mine):
                has = f"it names {len(self._theirs[peer]) or 1} of its own"
                text += f"; {len(pairs) or 1} to rank {peer}: {has}"
        return text

    def _leave_out(self, peer: int, pair: Pair, why: TransportError) -> None:
        self._failed[peer, pair] = str(why)
        _LOG.warning(
            "%s is not used towards rank %d, which is slower: %s; is it up, and does "
            "UNISONO_INTERFACE name the same networks on all hosts?",
            *(pair.rail, peer, why),
        )
