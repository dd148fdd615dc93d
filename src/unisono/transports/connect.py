"""Connecting to another rank, with retries until the deadline.

A rank may not listen yet, or another process may listen at its address: rank 0 of the
run before, or a listener with so many pending connections that it closed ours, too. So
a failure is not final at once. A connection that is refused by the kernel is tried
again until the deadline; one that is closed without an answer, or by a rank of another
job, for a few seconds, since waiting seldom helps there and a wrong secret should be
reported soon. A rank that is an epoch behind is tried until the deadline: it will
follow.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from unisono import _native
from unisono.errors import ConnectFailed, NotAuthentic, PeerLost, TransportError
from unisono.transports import tls
from unisono.transports.addresses import (
    Address,
    SocketAddress,
    by_loopback,
    refuse_open,
)
from unisono.transports.deadline import LOOK_S
from unisono.transports.handshake import (
    HANDSHAKE_S,
    Authenticated,
    HandshakeResult,
    Identity,
    Purpose,
    Refused,
    offer,
)

if TYPE_CHECKING:
    from unisono._native import Tls, Wire

REFUSED_S = 5.0
"""How long to retry with a rank that refuses."""

_NO_ROOM = "this process or host is short of file descriptors (ulimit -n)"
_NO_MEMORY = "the kernel of this host is short of memory for sockets"
_NO_WAY = "no route leads there: is it the address of the right network?"
_HINTS: dict[int | None, str] = {
    errno.EMFILE: _NO_ROOM,
    errno.ENFILE: _NO_ROOM,
    errno.ENOBUFS: _NO_MEMORY,
    errno.ENOMEM: _NO_MEMORY,
    errno.EADDRNOTAVAIL: "this host has no free port left",
    errno.EACCES: "a firewall of this host forbids it",
    errno.EPERM: "a firewall of this host forbids it",
    errno.EAFNOSUPPORT: "this host has no such kind of network: IPv4 or IPv6?",
    errno.ENETUNREACH: _NO_WAY,
    errno.EHOSTUNREACH: _NO_WAY,
}
"""What to look at, by the error of the last attempt. All are tried again: each may be
temporary."""

_CONNECT_S = 3.0  # one attempt: lost packets have been sent again twice by then
_PAUSE_S = 0.2
_BIND_ADDRESS_NO_PORT = 24  # IP_BIND_ADDRESS_NO_PORT of Linux


_UNPACED = b"reno"
"""The congestion control that every Linux has and lets every process choose."""


@dataclass(frozen=True)
class Source:
    """The address of this host that a connection begins at.

    With a `card` nothing is sent but by this one, whatever the routes of the kernel.
    """

    host: str
    card: str = ""


class Way(Protocol):
    """From an address of this host to one of another."""

    @property
    def source(self) -> Source:
        """Where it begins."""
        ...

    @property
    def to(self) -> Address:
        """Where it leads."""
        ...


@dataclass(frozen=True)
class Connection:
    """An authenticated connection to another rank.

    It blocks and sends at once (TCP_NODELAY). The keys are for this connection alone.
    What goes over it is encrypted by `tls`, unless that is None.
    """

    peer: int
    purpose: Purpose
    socket: socket.socket
    send_key: bytes = field(repr=False)
    receive_key: bytes = field(repr=False)
    tls: Tls | None = field(default=None, repr=False)

    def send(self, raw: bytes, *, timeout_s: float) -> None:
        """Send; OSError if it cannot be done in time."""
        if self.tls is not None:
            until = time.monotonic() + timeout_s
            tls.send_all(self.socket, self.tls, raw, until=until)
            return
        self.socket.settimeout(max(0.001, timeout_s))
        self.socket.sendall(raw)

    def receive(self, most: int, *, timeout_s: float) -> bytes:
        """Some bytes, or none if the peer has closed; OSError, or Corrupted."""
        if self.tls is not None:
            until = time.monotonic() + timeout_s
            return tls.receive(self.socket, self.tls, most, until=until)
        self.socket.settimeout(timeout_s)
        return self.socket.recv(most)

    def can_be_read(self) -> bool:
        """Whether something has come, or the end."""
        poll = select.poll()  # unlike select(), whatever the number of the descriptor
        poll.register(self.socket, select.POLLIN)
        held = self.tls is not None and self.tls.has_pending()
        return held or bool(poll.poll(0))

    def take_wire(self) -> Wire:
        """Hand the socket over to native code, as a wire; nothing is left here."""
        if self.tls is not None:
            return _native.TlsWire(self.socket.detach(), self.tls)
        return _native.SocketWire(self.socket.detach())

    def close(self) -> None:
        """Close it."""
        self.socket.close()


def connection_over(
    sock: socket.socket, authenticated: Authenticated, encrypted: Tls | None = None
) -> Connection:
    """The connection after its handshake."""
    sock.settimeout(None)
    with contextlib.suppress(OSError):  # closed already: its user will see
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Connection(
        authenticated.peer,
        authenticated.purpose,
        sock,
        authenticated.send_key,
        authenticated.receive_key,
        encrypted,
    )


def connected_over(
    sock: socket.socket,
    authenticated: Authenticated,
    *,
    timeout_s: float,
    look: Callable[[], object] = lambda: None,
) -> Connection:
    """The same on the client's side, after the handshake of TLS if it is wanted."""
    if not authenticated.tls_key:
        return connection_over(sock, authenticated)
    opened = tls.client_handshake(
        sock, authenticated.tls_key, timeout_s=timeout_s, look=look
    )
    return connection_over(sock, authenticated, opened)


def connect_to(
    address: Address,
    me: Identity,
    peer: int,
    purpose: Purpose,
    *,
    timeout_s: float,
    lost: Callable[[], str] = str,
    source: Source | None = None,
) -> Connection:
    """Connect to `peer` at `address`, trying until the deadline.

    `lost` returns why the peer need not be tried any more, or "". Raises
    ConnectFailed, NotAuthentic or PeerLost with the peer, its address and the cause.
    The connection begins at `source`, if that is given.
    """
    attempts = _Connecting(address, me, peer, purpose, timeout_s, lost, source)
    return attempts.until_done()


class _Connecting:
    """One call of `connect_to`, over its attempts."""

    def __init__(
        self,
        address: Address,
        me: Identity,
        peer: int,
        purpose: Purpose,
        timeout_s: float,
        lost: Callable[[], str],
        source: Source | None,
    ) -> None:
        self.source = source
        self.address, self.me, self.peer, self.purpose = address, me, peer, purpose
        self.timeout_s, self.lost = timeout_s, lost
        self.deadline = self.refused_until = time.monotonic() + timeout_s
        self.was_refused = False
        self.refusal: TransportError | None = None
        begin = f" from {source.host}" if source else ""
        self.where = (
            f"rank {me.rank} cannot connect{begin} to rank {peer} at {address}, for "
            f"{purpose}"
        )

    def until_done(self) -> Connection:
        """Attempts with pauses between; then raise why the last one failed.

        Or the refusal of an earlier one, which says more than that the last one timed
        out.
        """
        pause = 0.002
        while True:
            try:
                return self._attempt()
            except (NotAuthentic, Refused) as why:
                self._consider_refusal(why)
            except (OSError, ConnectFailed) as why:
                if time.monotonic() + pause >= self.deadline:
                    if self.refusal is not None:
                        raise self._in_context(self.refusal) from why
                    raise self._failed(why) from why
            time.sleep(pause)
            pause = min(2 * pause, _PAUSE_S)
            self._look()

    def _look(self) -> None:
        """Raise PeerLost if the peer need not be tried any more."""
        why_lost = self.lost()
        if why_lost:
            raise PeerLost(f"{self.where}: {why_lost}", ranks=[self.peer])

    def _consider_refusal(self, why: TransportError) -> None:
        """Return if a peer that refused is to be tried again; else raise."""
        self.refusal = why
        now = time.monotonic()
        behind = (
            isinstance(why, Refused)
            and why.result == HandshakeResult.OTHER_EPOCH
            and why.epoch < self.me.epoch
        )
        if isinstance(why, Refused) and why.result == HandshakeResult.OTHER_TLS:
            self.was_refused, self.refused_until = True, now  # this does not change
        if not behind and not self.was_refused:
            self.was_refused = True
            self.refused_until = min(self.deadline, now + REFUSED_S)
        if now < (self.deadline if behind else self.refused_until):
            return
        raise self._in_context(why) from None

    def _in_context(self, why: TransportError) -> TransportError:
        message = f"{self.where}: {why}"
        if isinstance(why, Refused):
            return Refused(message, result=why.result, epoch=why.epoch)
        return NotAuthentic(message)

    def _failed(self, why: Exception) -> ConnectFailed:
        hint = _HINTS.get(
            getattr(why, "errno", None),
            "is it running, and is a firewall in between?",
        )
        return ConnectFailed(
            f"{self.where}: {_cause(why)}; tried for {self.timeout_s:g} s: {hint}",
            missing=[self.peer],
        )

    def _attempt(self) -> Connection:
        return try_all(
            self.address,
            self.me,
            self.peer,
            self.purpose,
            self._at_most,
            self._look,
            self.source,
        )

    def _at_most(self, seconds: float) -> float:
        return max(0.001, min(seconds, self.deadline - time.monotonic()))


Limit = Callable[[float], float]
"""The time that is left for something that may take so many seconds at most."""


def try_all(
    address: Address,
    me: Identity,
    peer: int,
    purpose: Purpose,
    limit: Limit,
    look: Callable[[], None] = lambda: None,
    source: Source | None = None,
) -> Connection:
    """Connect to `peer` at the first address of a name where it is.

    A name may have several: of both families, of several interfaces, some of them of
    another host. If the peer is at none, the error names all that were tried. It is
    Refused if one with this secret gave a reason; ConnectionRefusedError only if no
    process listens at any; NotAuthentic only if all closed the connection. `look` is
    called while the kernel connects and while an answer is awaited, and raises if there
    will be none.
    """
    tried: list[tuple[str, OSError | NotAuthentic | Refused]] = []
    for family, where in address.resolve():
        try:
            return _connect(family, where, me, peer, purpose, limit, look, source)
        except (OSError, NotAuthentic, Refused) as why:
            tried.append((str(where[0]), why))
    raise _of_all(tried)


def _of_all(
    tried: Sequence[tuple[str, OSError | NotAuthentic | Refused]],
) -> OSError | NotAuthentic | Refused:
    """The error of an attempt at several addresses: the one that says most."""
    if len(tried) == 1:
        return tried[0][1]
    message = "; ".join(f"{host}: {_cause(why)}" for host, why in tried)
    errors = [why for _, why in tried]
    for why in errors:
        if isinstance(why, Refused):
            return Refused(message, result=why.result, epoch=why.epoch)
    systems = [why for why in errors if isinstance(why, OSError)]
    if not systems:
        return NotAuthentic(message)
    if all(isinstance(why, ConnectionRefusedError) for why in errors):
        return ConnectionRefusedError(message)
    unclear = [why for why in systems if not isinstance(why, ConnectionRefusedError)]
    return (
        OSError(unclear[0].errno, message)
        if unclear
        else ConnectionAbortedError(message)
    )


def _cause(why: Exception) -> str:
    return getattr(why, "strerror", None) or str(why)


def _connect(
    family: int,
    where: SocketAddress,
    me: Identity,
    peer: int,
    purpose: Purpose,
    limit: Limit,
    look: Callable[[], None],
    source: Source | None,
) -> Connection:
    refuse_open(str(where[0]), me.secret)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if source is not None:
            _begin_at(sock, family, source)
        if by_loopback(family, where):
            _do_not_pace(sock)
        _reach(sock, where, limit(_CONNECT_S), look)
        # If no process listens, the kernel may choose that very port for this end.
        if sock.getsockname() == sock.getpeername():
            raise ConnectionRefusedError("no process listens there")
        authenticated = offer(
            sock, me, peer, purpose, timeout_s=limit(HANDSHAKE_S), look=look
        )
        timeout_s = limit(HANDSHAKE_S)
        return connected_over(sock, authenticated, timeout_s=timeout_s, look=look)
    except BaseException:
        sock.close()
        raise


def _reach(
    sock: socket.socket,
    where: SocketAddress,
    timeout_s: float,
    look: Callable[[], None],
) -> None:
    """Have the kernel connect, and look meanwhile; OSError if it cannot, or in time.

    Where nothing answers, not even with a refusal, this takes all of the time.
    """
    until = time.monotonic() + timeout_s
    sock.setblocking(False)
    try:
        sock.connect(where)
        return
    except OSError as why:
        # After a signal, too, the kernel goes on by itself.
        if why.errno not in (errno.EINPROGRESS, errno.EINTR):
            raise
    poll = select.poll()  # unlike select(), whatever the number of the descriptor
    poll.register(sock, select.POLLOUT)
    while not poll.poll(1e3 * min(LOOK_S, max(0.0, until - time.monotonic()))):
        look()
        if time.monotonic() >= until:
            raise TimeoutError("timed out")
    error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if error:
        raise OSError(error, os.strerror(error))


def _do_not_pace(sock: socket.socket) -> None:
    """Choose a congestion control without timers, before the socket connects.

    Within a machine there is no congestion. Where BBR is the usual one, it would send
    by a timer, and a socket that it had once does so ever after, whatever its
    congestion control.
    """
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _UNPACED)


def _begin_at(sock: socket.socket, family: int, source: Source) -> None:
    """Bind a socket to an address of this host, and to a card if one is given."""
    if source.card:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, source.card.encode())
    own_family, where = Address(source.host, 0).resolve()[0]
    if own_family != family:
        raise OSError(errno.EAFNOSUPPORT, "one is an IPv4 address, the other IPv6")
    # The port is chosen when both ends are known, so it may be in use towards others.
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_IP, _BIND_ADDRESS_NO_PORT, 1)
    sock.bind(where)
