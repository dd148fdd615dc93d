"""Connecting to another rank, and going on trying until the deadline.

A rank may be dialed before it listens, or while another listens in its place: a rank 0
of the run before that is just ending, or a reception so crowded with strangers that it
closed on us too. So nothing is final at once. A connection that is refused is tried
again until the deadline; one that is closed without a word, or by a rank that says it
is of another job, for a few seconds, since there waiting seldom helps and a wrong
secret should be known soon. Only a rank that is an epoch behind is waited for to the
end: it will follow.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from unisono import _native
from unisono.errors import ConnectFailed, NotAuthentic, PeerLost, TransportError
from unisono.transports import tls
from unisono.transports.addresses import Address, SocketAddress, refuse_open
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

DOUBT_S = 5.0
"""How long one who turns us away is asked again."""

_NO_ROOM = "this process or host is short of file descriptors (ulimit -n)"
_NO_MEMORY = "the kernel of this host is short of memory for sockets"
_NO_WAY = "no route leads there: is it the address of the right network?"
_HINTS: dict[int | None, str] = {
    errno.EMFILE: _NO_ROOM,
    errno.ENFILE: _NO_ROOM,
    errno.ENOBUFS: _NO_MEMORY,
    errno.ENOMEM: _NO_MEMORY,
    errno.EADDRNOTAVAIL: "this host has no free port left to dial from",
    errno.EACCES: "a firewall of this host forbids it",
    errno.EPERM: "a firewall of this host forbids it",
    errno.EAFNOSUPPORT: "this host has no such kind of network: IPv4 or IPv6?",
    errno.ENETUNREACH: _NO_WAY,
    errno.EHOSTUNREACH: _NO_WAY,
}
"""What to look at, by the error of the last attempt. All are tried again meanwhile:
each can pass."""

_CONNECT_S = 3.0  # one attempt: lost packets have been sent again twice by then
_PAUSE_S = 0.2


@dataclass(frozen=True)
class Connection:
    """A socket to another rank that both have proven to be theirs.

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
        """Some bytes, or none if the other has closed; OSError, or Corrupted."""
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
        """End it; the other reads the end of it."""
        self.socket.close()


def connection_over(
    sock: socket.socket, authenticated: Authenticated, encrypted: Tls | None = None
) -> Connection:
    """The connection that a handshake has left."""
    sock.settimeout(None)
    with contextlib.suppress(OSError):  # gone already: found out by whoever uses it
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Connection(
        *(authenticated.peer, authenticated.purpose, sock),
        *(authenticated.send_key, authenticated.receive_key, encrypted),
    )


def connected_over(
    sock: socket.socket, authenticated: Authenticated, *, timeout_s: float
) -> Connection:
    """The same at the dialer's end: where TLS is wanted, it is opened first."""
    if not authenticated.tls_key:
        return connection_over(sock, authenticated)
    opened = tls.connected(sock, authenticated.tls_key, timeout_s=timeout_s)
    return connection_over(sock, authenticated, opened)


def connect_to(
    address: Address,
    me: Identity,
    peer: int,
    purpose: Purpose,
    *,
    timeout_s: float,
    lost: Callable[[], str] = str,
) -> Connection:
    """Connect to `peer` at `address`, trying until the deadline.

    `lost` says why the peer need not be tried any more, or nothing. Raises
    ConnectFailed, NotAuthentic or PeerLost with the peer, its address and the cause.
    """
    return _Connecting(address, me, peer, purpose, timeout_s, lost).until_done()


class _Connecting:
    """One call, over its attempts."""

    def __init__(
        self,
        address: Address,
        me: Identity,
        peer: int,
        purpose: Purpose,
        timeout_s: float,
        lost: Callable[[], str],
    ) -> None:
        self.address, self.me, self.peer, self.purpose = address, me, peer, purpose
        self.timeout_s, self.lost = timeout_s, lost
        self.deadline = self.doubt = time.monotonic() + timeout_s
        self.doubts = False
        self.refusal: TransportError | None = None
        self.where = f"rank {me.rank} dials rank {peer} at {address}, for {purpose}"

    def until_done(self) -> Connection:
        """Attempts with pauses between; then the last one's failure is raised.

        Or why it was turned away before, which tells more than that there was no time
        left to be turned away once more.
        """
        pause = 0.002
        while True:
            try:
                return self._attempt()
            except (NotAuthentic, Refused) as why:
                self._weigh(why)
            except (OSError, ConnectFailed) as why:
                if time.monotonic() + pause >= self.deadline:
                    if self.refusal is not None:
                        raise self._told(self.refusal) from why
                    raise self._failed(why) from why
            time.sleep(pause)
            pause = min(2 * pause, _PAUSE_S)
            self._look()

    def _look(self) -> None:
        """Whether it is still worth trying."""
        why_lost = self.lost()
        if why_lost:
            raise PeerLost(f"{self.where}: {why_lost}", ranks=[self.peer])

    def _weigh(self, why: TransportError) -> None:
        """Whether one who turned us away is asked again."""
        self.refusal = why
        now = time.monotonic()
        behind = (
            isinstance(why, Refused)
            and why.result == HandshakeResult.OTHER_EPOCH
            and why.epoch < self.me.epoch
        )
        if isinstance(why, Refused) and why.result == HandshakeResult.OTHER_TLS:
            self.doubts, self.doubt = True, now  # it knows, and will not wait for us
        if not behind and not self.doubts:
            self.doubts, self.doubt = True, min(self.deadline, now + DOUBT_S)
        if now < (self.deadline if behind else self.doubt):
            return
        raise self._told(why) from None

    def _told(self, why: TransportError) -> TransportError:
        told = f"{self.where}: {why}"
        if isinstance(why, Refused):
            return Refused(told, result=why.result, epoch=why.epoch)
        return NotAuthentic(told)

    def _failed(self, why: Exception) -> ConnectFailed:
        hint = _HINTS.get(
            getattr(why, "errno", None),
            "does it run, and does a firewall stand between?",
        )
        return ConnectFailed(
            f"{self.where}: {_cause(why)}; tried for {self.timeout_s:g} s: {hint}",
            missing=[self.peer],
        )

    def _attempt(self) -> Connection:
        return try_all(
            self.address, self.me, self.peer, self.purpose, self._at_most, self._look
        )

    def _at_most(self, seconds: float) -> float:
        return max(0.001, min(seconds, self.deadline - time.monotonic()))


Limit = Callable[[float], float]
"""How long something may take that should take so many seconds at most."""


def try_all(
    address: Address,
    me: Identity,
    peer: int,
    purpose: Purpose,
    limit: Limit,
    look: Callable[[], None] = lambda: None,
) -> Connection:
    """Connect to `peer` at the first address of a name where it is.

    A name may stand for several: of both families, of several interfaces, some of them
    another host's. If the peer is at none, the error names all that were tried. It is
    Refused if somewhere one of this secret said why; ConnectionRefusedError only if at
    all of them nobody listened; NotAuthentic only if all closed on us. `look` is called
    while an answer is awaited, and raises if that is in vain.
    """
    tried: list[tuple[str, OSError | NotAuthentic | Refused]] = []
    for family, where in address.resolve():
        try:
            return _connect(family, where, me, peer, purpose, limit, look)
        except (OSError, NotAuthentic, Refused) as why:
            tried.append((str(where[0]), why))
    raise _of_all(tried)


def _of_all(
    tried: Sequence[tuple[str, OSError | NotAuthentic | Refused]],
) -> OSError | NotAuthentic | Refused:
    """What became of an attempt at several addresses: the error that tells most."""
    if len(tried) == 1:
        return tried[0][1]
    told = "; ".join(f"{host}: {_cause(why)}" for host, why in tried)
    errors = [why for _, why in tried]
    for why in errors:
        if isinstance(why, Refused):
            return Refused(told, result=why.result, epoch=why.epoch)
    systems = [why for why in errors if isinstance(why, OSError)]
    if not systems:
        return NotAuthentic(told)
    if all(isinstance(why, ConnectionRefusedError) for why in errors):
        return ConnectionRefusedError(told)
    unclear = [why for why in systems if not isinstance(why, ConnectionRefusedError)]
    return OSError(unclear[0].errno, told) if unclear else ConnectionAbortedError(told)


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
) -> Connection:
    refuse_open(str(where[0]), me.secret)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.settimeout(limit(_CONNECT_S))
        sock.connect(where)
        # Where nobody listens, the kernel may give us the very port we dial.
        if sock.getsockname() == sock.getpeername():
            raise ConnectionRefusedError("nobody listens there")
        authenticated = offer(
            sock, me, peer, purpose, timeout_s=limit(HANDSHAKE_S), look=look
        )
        return connected_over(sock, authenticated, timeout_s=limit(HANDSHAKE_S))
    except BaseException:
        sock.close()
        raise
