"""The port at which a rank accepts connections, for as long as it lives.

    listener = Listener(Address("10.0.3.4", 0), Identity(secret, job, rank))
    listener.add_addresses(peers)                            after the rendezvous
    connection = listener.connect(3, data_purpose(comm))     one of two ranks connects,
    connection = listener.expect(2, data_purpose(comm))      the other expects it

Both are called when a connection is first needed. A thread accepts, and runs the
server's half of all handshakes at once, never waiting for one of them: a client that
sends nothing, or slowly, delays no other. An authenticated connection is kept until it
is expected.

A pending connection, which is not authenticated yet, costs little: there are at most 64
at once, for 10 seconds each, and no more bytes are read than a handshake has. If one
more comes, one is rejected: of the sender with most of them, the oldest that has not
sent an offer, after a grace period; until then the new one stays in the kernel's queue.
So a whole cluster can connect at once, a sender that floods the port displaces its own
connections, and a rank that was displaced connects again by itself. Rejections are
logged once a second, at most.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from unisono.errors import BadArgument, ConnectFailed, NotAuthentic, PeerLost
from unisono.service_threads import ServiceThread
from unisono.transports.addresses import Address, listen
from unisono.transports.connect import (
    Connection,
    Way,
    connect_to,
    connection_over,
)
from unisono.transports.handshake import (
    HANDSHAKE_S,
    RENDEZVOUS,
    HandshakeResult,
    Identity,
    Purpose,
    ServerHandshake,
)
from unisono.transports.pending import PendingConnection, RejectionLog, first_to_reject

MOST_PENDING = 64
TIMEOUT_S = 60.0
Handler = Callable[[Connection], None]

_ACCEPTS = 16  # in a row, before pending connections are read again
_PORT_ATTEMPTS = 8
_GRACE_S = 0.05  # before a pending connection may be displaced
_PAUSE_S = 0.1  # when the process has no descriptor left to accept


class Listener:
    """The port of one rank, and the connections made through it.

    `address` is where it listens, `rejected` how many connections were rejected, and
    `tls_mismatch` says which rank differs in its use of TLS, if one does.
    """

    def __init__(
        self,
        address: Address,
        me: Identity,
        *,
        others: Sequence[str] = (),
        handshake_s: float = HANDSHAKE_S,
    ) -> None:
        """Listen at `address`, any free port if it is 0; ConnectFailed if taken.

        `others` are more addresses of this host, at the same port.
        """
        self.me = me
        self._sockets = _listen_at(address, others, me)
        port = self._sockets[0].getsockname()[1]
        self.address = Address(address.host, port)
        self.rejected = 0
        self.tls_mismatch = ""
        self._handshake_s = handshake_s
        self._rejection_log = RejectionLog(f"rank {me.rank} at {self.address}")
        self._peers: dict[int, Address] = {}
        self._lost: dict[int, str] = {}
        self._gone: Callable[[int], str] = lambda peer: ""
        self._arrived: list[Connection] = []
        self._handlers: dict[str, Handler] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._pending: list[PendingConnection] = []
        self._pause_until = 0.0
        self._pause_for_room = False
        self._selector = selectors.DefaultSelector()
        for sock in self._sockets:
            self._selector.register(sock, selectors.EVENT_READ)
        self._wake_reader, self._waker = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._thread = ServiceThread(
            target=self._serve, name="unisono-listener", daemon=True
        )
        self._thread.start()
        _OPEN.add(self)

    def __repr__(self) -> str:
        """Who listens where."""
        state = ", closed" if self._closed else ""
        return f"Listener(rank {self.me.rank} at {self.address}{state})"

    def __enter__(self) -> Listener:
        """The same."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close."""
        self.close()

    def add_addresses(self, peers: Mapping[int, Address]) -> None:
        """Add the addresses at which other ranks listen."""
        self._peers.update(peers)

    def address_of(self, peer: int) -> Address:
        """Where another rank listens."""
        if peer not in self._peers:
            raise BadArgument(f"rank {peer}: its address is not known yet")
        return self._peers[peer]

    def mark_lost(self, peer: int, why: str) -> None:
        """End every wait for this rank, now and later: it has died or left."""
        with self._changed:
            self._lost[peer] = why
            self._changed.notify_all()

    def enter_epoch(self, epoch: int) -> None:
        """Continue in another epoch of the job; ranks of other epochs are refused."""
        with self._changed:
            self.me = replace(self.me, epoch=epoch)
            for connection in self._arrived:
                connection.close()
            self._arrived.clear()

    def set_liveness(self, gone: Callable[[int], str]) -> None:
        """`gone` returns why a rank need not be tried any more; "" while it lives."""
        self._gone = gone

    def connect(
        self,
        peer: int,
        purpose: Purpose,
        timeout_s: float = TIMEOUT_S,
        lost: Callable[[], str] = str,
        *,
        over: Way | None = None,
    ) -> Connection:
        """Connect to a rank; `lost` returns why not to try any more, or "".

        `over` is which way, if not to the address where it listens first.
        """
        return connect_to(
            over.to if over else self.address_of(peer),
            self.me,
            peer,
            purpose,
            timeout_s=timeout_s,
            lost=lambda: self._lost.get(peer, "") or self._gone(peer) or lost(),
            source=over.source if over else None,
        )

    def expect(
        self, peer: int, purpose: Purpose, timeout_s: float = TIMEOUT_S
    ) -> Connection:
        """Wait for the connection that a rank makes for this purpose."""
        where = (
            f"rank {self.me.rank} expects rank {peer} at {self.address}, for {purpose}"
        )

        def fits(one: Connection) -> bool:
            return one.peer == peer and one.purpose == purpose

        found = self._claim(fits, timeout_s, peer)
        if not found and peer in self._lost:
            raise PeerLost(f"{where}: {self._lost[peer]}", ranks=[peer])
        if not found:
            raise ConnectFailed(
                f"{where}: it did not connect within {timeout_s:g} s"
                f"{self.rejections()}",
                missing=[peer],
            )
        for older in found[:-1]:  # attempts that the peer has abandoned
            older.close()
        return found[-1]

    def next_of(self, *kinds: str, timeout_s: float) -> list[Connection]:
        """Connections of these kinds, of any ranks, in the order of their arrival.

        None at the deadline, or on a `tls_mismatch`.
        """
        return self._claim(lambda one: one.purpose.kind in kinds, timeout_s)

    def set_handler(self, kind: str, handler: Handler) -> None:
        """From now on pass connections of a kind to `handler`, as they come.

        It is called on the thread that accepts, and must not wait.
        """
        with self._changed:
            self._handlers[kind] = handler
            early = [one for one in self._arrived if one.purpose.kind == kind]
            self._arrived = [one for one in self._arrived if one not in early]
        for one in early:
            self._hand(one, handler)

    def rejections(self) -> str:
        """For errors: how many were rejected, in brackets; or ""."""
        if not self.rejected:
            return ""
        return f" ({self.rejected} rejected, the last {self._rejection_log.last})"

    def close(self) -> None:
        """Stop listening, close connections that were not claimed, end all waits."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        self._waker.send(b"!")
        self._thread.join()
        self._drop_everything()
        _OPEN.discard(self)  # until then a forked child has sockets of it to close

    def _claim(
        self,
        fits: Callable[[Connection], bool],
        timeout_s: float,
        peer: int | None = None,
    ) -> list[Connection]:
        """Take out what fits as soon as there is any; nothing at the deadline."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                found = [one for one in self._arrived if fits(one)]
                left = deadline - time.monotonic()
                if found or left <= 0 or peer in self._lost:
                    break
                if peer is None and self.tls_mismatch:
                    break
                if self._closed:
                    raise ConnectFailed(
                        f"rank {self.me.rank} has closed its listener at "
                        f"{self.address}: no rank can connect any more"
                    )
                self._changed.wait(left)
            self._arrived = [one for one in self._arrived if not fits(one)]
            return found

    # --- the thread

    def _serve(self) -> None:
        while not self._closed:
            ready = self._selector.select(self._until_next())
            for key, _ in ready:
                if isinstance(key.data, PendingConnection):
                    self._attend(key.data)
            # After the pending ones, which new ones may displace.
            found = [key.fileobj for key, _ in ready]
            for sock in self._sockets:
                if sock in found and not self._pause_until:
                    self._accept(sock)
            self._expire()

    def _attend(self, one: PendingConnection) -> None:
        """Read from it; this thread goes on whatever happens, or none could connect."""
        try:
            self._handle(one)
        except Exception as why:
            if one in self._pending:
                self._reject(one, f"{type(why).__name__}: {why}")

    def _until_next(self) -> float | None:
        """Seconds until something is due by the clock."""
        due = [one.arrived + self._handshake_s for one in self._pending]
        if self._pause_until:
            due.append(self._pause_until)
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _accept(self, server: socket.socket) -> None:
        for _ in range(_ACCEPTS):
            if len(self._pending) >= MOST_PENDING and not self._make_room():
                return
            try:
                sock, where = server.accept()
            except BlockingIOError:
                return
            except ConnectionError:
                continue  # gone again already
            except OSError as why:
                # Out of descriptors: the listener would be ready again at once.
                self._count_rejection("a client", f"no room for it: {why.strerror}")
                self._pause(time.monotonic() + _PAUSE_S, for_room=False)
                return
            sock.setblocking(False)
            one = PendingConnection(
                sock, str(where[0]), ServerHandshake(self.me), time.monotonic()
            )
            try:
                self._selector.register(sock, selectors.EVENT_READ, one)
            except OSError as why:  # the kernel's limit of what may be waited for
                sock.close()
                self._count_rejection(one.sender, f"no room for it: {why.strerror}")
                return
            self._pending.append(one)

    def _make_room(self) -> bool:
        """Reject one; or pause, if even that one has just arrived."""
        goes = first_to_reject(self._pending)
        if goes.arrived + _GRACE_S > time.monotonic():
            self._pause(goes.arrived + _GRACE_S, for_room=True)
            return False
        self._reject(goes, "too many at once")
        return True

    def _pause(self, until: float, *, for_room: bool) -> None:
        """Leave new connections in the kernel's queue for a while."""
        for sock in self._sockets:
            self._selector.unregister(sock)
        self._pause_until, self._pause_for_room = until, for_room

    def _resume(self) -> None:
        self._pause_until = 0.0
        for sock in self._sockets:
            self._selector.register(sock, selectors.EVENT_READ)

    def _handle(self, one: PendingConnection) -> None:
        try:
            awaited = one.read()
        except (BlockingIOError, InterruptedError):
            return
        except (OSError, NotAuthentic) as why:
            self._reject(one, getattr(why, "strerror", None) or str(why))
            return
        handshake = one.handshake
        if awaited:
            self._selector.modify(one.socket, awaited, one)
        elif handshake.refusal is not None:
            self._reject(one, str(handshake.refusal))
            offered = handshake.offered
            at_rendezvous = offered is not None and offered.purpose == RENDEZVOUS
            if at_rendezvous and handshake.refusal.result == HandshakeResult.OTHER_TLS:
                with self._changed:
                    self.tls_mismatch = str(handshake.refusal)
                    self._changed.notify_all()
        elif handshake.authenticated is not None:
            self._forget(one)
            self._admit(
                connection_over(one.socket, handshake.authenticated, one.tls),
                handshake.me,
            )

    def _admit(self, connection: Connection, accepted_as: Identity) -> None:
        with self._changed:
            if accepted_as is not self.me:  # the epoch has changed meanwhile
                connection.close()
                return
            handler = self._handlers.get(connection.purpose.kind)
            if handler is None:
                self._arrived.append(connection)
                self._changed.notify_all()
        if handler is not None:
            self._hand(connection, handler)

    def _hand(self, connection: Connection, handler: Handler) -> None:
        """What it raises ends this connection and no other."""
        try:
            handler(connection)
        except Exception as why:
            connection.close()
            what = f"for {connection.purpose}: {type(why).__name__}: {why}"
            self._count_rejection(f"rank {connection.peer}", what)

    def _expire(self) -> None:
        now = time.monotonic()
        for one in [o for o in self._pending if o.arrived <= now - self._handshake_s]:
            self._reject(one, "it took too long")
        room = self._pause_for_room and len(self._pending) < MOST_PENDING
        if self._pause_until and (room or self._pause_until <= now):
            self._resume()

    def _reject(self, one: PendingConnection, why: str) -> None:
        self._forget(one)
        self._count_rejection(one.sender, why)
        one.socket.close()

    def _count_rejection(self, sender: str, why: str) -> None:
        self.rejected += 1
        self._rejection_log.add(f"from {sender}: {why}")

    def _forget(self, one: PendingConnection) -> None:
        self._selector.unregister(one.socket)
        self._pending.remove(one)

    def _drop_everything(self) -> None:
        """Close the descriptors; no shutdown, since a forked process may have them."""
        self._selector.close()
        held = [one.socket for one in self._pending]
        held += [one.socket for one in self._arrived]
        for sock in [*self._sockets, self._wake_reader, self._waker, *held]:
            sock.close()
        self._pending.clear()
        self._arrived.clear()


def _listen_at(
    address: Address, others: Sequence[str], me: Identity
) -> list[socket.socket]:
    """Sockets that listen at one port of several addresses.

    Of port 0 the kernel makes one that is free at the first address. It may be taken at
    another: then there is a next attempt.
    """
    for _ in range(_PORT_ATTEMPTS - 1 if others and not address.port else 0):
        try:
            return _listen_once(address, others, me)
        except ConnectFailed as why:
            if getattr(why.__cause__, "errno", None) != errno.EADDRINUSE:
                raise
    return _listen_once(address, others, me)


def _listen_once(
    address: Address, others: Sequence[str], me: Identity
) -> list[socket.socket]:
    who = f"rank {me.rank}"
    made = [listen(address, me.secret, who=who)]
    try:
        port = made[0].getsockname()[1]
        for each in (Address(host, port) for host in others):
            made += [listen(each, me.secret, who=who)]
    except BaseException:
        for sock in made:
            sock.close()
        raise
    return made


_OPEN: weakref.WeakSet[Listener] = weakref.WeakSet()


def _after_fork() -> None:
    """Close the parent's sockets in a forked child.

    Else the other ranks would not see the parent's end while the child lives.
    """
    for listener in list(_OPEN):
        listener._closed = True
        listener._changed = threading.Condition()  # another thread may have held it
        with contextlib.suppress(OSError):
            listener._drop_everything()
    _OPEN.clear()


os.register_at_fork(after_in_child=_after_fork)
