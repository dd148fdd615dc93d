"""The proxy's thread: one event loop over all connections.

Others ask for changes by `do`, which has the thread make them between two turns and
returns when they are made. So nothing here needs a lock, and a rule that was set is in
force for every byte that comes later.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from unisono.errors import UsageError
from unisono.testing._streams import FaultRules, ProxyStream

T = TypeVar("T")

_BUFFER = 1 << 18
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER of 0 s: close sends RST
_CALL_S = 30.0
_LATER = (BlockingIOError, InterruptedError)


@dataclass(frozen=True)
class ProxyEvent:
    """A fault that was injected: when, into which connection, and at which byte."""

    at_s: float
    connection: int
    direction: str
    what: str
    offset: int


@dataclass
class ProxyConnection:
    """A client's connection, and its connection to the target."""

    number: int
    dialer: socket.socket
    target: socket.socket
    streams: dict[str, ProxyStream]


class Relay:
    """Connections, the fault rules of both directions, and the thread."""

    def __init__(self, target: tuple[str, int] | None, listen: str, seed: int) -> None:
        """Listen at once, on a free port."""
        self.target = target
        self.refuses = False
        self.rules = {"forth": FaultRules(), "back": FaultRules()}
        self.open_connections: list[ProxyConnection] = []
        self.log: list[ProxyEvent] = []
        self.connections = 0
        self._seed = seed
        self._closed = False
        self._ended = {"forth": 0, "back": 0}  # bytes of connections that are no more
        self._asked: deque[Callable[[], None]] = deque()
        self._asking = threading.Lock()  # held to ask or to close, not by the thread
        self._buffer = memoryview(bytearray(_BUFFER))
        family = _family(listen)
        self._door = socket.create_server((listen, 0), family=family, backlog=512)
        self._door.setblocking(False)
        self.port: int = self._door.getsockname()[1]
        self._awake, self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._watched: dict[socket.socket, int] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._awake, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="proxy", daemon=True)
        self._thread.start()

    def do(self, what: Callable[[], T]) -> T:
        """Run a function in the thread, and wait for it."""
        result: Future[T] = Future()

        def answer() -> None:
            try:
                result.set_result(what())
            except BaseException as error:
                result.set_exception(error)

        with self._asking:
            if self._closed:
                raise UsageError("the proxy is closed; make another one")
            self._asked.append(answer)
            self._ring()
        return result.result(_CALL_S)

    def close(self) -> None:
        """Reset all connections and stop listening."""
        with self._asking:
            if self._closed:
                return
            self._closed = True
            self._ring()
            self._thread.join()
            os.close(self._wake)
            os.close(self._awake)

    def _ring(self) -> None:
        """Wake the thread; the pipe is open, since whoever closes it has the lock."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake, b"\0")

    def nbytes(self) -> dict[str, int]:
        """Bytes forwarded in each direction."""
        return {
            direction: before
            + sum(
                connection.streams[direction].sent
                for connection in self.open_connections
            )
            for direction, before in self._ended.items()
        }

    def finish(self, connection: ProxyConnection, why: str = "") -> None:
        """End a connection: by RST if there is a reason, or else as both ends did."""
        self.open_connections.remove(connection)
        for direction, stream in connection.streams.items():
            self._ended[direction] += stream.sent
            if why:
                self.note(connection.number, direction, why, stream.taken)
        for end in (connection.dialer, connection.target):
            self._forget(end)
            if why:
                _reset(end)
            end.close()

    def note(self, number: int, direction: str, what: str, offset: int) -> None:
        """Add an event to the log."""
        self.log.append(ProxyEvent(time.monotonic(), number, direction, what, offset))

    # --- the thread

    def _serve(self) -> None:
        try:
            while not self._closed:
                self._turn()
        finally:
            self._answer_all()
            for connection in list(self.open_connections):
                self.finish(connection, "close")
            self._door.close()
            self._selector.close()

    def _turn(self) -> None:
        now = time.monotonic()
        self._watch(now)
        for key, events in self._selector.select(self._longest_sleep(now)):
            if key.fd == self._awake:
                os.read(self._awake, 4096)
            elif key.fileobj is self._door:
                self._accept()
            elif key.data in self.open_connections:  # not ended by an earlier event
                with self._ending(key.data):
                    self._handle(key.data, key.fileobj, events)
        self._answer_all()
        now = time.monotonic()
        for connection in list(self.open_connections):
            self._send_on(connection, now)

    def _answer_all(self) -> None:
        while self._asked:
            self._asked.popleft()()

    def _send_on(self, connection: ProxyConnection, now: float) -> None:
        with self._ending(connection):
            for stream in connection.streams.values():
                if stream.waits_until(now) <= now:
                    stream.leave(now)
            if all(stream.finished for stream in connection.streams.values()):
                self.finish(connection)

    def _watch(self, now: float) -> None:
        """Update the selector."""
        wanted: dict[socket.socket, int] = {}
        owners: dict[socket.socket, ProxyConnection] = {}
        if self.target is not None or self.refuses:
            wanted[self._door] = selectors.EVENT_READ
        for connection in self.open_connections:
            for stream in connection.streams.values():
                for end, event in _wishes(stream, now):
                    wanted[end] = wanted.get(end, 0) | event
                    owners[end] = connection
        for end in self._watched.keys() - wanted.keys():
            self._forget(end)
        for end, events in wanted.items():
            if end not in self._watched:
                self._selector.register(end, events, owners.get(end))
            elif events != self._watched[end]:
                self._selector.modify(end, events, owners.get(end))
        self._watched = wanted

    def _forget(self, end: socket.socket) -> None:
        if self._watched.pop(end, 0):
            self._selector.unregister(end)

    def _longest_sleep(self, now: float) -> float | None:
        """Until the next delayed or throttled byte is due."""
        streams = [
            s
            for connection in self.open_connections
            for s in connection.streams.values()
        ]
        untils = [stream.waits_until(now) for stream in streams]
        return min((u - now for u in untils if now < u < math.inf), default=None)

    def _accept(self) -> None:
        """Accept a connection, and connect to the target."""
        try:
            dialer, _ = self._door.accept()
        except OSError:  # the client is gone already
            return
        self.connections += 1
        number = self.connections
        if self.refuses or self.target is None:
            self.note(number, "forth", "refuse", 0)
            _reset(dialer)
            dialer.close()
            return
        target = socket.socket(_family(self.target[0]), socket.SOCK_STREAM)
        for end in (dialer, target):
            end.setblocking(False)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        forth = self._stream(number, "forth", dialer, target)
        back = self._stream(number, "back", target, dialer)
        forth.connected = False
        connection = ProxyConnection(
            number, dialer, target, {"forth": forth, "back": back}
        )
        self.open_connections.append(connection)
        with self._ending(connection), contextlib.suppress(*_LATER):
            target.connect(self.target)

    def _stream(
        self, number: int, direction: str, source: socket.socket, sink: socket.socket
    ) -> ProxyStream:
        seed = f"{self._seed} {number} {direction}"
        note = partial(self.note, number, direction)
        return ProxyStream(source, sink, self.rules[direction], seed, note)

    def _handle(self, connection: ProxyConnection, end: object, events: int) -> None:
        """Handle events of one end."""
        forth, back = connection.streams["forth"], connection.streams["back"]
        if end is connection.target and not forth.connected:
            number = connection.target.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if number:
                raise OSError(number, os.strerror(number))
            forth.connected = True
        elif events & selectors.EVENT_READ:
            stream = forth if end is connection.dialer else back
            if stream.wants_to_read:
                with contextlib.suppress(*_LATER):
                    stream.take(self._buffer)

    @contextlib.contextmanager
    def _ending(self, connection: ProxyConnection) -> Iterator[None]:
        """If one end fails, close the other in the same way."""
        try:
            yield
        except OSError:
            self.finish(connection, "lost")


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _wishes(stream: ProxyStream, now: float) -> Iterator[tuple[socket.socket, int]]:
    if stream.wants_to_read:
        yield stream.source, selectors.EVENT_READ
    if not stream.connected or stream.waits_until(now) <= now:
        yield stream.sink, selectors.EVENT_WRITE


def _reset(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
