"""Where a rank takes connections: its own port, for as long as it lives.

    reception = Reception(Address("10.0.3.4", 0), Member(secret, job, rank))
    reception.know(peers)                          once the ranks have met
    connection = reception.dial(3, data(comm))     one of two ranks dials,
    connection = reception.expect(2, data(comm))   the other expects

Both are called when a connection is first needed. A thread accepts, and acts out the
answering half of the handshake with everybody at once, never waiting for one of them:
strangers that send nothing, or slowly, hold up nobody. Who has authenticated waits
until it is expected.

A stranger costs little: at most 64 of them are there at once, for 10 seconds each, and
no more is read of them than a handshake is long. If one more comes, one goes: of the
sender with most of them, the oldest that has shown nothing, as soon as it has had time
for a word; until then the newcomer waits at the door. So a whole cluster can come at
once, whoever floods the port drives out its own, and a rank that was driven out with
them comes again by itself. Of those turned away the log tells once a second, at most.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from unisono.errors import BadArgument, ConnectFailed, NotAuthentic, PeerLost
from unisono.transports.addresses import Address, listen
from unisono.transports.connect import Connection, connect_to, connection_over
from unisono.transports.handshake import (
    HANDSHAKE_S,
    RENDEZVOUS,
    Answering,
    HandshakeResult,
    Identity,
    Purpose,
)
from unisono.transports.pending import PendingConnection, RejectionLog, first_to_reject

MOST_PENDING = 64
TIMEOUT_S = 60.0
Handler = Callable[[Connection], None]

_ACCEPTS = 16  # in a row, before those who are here are heard again
_GRACE_S = 0.05  # what everybody has before it must make room for a newcomer
_PAUSE_S = 0.1  # when the process has no descriptor left for a newcomer


class Listener:
    """The port of one rank, and the connections made through it.

    `address` is where it is, `turned_away` how many came who did not belong, `differs`
    which rank we cannot meet, and why.
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
        self._listeners = _listen_at(address, others, me)
        port = self._listeners[0].getsockname()[1]
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
        for listener in self._listeners:
            self._selector.register(listener, selectors.EVENT_READ)
        self._wake_reader, self._waker = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._thread = threading.Thread(
            target=self._serve, name="unisono-reception", daemon=True
        )
        self._thread.start()
        _OPEN.add(self)

    def __repr__(self) -> str:
        """Who listens where."""
        state = ", closed" if self._closed else ""
        return f"Reception(rank {self.me.rank} at {self.address}{state})"

    def __enter__(self) -> Listener:
        """The same."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close."""
        self.close()

    def add_addresses(self, peers: Mapping[int, Address]) -> None:
        """Learn where other ranks are."""
        self._peers.update(peers)

    def address_of(self, peer: int) -> Address:
        """Where another rank takes connections."""
        if peer not in self._peers:
            raise BadArgument(f"rank {peer}: its address is not known yet")
        return self._peers[peer]

    def mark_lost(self, peer: int, why: str) -> None:
        """End every wait for this rank, now and later: it is known to be gone."""
        with self._changed:
            self._lost[peer] = why
            self._changed.notify_all()

    def enter_epoch(self, epoch: int) -> None:
        """Go on in another epoch of the job: who is in the one before is refused."""
        with self._changed:
            self.me = replace(self.me, epoch=epoch)
            for connection in self._arrived:
                connection.close()
            self._arrived.clear()

    def set_liveness(self, gone: Callable[[int], str]) -> None:
        """Ask `gone` why a rank need not be tried any more; nothing while it lives."""
        self._gone = gone

    def connect(
        self,
        peer: int,
        purpose: Purpose,
        timeout_s: float = TIMEOUT_S,
        lost: Callable[[], str] = str,
    ) -> Connection:
        """Connect to a rank that expects it; `lost` says why it need not be tried."""
        return connect_to(
            self.address_of(peer),
            self.me,
            peer,
            purpose,
            timeout_s=timeout_s,
            lost=lambda: self._lost.get(peer, "") or self._gone(peer) or lost(),
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
        for older in found[:-1]:  # attempts that the other has given up
            older.close()
        return found[-1]

    def next_of(self, *kinds: str, timeout_s: float) -> list[Connection]:
        """Those of any ranks that have come for these purposes, in their order.

        None at the deadline, or when one has come who `differs`.
        """
        return self._claim(lambda one: one.purpose.kind in kinds, timeout_s)

    def set_handler(self, kind: str, handler: Handler) -> None:
        """From now on give connections for a purpose to `handler`, as they come.

        It is called on the thread that accepts, and must not wait.
        """
        with self._changed:
            self._handlers[kind] = handler
            early = [one for one in self._arrived if one.purpose.kind == kind]
            self._arrived = [one for one in self._arrived if one not in early]
        for one in early:
            self._hand(one, handler)

    def rejections(self) -> str:
        """For errors: who was turned away, in brackets, or nothing."""
        if not self.rejected:
            return ""
        return f" ({self.rejected} turned away, the last {self._rejection_log.last})"

    def close(self) -> None:
        """Stop listening, and close what nobody has asked for; ends every wait."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        _OPEN.discard(self)
        self._waker.send(b"!")
        self._thread.join()
        self._drop_everything()

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
                        f"rank {self.me.rank} has closed its reception at "
                        f"{self.address}: nobody can come any more"
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
            # After those who are here: newcomers may take their place.
            found = [key.fileobj for key, _ in ready]
            for listener in self._listeners:
                if listener in found and not self._pause_until:
                    self._accept(listener)
            self._expire()

    def _attend(self, one: PendingConnection) -> None:
        """Hear it; whatever happens this thread goes on, or nobody could come."""
        try:
            self._handle(one)
        except Exception as why:
            if one in self._pending:
                self._reject(one, f"{type(why).__name__}: {why}")

    def _until_next(self) -> float | None:
        """Seconds until something is due by the clock."""
        due = [one.came + self._handshake_s for one in self._pending]
        if self._pause_until:
            due.append(self._pause_until)
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPTS):
            if len(self._pending) >= MOST_PENDING and not self._make_room():
                return
            try:
                sock, where = listener.accept()
            except BlockingIOError:
                return
            except ConnectionError:
                continue  # gone again already
            except OSError as why:
                # Out of descriptors: the listener would be ready again at once.
                self._count_rejection("somebody", f"no room for it: {why.strerror}")
                self._pause(time.monotonic() + _PAUSE_S, for_room=False)
                return
            sock.setblocking(False)
            one = PendingConnection(
                sock, str(where[0]), Answering(self.me), time.monotonic()
            )
            try:
                self._selector.register(sock, selectors.EVENT_READ, one)
            except OSError as why:  # the kernel's limit of what may be waited for
                sock.close()
                self._count_rejection(one.sender, f"no room for it: {why.strerror}")
                return
            self._pending.append(one)

    def _make_room(self) -> bool:
        """Turn one away, or if even that one has just come, pause."""
        goes = first_to_reject(self._pending)
        if goes.came + _GRACE_S > time.monotonic():
            self._pause(goes.came + _GRACE_S, for_room=True)
            return False
        self._reject(goes, "too many at once")
        return True

    def _pause(self, until: float, *, for_room: bool) -> None:
        """Leave newcomers to the kernel for a while: it holds them in its queue."""
        for listener in self._listeners:
            self._selector.unregister(listener)
        self._pause_until, self._pause_for_room = until, for_room

    def _resume(self) -> None:
        self._pause_until = 0.0
        for listener in self._listeners:
            self._selector.register(listener, selectors.EVENT_READ)

    def _handle(self, one: PendingConnection) -> None:
        try:
            awaited = one.read()
        except (BlockingIOError, InterruptedError):
            return
        except (OSError, NotAuthentic) as why:
            self._reject(one, getattr(why, "strerror", None) or str(why))
            return
        rules = one.rules
        if awaited:
            self._selector.modify(one.socket, awaited, one)
        elif rules.refusal is not None:
            self._reject(one, str(rules.refusal))
            meets = rules.offered is not None and rules.offered.purpose == RENDEZVOUS
            if meets and rules.refusal.result == HandshakeResult.OTHER_TLS:
                with self._changed:
                    self.tls_mismatch = str(rules.refusal)
                    self._changed.notify_all()
        elif rules.authenticated is not None:
            self._forget(one)
            self._admit(
                connection_over(one.socket, rules.authenticated, one.tls), rules.me
            )

    def _admit(self, connection: Connection, welcomed_by: Identity) -> None:
        with self._changed:
            if welcomed_by is not self.me:  # the epoch has changed meanwhile
                connection.close()
                return
            handler = self._handlers.get(connection.purpose.kind)
            if handler is None:
                self._arrived.append(connection)
                self._changed.notify_all()
        if handler is not None:
            self._hand(connection, handler)

    def _hand(self, connection: Connection, handler: Handler) -> None:
        """Whatever it raises ends this connection and nothing else."""
        try:
            handler(connection)
        except Exception as why:
            connection.close()
            what = f"for {connection.purpose}: {type(why).__name__}: {why}"
            self._count_rejection(f"rank {connection.peer}", what)

    def _expire(self) -> None:
        now = time.monotonic()
        for one in [o for o in self._pending if o.came <= now - self._handshake_s]:
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
        self._rejection_log.note(f"from {sender}: {why}")

    def _forget(self, one: PendingConnection) -> None:
        self._selector.unregister(one.socket)
        self._pending.remove(one)

    def _drop_everything(self) -> None:
        """Close what is ours; no more than that, for a fork may have it too."""
        self._selector.close()
        held = [one.socket for one in self._pending]
        held += [one.socket for one in self._arrived]
        for sock in [*self._listeners, self._wake_reader, self._waker, *held]:
            sock.close()
        self._pending.clear()
        self._arrived.clear()


def _listen_at(
    address: Address, others: Sequence[str], me: Identity
) -> list[socket.socket]:
    """Sockets that listen at one port of several addresses."""
    who = f"rank {me.rank}"
    made = [listen(address, me.secret, who=who)]
    try:
        port = made[0].getsockname()[1]
        for each in (Address(host, port) for host in others):
            made += [listen(each, me.secret, who=who)]
    except BaseException:
        for listener in made:
            listener.close()
        raise
    return made


_OPEN: weakref.WeakSet[Listener] = weakref.WeakSet()


def _after_fork() -> None:
    """A forked child has no part in this: it must not keep the parent's sockets open.

    Else nobody would notice the parent's end while the child lives.
    """
    for listener in list(_OPEN):
        listener._closed = True
        listener._changed = threading.Condition()  # somebody may have held it
        with contextlib.suppress(OSError):
            listener._drop_everything()
    _OPEN.clear()


os.register_at_fork(after_in_child=_after_fork)
