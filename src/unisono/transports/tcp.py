"""Ranks on several hosts: shared memory within each, streams over TCP between them.

    transport = meet(rank, n, job, "10.0.3.1:29500", secret=..., version=...)

The ranks meet across hosts first (`meeting`), which tells everybody who is where. Then
the ranks of each host meet once more among themselves, as those of a single host do
(`shm`), and from there on have memory in common. Streams are opened when a schedule
first needs them (`streams`); each is a connection of its own, authenticated as every
other (`reception`). And every rank but the first has a lifeline to the first, by which
everybody hears of every death.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable
from contextlib import suppress

from unisono import _native
from unisono.errors import BadArgument
from unisono.transports import shm
from unisono.transports.addresses import Address
from unisono.transports.base import WINDOW, Transport
from unisono.transports.connect import Connection
from unisono.transports.handshake import Label as Purpose
from unisono.transports.rank_table import Roll
from unisono.transports.rendezvous_hosts import meet_across
from unisono.transports.secret import Secret
from unisono.transports.streams import MOST_LANES, Dial, End, Label, Streams
from unisono.transports.tls import check

LANES = "UNISONO_TCP_LANES"
"""How many sockets carry one stream."""
LIMIT = "UNISONO_SILENCE_S"
"""After how many seconds of silence a rank of another host is taken for dead."""

_INFO_BYTES = 72  # of tcp_info, which end with the round trip in microseconds
_RTO_MAX_MS = 44  # TCP_RTO_MAX_MS, in Linux since 6.15
_NEAR_S = 1e-3
_NEAR_BUFFER = 2 << 20
"""Within a millisecond this much in flight is plenty; and what waits in the kernel is
still in a cache when it is copied on. The kernel by itself would let more pile up."""

_DATA, _POST = "data", "post"
_WINDOW = 4 * WINDOW
"""Where buffers cannot be read in place, pieces that travel should not be tiny."""


def meet(
    rank: int,
    world_size: int,
    job: str,
    address: str,
    *,
    secret: Secret | None,
    version: str,
    timeout_s: float = 60.0,
    interface: str | None = None,
    epoch: int = 0,
    insecure: bool = False,
    tls: bool = False,
    announce: Callable[[Address], None] | None = None,
    lost: Callable[[], str] = str,
) -> Transport:
    """Find the other ranks of `job`, on this host and on others."""
    if tls:
        check(secret)
    lanes = _number(LANES, 1, most=MOST_LANES)
    limit = _number(LIMIT, 10, most=3600)
    roll = meet_across(
        rank,
        world_size,
        job,
        address,
        secret=secret,
        version=version,
        timeout_s=timeout_s,
        interface=interface,
        epoch=epoch,
        insecure=insecure,
        tls=tls,
        announce=announce,
        lost=lost,
    )
    try:
        return _transport(roll, job, version, timeout_s, epoch, lanes, limit, lost)
    except BaseException:
        roll.close()
        raise


def _transport(
    roll: Roll,
    job: str,
    version: str,
    timeout_s: float,
    epoch: int,
    lanes: int,
    limit_s: float,
    lost: Callable[[], str],
) -> Transport:
    rank, n, here = roll.rank, len(roll.entries), roll.local()
    first = roll.entries[here[0]]
    found, pids = shm.meet_here(
        here.index(rank),
        len(here),
        f"{job}/{first.identity}/{first.pid}/{epoch}",
        version=version,
        timeout_s=timeout_s,
        lost=lost,
    )
    ends, known = [-1] * n, [-1] * n
    for place, world_rank in enumerate(here):
        known[world_rank] = pids[place]
        if place in found:
            ends[world_rank] = found[place].detach()
    engine = _native.Engine.between_processes(rank, ends, known)
    connections = [roll.lifelines.get(r) for r in range(n)]
    engine.live(
        [None if c is None else c.take_wire() for c in connections],
        [b"" if c is None else c.send_key for c in connections],
        [b"" if c is None else c.receive_key for c in connections],
        epoch,
        int(limit_s * 1e8),
        int(limit_s * 1e9),
    )
    roll.reception.believe(lambda peer: "it has died" if engine.dead(peer) else "")
    streams = Streams(_dialer(roll, limit_s), lanes=lanes, epoch=epoch)

    def arrived(connection: Connection) -> None:
        label = _label(connection.label)
        _suit(connection.socket, limit_s)
        end = End(connection.take_wire(), connection.receive_key)
        streams.arrived(connection.peer, label, end)

    for purpose in (_DATA, _POST):
        roll.reception.hand_on(purpose, arrived)

    def leave() -> None:
        streams.close()
        roll.reception.close()

    return Transport(
        engine,
        rank,
        roll.peers,
        roll.entries[rank].cores,
        _WINDOW,
        hosts=roll.hosts,
        streams=streams,
        leave=leave,
        why=roll.why,
        reception=roll.reception,
    )


def _dialer(roll: Roll, limit_s: float) -> Dial:
    def dial(to: int, label: Label, timeout_s: float, lost: Callable[[], str]) -> End:
        purpose = _POST if label.messages else _DATA
        stream = label.lanes << 16 | label.lane
        made = roll.reception.dial(
            to, Purpose(purpose, label.agreed, stream), timeout_s, lost
        )
        _suit(made.socket, limit_s)
        return End(made.take_wire(), made.send_key)

    return dial


def _suit(sock: socket.socket, limit_s: float) -> None:
    """Choose how much may be on its way, by how far it is; far away the kernel does.

    And when the kernel gives a connection up: not before the lifelines have had their
    limit, and if only these two cannot reach each other, soon after. What was lost is
    sent again every second at least, so that it goes on as soon as it can.
    """
    patience = 2 * limit_s + 1
    for option, value in (
        (socket.TCP_USER_TIMEOUT, int(patience * 1e3)),
        (socket.TCP_KEEPIDLE, max(1, int(limit_s))),
        (socket.TCP_KEEPINTVL, 1),
        (socket.TCP_KEEPCNT, max(1, int(limit_s) + 1)),
        (_RTO_MAX_MS, 1000),
    ):
        with suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        (round_trip_us,) = struct.unpack_from("I", info, _INFO_BYTES - 4)
        if round_trip_us < _NEAR_S * 1e6:
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                sock.setsockopt(socket.SOL_SOCKET, option, _NEAR_BUFFER)


def _label(purpose: Purpose) -> Label:
    """What the other end meant when it dialed."""
    return Label(
        purpose.communicator,
        purpose.stream & 0xFFFF,
        max(1, purpose.stream >> 16),
        purpose.purpose == _POST,
    )


def _number(variable: str, usual: int, *, most: int) -> int:
    told = os.environ.get(variable, "")
    if not told:
        return usual
    if not told.isdecimal() or not 1 <= int(told) <= most:
        raise BadArgument(f"{variable}={told}: expected a number from 1 to {most}")
    return int(told)
