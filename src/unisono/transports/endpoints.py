"""Endpoints at which the ranks of a failed world connect, to agree on who is left.

    endpoint = open_shrink_endpoint(session, job, epoch)
    link = endpoint.connect(2)      ConnectionRefusedError: its endpoint is not open
    link.send(message); link.receive(Message)
    endpoint.arrivals()             links of ranks that have connected here

On one host an endpoint is an abstract Unix socket, named by job, epoch, rank and
process. The kernel says which process connects, and of which user; only those of the
failed world are accepted. It is open from when its rank begins to agree. Across hosts
it is the rank's listener, which is open as long as the world: every connection is
authenticated as any other.

In both cases a rank whose endpoint is closed has left for good: a rank that went on
without others, or cannot know whether it did, keeps it open and answers (`answer`).
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from unisono.errors import ConnectFailed, Corrupted, NotAuthentic
from unisono.service_threads import ServiceThread
from unisono.transports.addresses import Address
from unisono.transports.connect import Connection, try_all
from unisono.transports.control import ControlMessages
from unisono.transports.handshake import Identity, Purpose, Refused
from unisono.transports.listener import Listener
from unisono.transports.session import Session
from unisono.transports.unix import (
    abstract,
    credentials,
    is_ours,
    readable,
    seqpacket,
)

_AGREE = Purpose("agree")
_LONGEST = 1 << 18
_CONNECT_S = 2.0
_T = TypeVar("_T", bound=msgspec.Struct)


class ControlLink(ABC):
    """A connection to another rank, for a few control messages."""

    rank: int
    socket: socket.socket

    @abstractmethod
    def send(self, message: msgspec.Struct) -> None:
        """Send; a later `receive` shows if the peer has closed."""

    @abstractmethod
    def receive(self, kind: type[_T]) -> _T | None:
        """The next message, which has arrived already; None at the end."""

    def fileno(self) -> int:
        """For select."""
        return self.socket.fileno()

    def has_ended(self) -> bool:
        """Whether the peer has closed, and everything has been read."""
        try:  # a socket with a timeout would wait for it, whatever the flags
            if not readable([self.socket], 0.0):
                return False
            return not self.socket.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    def close(self) -> None:
        """Close it."""
        self.socket.close()


class LocalLink(ControlLink):
    """Over a Unix socket, which keeps messages apart."""

    def __init__(self, rank: int, end: socket.socket) -> None:
        """The kernel says which rank the peer is."""
        self.rank, self.socket = rank, end
        end.settimeout(_CONNECT_S)

    def send(self, message: msgspec.Struct) -> None:
        """Send, if the peer is there."""
        with contextlib.suppress(OSError):
            self.socket.send(msgspec.msgpack.encode(message))

    def receive(self, kind: type[_T]) -> _T | None:
        """The next message, or None."""
        try:
            raw = self.socket.recv(_LONGEST)
            return msgspec.msgpack.decode(raw, type=kind) if raw else None
        except (OSError, msgspec.MsgspecError):
            return None


class RemoteLink(ControlLink):
    """Over an authenticated connection."""

    def __init__(self, connection: Connection) -> None:
        """The handshake has proven which rank the peer is."""
        self.rank, self.socket = connection.peer, connection.socket
        self._messages = ControlMessages(connection)

    def send(self, message: msgspec.Struct) -> None:
        """Send, if the peer is there."""
        with contextlib.suppress(OSError):
            self._messages.send(message, timeout_s=_CONNECT_S)

    def receive(self, kind: type[_T]) -> _T | None:
        """The next message, or None."""
        try:
            return self._messages.receive(kind, longest=_LONGEST, timeout_s=_CONNECT_S)
        except (OSError, Corrupted):
            return None


class ShrinkEndpoint(ABC):
    """One rank's endpoint in an agreement. `is_local`: all are on this host."""

    is_local: bool
    listener: Listener | None = None

    @abstractmethod
    def fileno(self) -> int:
        """For select: readable when a rank has connected."""

    @abstractmethod
    def wake(self) -> None:
        """End a wait of `pause_until`, or the next one, on any thread."""

    @abstractmethod
    def connect(
        self, rank: int, look: Callable[[], None] = lambda: None
    ) -> ControlLink:
        """Connect to a rank; ConnectionRefusedError if it has left, or is not there.

        Other errors mean that it cannot be reached now. `look` is called while it
        waits, and may raise.
        """

    @abstractmethod
    def arrivals(self) -> list[ControlLink]:
        """Connections that have arrived since the last call."""

    @abstractmethod
    def answer(self, message: msgspec.Struct) -> None:
        """From now on send this to every rank that connects, until closed."""

    @abstractmethod
    def close(self) -> None:
        """Close it for good."""


def open_shrink_endpoint(session: Session, job: str, epoch: int) -> ShrinkEndpoint:
    """The endpoint of this rank in the world of a session."""
    if session.listener is not None:
        return _RemoteEndpoint(session.listener)
    if session.apart:
        ranks = ", ".join(map(str, session.apart))
        raise ConnectFailed(
            f"ranks {ranks} are in other pid namespaces than rank 0, where process ids "
            "do not identify them; connect the ranks by UNISONO_ADDRESS"
        )
    pids = [peer.pid for peer in session.peers]
    return _LocalEndpoint(f"{job}/{epoch}/agree", session.rank, pids)


class _LocalEndpoint(ShrinkEndpoint):
    is_local = True

    def __init__(self, job: str, rank: int, pids: Sequence[int]) -> None:
        self._names = [abstract(f"{job}/{r}/{pid}") for r, pid in enumerate(pids)]
        self._ranks = {pid: r for r, pid in enumerate(pids)}
        self._listener = seqpacket()
        try:
            self._listener.bind(self._names[rank])
            self._listener.listen(1024)
            self._listener.setblocking(False)
        except OSError as why:
            self._listener.close()
            raise ConnectFailed(
                f"rank {rank} cannot listen for the others: {why.strerror}; another "
                "process of this user has its name: do two jobs have the same name?"
            ) from why
        self._thread: threading.Thread | None = None
        self._closed = False

    def fileno(self) -> int:
        return self._listener.fileno()

    def wake(self) -> None:
        """Nothing waits here while another thread works for it."""

    def connect(
        self, rank: int, look: Callable[[], None] = lambda: None
    ) -> ControlLink:
        end = seqpacket()
        try:
            end.settimeout(_CONNECT_S)
            end.connect(self._names[rank])
            pid = credentials(end)[0]
            if self._ranks.get(pid) != rank or not is_ours(end):
                raise ConnectionRefusedError(f"process {pid} is not rank {rank}")
        except BaseException:
            end.close()
            raise
        return LocalLink(rank, end)

    def arrivals(self) -> list[ControlLink]:
        found: list[ControlLink] = []
        while True:
            try:
                end, _ = self._listener.accept()
            except OSError:  # no more
                return found
            rank = self._ranks.get(credentials(end)[0])
            # Not of this world, or another user's with the process id of a rank that
            # has ended: no answer.
            if rank is None or not is_ours(end):
                end.close()
            else:
                found.append(LocalLink(rank, end))

    def answer(self, message: msgspec.Struct) -> None:
        def serve() -> None:
            while not self._closed:
                with contextlib.suppress(OSError, ValueError):
                    readable([self._listener], 0.5)
                    for link in [] if self._closed else self.arrivals():
                        link.send(message)
                        link.close()

        self._thread = ServiceThread(target=serve, name="unisono-endpoint", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):  # wakes the thread that answers
            self._listener.shutdown(socket.SHUT_RDWR)
        if self._thread is not None:
            self._thread.join()
        self._listener.close()


class _RemoteEndpoint(ShrinkEndpoint):
    is_local = False
    listener: Listener

    def __init__(self, listener: Listener) -> None:
        self.listener = listener
        self._arrived: deque[Connection] = deque()
        self._wake_reader, self._waker = socket.socketpair()
        self._wake_reader.setblocking(False)
        # Connections arrive on the listener's thread, also while this ends.
        self._guard = threading.Lock()
        self._late: Callable[[Connection], None] | None = None
        listener.set_handler(_AGREE.kind, self._arrive)

    def _arrive(self, connection: Connection) -> None:
        with self._guard:
            late = self._late
            if late is None:
                self._arrived.append(connection)
                self._wake()
        if late is not None:
            late(connection)

    def _finish(self, late: Callable[[Connection], None]) -> None:
        """What has arrived and what arrives from now on is handed to `late`."""
        with self._guard:
            self._late = late
            waiting = list(self._arrived)
            self._arrived.clear()
            self._wake_reader.close()
            self._waker.close()
        for connection in waiting:
            late(connection)

    def fileno(self) -> int:
        return self._wake_reader.fileno()

    def wake(self) -> None:
        with self._guard:
            self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full, or closed
            self._waker.send(b"!", socket.MSG_DONTWAIT)

    def connect(
        self, rank: int, look: Callable[[], None] = lambda: None
    ) -> ControlLink:
        where = self.listener.address_of(rank)
        try:
            return connect_once(where, self.listener.me, rank, _AGREE, look)
        except Refused as why:  # another process has this port now
            raise ConnectionRefusedError(str(why)) from why
        except ConnectFailed as why:  # its name cannot be resolved now
            raise OSError(str(why)) from why

    def arrivals(self) -> list[ControlLink]:
        with contextlib.suppress(OSError):
            self._wake_reader.recv(4096)
        return [RemoteLink(self._arrived.popleft()) for _ in range(len(self._arrived))]

    def answer(self, message: msgspec.Struct) -> None:
        def tell(connection: Connection) -> None:
            link = RemoteLink(connection)
            try:
                link.send(message)
            finally:
                link.close()

        self.listener.set_handler(_AGREE.kind, tell)
        self._finish(tell)

    def close(self) -> None:
        self.listener.close()
        self._finish(lambda connection: connection.close())


def connect_once(
    address: Address,
    me: Identity,
    peer: int,
    purpose: Purpose,
    look: Callable[[], None] = lambda: None,
) -> ControlLink:
    """Try once to connect to a rank across hosts, at each address of its name.

    ConnectionRefusedError if no process listens at any of them, Refused if one with
    this secret refuses with a reason, another OSError if neither is known. `look` as in
    `try_all`.
    """
    try:
        connection = try_all(
            address, me, peer, purpose, lambda most: min(most, _CONNECT_S), look
        )
    except NotAuthentic as why:  # perhaps it has too many pending
        raise ConnectionAbortedError(str(why)) from why
    return RemoteLink(connection)


def pause_until(
    endpoint: ShrinkEndpoint, links: Sequence[ControlLink], until: float
) -> list[ControlLink]:
    """Wait for a connection or a message; the links that can be read."""
    left = max(0.0, until - time.monotonic())
    ready = readable([endpoint, *links], left)
    return [one for one in links if one.fileno() in ready]
