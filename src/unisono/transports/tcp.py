"""Ranks on several hosts: shared memory within each, streams over TCP between them.

The ranks connect across hosts first (`rendezvous_hosts`), by which each learns who is
on which host. Then the ranks of each host connect among themselves, as those of a
single host do (`shm`), and share memory from there on. Streams are opened when a
schedule first needs them (`streams`); each is a connection of its own, authenticated as
every other (`listener`). Every rank but the first has a lifeline to the first, by which
all ranks learn of every death.

A transport that connects by TCP and moves data in another way derives from `Tcp` and
says how the wires of its streams are made from authenticated connections (`Tcp.wires`).
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

from unisono import _native
from unisono._native import Engine, Wire
from unisono.errors import BadArgument
from unisono.transports import shm
from unisono.transports.addresses import Address, by_loopback
from unisono.transports.connect import Connection
from unisono.transports.handshake import Purpose
from unisono.transports.interface import Capabilities, ConnectOptions, Transport
from unisono.transports.lanes import Lanes, choose_lanes, number
from unisono.transports.rails import Rails
from unisono.transports.rank_table import RankTable
from unisono.transports.rendezvous_hosts import rendezvous
from unisono.transports.session import WINDOW, Session
from unisono.transports.streams import StreamEnd, StreamLabel, Streams
from unisono.transports.tls import check

LIMIT = "UNISONO_SILENCE_S"
"""After so many seconds without a heartbeat a rank of another host counts as dead."""

_INFO_BYTES = 72  # of tcp_info, which end with the round trip in microseconds
_RTO_MAX_MS = 44  # TCP_RTO_MAX_MS, in Linux since 6.15
_NEAR_S = 1e-3
_LONGEST_UNREAD_S = 3600.0
"""A rank may read nothing for so long, while more was sent to it than it can hold."""
_NEAR_BUFFER = 2 << 20
"""Within a millisecond this much in flight is plenty; and what waits in the kernel is
still in a cache when it is copied on. The kernel by itself would let more pile up."""
_BUFFERS = socket.SO_SNDBUF, socket.SO_RCVBUF

_DATA, _MESSAGES = "data", "post"
_WINDOW = 4 * WINDOW
"""Where buffers cannot be read in place, pieces that travel should not be tiny."""


@dataclass(frozen=True)
class Wires:
    """How the wires of one session are made.

    `make` makes one at each end of a stream, from its authenticated connection, without
    waiting. `close` is called when the session is closed and no wire is used any more.
    `words` are added to what `explain` says of lanes. `rails`: the connection carries
    the data, so that several network cards can be used by connections over each. `tcp`:
    data goes by the TCP of this system, at the pace of its congestion control.
    """

    make: Callable[[Connection], Wire] = Connection.take_wire
    close: Callable[[], None] = lambda: None
    words: str = ""
    rails: bool = True
    tcp: bool = True


class Tcp(Transport):
    """Processes on one or several hosts, connected by TCP."""

    name = "tcp"
    capabilities = Capabilities(between_hosts=True, zero_copy=True, encryption=True)

    def connect(self, options: ConnectOptions) -> Session:
        """Find the other ranks of the job, on this host and on others."""
        if options.tls:
            check(options.secret)
        limit_s = number(LIMIT, 10, most=3600)
        choose_lanes(1, 1)  # wrong variables are reported before anything is opened
        wires = self.wires()
        try:
            return _connected(self.name, options, limit_s, wires)
        except BaseException:
            wires.close()
            raise

    def wires(self) -> Wires:
        """How the wires of a new session are made: of the sockets alone."""
        return Wires()


def _connected(
    fabric: str, options: ConnectOptions, limit_s: float, wires: Wires
) -> Session:
    table = rendezvous(
        options.rank,
        options.world_size,
        options.job,
        options.address,
        secret=options.secret,
        version=options.version,
        timeout_s=options.timeout_s,
        interface=options.interface,
        epoch=options.epoch,
        insecure=options.insecure,
        tls=options.tls,
        fabric=fabric,
        announce=lambda found: options.announce(str(found.sent())),
        lost=options.lost,
    )
    try:
        _check_fabrics(table)
        here = table.entries[table.rank].cores, table.sharing_machine()
        lanes = choose_lanes(*here)
        engine = _engine(table, options, limit_s)
        engine.use_io_threads(lanes.io_threads, lanes.least_bytes, lanes.adders)
        return _session(table, engine, options, lanes, limit_s, wires)
    except BaseException:
        table.close()
        raise


def _check_fabrics(table: RankTable) -> None:
    """Refuse ranks that would not understand each other's streams."""
    own = table.entries[table.rank].fabric
    for entry in table.entries:
        if entry.fabric != own:
            raise BadArgument(
                f"rank {table.rank} uses the transport {own!r}, rank {entry.rank} "
                f"{entry.fabric!r}: give all ranks the same UNISONO_FABRIC, or fabric="
            )


def _session(
    table: RankTable,
    engine: Engine,
    options: ConnectOptions,
    lanes: Lanes,
    limit_s: float,
    wires: Wires,
) -> Session:
    listener = table.listener
    theirs = [tuple(map(Address.parse, e.rails)) for e in table.entries]
    rails = Rails(listener, table.rails if wires.rails else (), theirs)

    def open_stream(
        to: int, label: StreamLabel, timeout_s: float, lost: Callable[[], str]
    ) -> StreamEnd:
        made = rails.connect(to, _purpose(label), label.lane, timeout_s, lost)
        tune_socket(made.socket, limit_s, sends=True)
        return StreamEnd(wires.make(made), made.send_key)

    streams = Streams(
        open_stream, lanes=lanes.lanes, epoch=options.epoch, rails=rails.count
    )

    def arrived(made: Connection) -> None:
        tune_socket(made.socket, limit_s, sends=False)
        end = StreamEnd(wires.make(made), made.receive_key)
        streams.arrived(made.peer, _label(made.purpose), end)

    for kind in (_DATA, _MESSAGES):
        listener.set_handler(kind, arrived)

    def leave() -> None:
        streams.close()
        listener.close()
        wires.close()

    return Session(
        engine,
        table.rank,
        table.peers,
        table.entries[table.rank].cores,
        _window(table),
        hosts=table.hosts,
        streams=streams,
        leave=leave,
        why=table.why,
        lanes=lambda: f"{lanes}{rails}{wires.words}",
        listener=listener,
        note=int(options.rank == 0 and options.tuned),
        tcp=wires.tcp and _leaves_machine(table),
    )


def _leaves_machine(table: RankTable) -> bool:
    """Whether any rank is on another machine; emulated hosts are on one."""
    hosts = {Address.parse(entry.address).host for entry in table.entries}
    return not all(map(_is_here, hosts))


def _is_here(host: str) -> bool:
    address = Address(host, 0)
    return address.is_number() and by_loopback(*address.resolve()[0])


def _window(table: RankTable) -> int:
    """Equal on all ranks, as it cuts messages into pieces.

    Several network cards end a piece at different times, and the next piece may depend
    on its end: larger ones wait less.
    """
    return _WINDOW * (4 if any(entry.rails for entry in table.entries) else 1)


def _engine(table: RankTable, options: ConnectOptions, limit_s: float) -> Engine:
    """The engine of this rank: shared memory within its host, lifelines between."""
    rank, n, here = table.rank, len(table.entries), table.local()
    first = table.entries[here[0]]
    found, pids = shm.connect_local(
        here.index(rank),
        len(here),
        f"{options.job}/{first.identity}/{first.pid}/{options.epoch}",
        version=options.version,
        timeout_s=options.timeout_s,
        lost=options.lost,
    )
    ends, known = [-1] * n, [-1] * n
    for place, world_rank in enumerate(here):
        known[world_rank] = pids[place]
        if place in found:
            ends[world_rank] = found[place].detach()
    engine = _native.Engine.between_processes(rank, ends, known)
    connections = [table.lifelines.get(r) for r in range(n)]
    engine.connect_lifeline(
        [None if c is None else c.take_wire() for c in connections],
        [b"" if c is None else c.send_key for c in connections],
        [b"" if c is None else c.receive_key for c in connections],
        options.epoch,
        int(limit_s * 1e8),
        int(limit_s * 1e9),
    )
    table.listener.set_liveness(lambda peer: "it has died" if engine.dead(peer) else "")
    return engine


def tune_socket(sock: socket.socket, limit_s: float, *, sends: bool) -> None:
    """Set the buffers of a stream, and when it ends.

    A near peer gets buffers of a fixed size, if the system allows it; for a far one the
    kernel chooses.

    A connection ends not before the lifelines have had their limit, and soon after if
    only these two ranks cannot reach each other. What was lost is sent again every
    second at least, so that a healed connection goes on at once.

    The kernel ends it so at the receiving end. At the sending end it would also end the
    connection of a receiver that is well but reads nothing for long: there the limits
    of the keepalive hold as native/net/socket_wire.cpp understands them.
    """
    unread_s = _LONGEST_UNREAD_S if sends else 2 * limit_s + 1
    for option, value in (
        (socket.TCP_USER_TIMEOUT, int(unread_s * 1e3)),
        (socket.TCP_KEEPIDLE, max(1, int(limit_s))),
        (socket.TCP_KEEPINTVL, 1),
        (socket.TCP_KEEPCNT, max(1, int(limit_s) + 1)),
        (_RTO_MAX_MS, 1000),
    ):
        with suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    with suppress(OSError):
        if _is_near(sock) and _largest_buffer() >= _NEAR_BUFFER:
            for each in _BUFFERS:
                sock.setsockopt(socket.SOL_SOCKET, each, _NEAR_BUFFER)


def _is_near(sock: socket.socket) -> bool:
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    (round_trip_us,) = struct.unpack_from("I", info, _INFO_BYTES - 4)
    return bool(round_trip_us < _NEAR_S * 1e6)


@cache
def _largest_buffer() -> int:
    """How many bytes a process of this system gets, if it asks for those of near peers.

    A kernel gives less without a word, and such a buffer no longer grows: the usual
    208 KiB are far worse than what it chooses by itself.
    """
    with socket.socket() as probe:
        for each in _BUFFERS:
            probe.setsockopt(socket.SOL_SOCKET, each, _NEAR_BUFFER)
        given = [probe.getsockopt(socket.SOL_SOCKET, each) for each in _BUFFERS]
    return min(given) // 2  # the kernel doubles it for its own records


def _purpose(label: StreamLabel) -> Purpose:
    """A stream's label as it travels in the handshake."""
    kind = _MESSAGES if label.messages else _DATA
    lanes = label.lanes | label.takes_free_lane << 15
    return Purpose(kind, label.agreed, lanes << 16 | label.lane)


def _label(purpose: Purpose) -> StreamLabel:
    """The label that the other end has sent."""
    return StreamLabel(
        purpose.communicator,
        purpose.stream & 0xFFFF,
        max(1, purpose.stream >> 16 & 0x7FFF),
        purpose.kind == _MESSAGES,
        bool(purpose.stream >> 31),
    )
