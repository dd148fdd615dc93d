"""How processes join a job: the endpoint of rank 0, and the process that connects.

Rank 0 opens the endpoint while the job grows. On one host it is an abstract Unix socket
named by the job; across hosts it is the job's address, where rank 0 authenticates the
process. A process that joins knows neither its rank nor the job's epoch. It takes a
number that no rank has, and if the job is in another epoch than it has assumed, it
connects again with that one.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from collections import deque
from collections.abc import Iterator, Sequence

import msgspec

from unisono.errors import ConnectFailed
from unisono.transports.addresses import Address, chosen_address
from unisono.transports.connect import Connection
from unisono.transports.endpoints import (
    ControlLink,
    LocalLink,
    RemoteLink,
    connect_once,
)
from unisono.transports.handshake import HandshakeResult, Identity, Purpose, Refused
from unisono.transports.listener import Listener
from unisono.transports.secret import Secret
from unisono.transports.unix import abstract, is_ours, readable, seqpacket

_JOIN = Purpose("join")
_NO_RANK = 1 << 31
_AGAIN_S = 0.05
_TICK_S = 0.05
_MOST_RANKS = 1 << 20


class Joining(msgspec.Struct, frozen=True, array_like=True):
    """What a joining process sends first."""

    version: str
    pid: int
    host: str


class Welcome(msgspec.Struct, frozen=True, array_like=True):
    """Its rank in the next world, or what is wrong; `dead` is for ranks alone.

    `before` is how many ranks there were; joining processes follow them.
    """

    rank: int = 0
    world_size: int = 0
    epoch: int = 0
    place: str = ""
    wrong: str = ""
    dead: tuple[int, ...] = ()
    before: int = 0

    def is_valid(self) -> bool:
        """Whether these numbers are possible."""
        return (
            0 < self.before < self.world_size <= _MOST_RANKS
            and (self.rank == 0 or self.before <= self.rank < self.world_size)
            and 0 <= self.epoch < 1 << 31
        )


class JoinEndpoint:
    """Open while the job grows."""

    def __init__(
        self, unix_socket: socket.socket | None, listener: Listener | None
    ) -> None:
        """One of the two; `open_local` and `open_remote` make them."""
        self._socket, self._listener = unix_socket, listener
        self._owns_listener = False
        self._arrived: deque[Connection] = deque()
        if listener is not None:
            listener.set_handler(_JOIN.kind, self._arrived.append)

    @classmethod
    def open_local(cls, job: str) -> JoinEndpoint:
        """On one host."""
        listener = seqpacket()
        try:
            listener.bind(abstract(f"{job}/join"))
            listener.listen(1024)
            listener.setblocking(False)
        except OSError as why:
            listener.close()
            raise ConnectFailed(
                f"grow: rank 0 cannot listen for processes: {why.strerror}; is another "
                "world of the same job growing on this host?"
            ) from why
        return cls(listener, None)

    @classmethod
    def open_remote(
        cls, address: str, me: Identity, listeners: Sequence[Listener]
    ) -> JoinEndpoint:
        """Across hosts; one of these listeners may be at the address already."""
        given = Address.parse(address)
        choice = chosen_address(given)
        place = Address(choice.bind or choice.host, given.port)
        for one in listeners:
            if one.address == place:
                return cls(None, one)
        try:
            endpoint = cls(None, Listener(place, me, others=choice.others))
        except ConnectFailed as why:
            raise ConnectFailed(
                f"grow: processes join at {address}, the address of the job, where "
                f"rank 0, now on {socket.gethostname()}, cannot listen: {why}. Call "
                "grow(address=host:port) with an address of rank 0's host, and start "
                "the processes with the same as UNISONO_ADDRESS"
            ) from why
        endpoint._owns_listener = True
        return endpoint

    def newcomers(self) -> list[tuple[ControlLink, Joining]]:
        """Processes that have connected since the last call; waits a moment."""
        found: list[tuple[ControlLink, Joining]] = []
        for link in self._arrivals():
            hello = link.receive(Joining)
            if hello is None:
                link.close()
            else:
                found.append((link, hello))
        return found

    def _arrivals(self) -> Iterator[ControlLink]:
        if self._socket is None:
            time.sleep(_TICK_S)
            while self._arrived:
                yield RemoteLink(self._arrived.popleft())
            return
        readable([self._socket], _TICK_S)
        with contextlib.suppress(OSError):  # no more
            while True:
                end, _ = self._socket.accept()
                if is_ours(end):
                    yield LocalLink(-1, end)
                else:
                    end.close()  # another user's: no answer

    def close(self) -> None:
        """Close it; processes that were not answered connect again."""
        if self._socket is not None:
            self._socket.close()
        if self._listener is not None and self._owns_listener:
            self._listener.close()
        elif self._listener is not None:
            self._listener.set_handler(_JOIN.kind, Connection.close)
        for connection in self._arrived:
            connection.close()


class Joiner:
    """A process that joins a job."""

    def __init__(
        self, job: str, address: str, secret: Secret | None, tls: bool = False
    ) -> None:
        """Across hosts there are an address and a secret."""
        self._job, self._address, self._secret = job, address, secret
        self._tls = tls
        self._epoch = 0
        self.trouble = ""
        """What last went wrong, in brackets, for errors."""
        self._rank = _NO_RANK | secrets.randbits(31)

    def ask(self, hello: Joining, until: float) -> Welcome | None:
        """Connect once, and wait for an answer; None if there is none."""
        try:
            link = self._connect()
        except Refused:  # by a rank with this secret: final
            raise
        except (OSError, ConnectFailed) as why:  # the latter if the name is unknown
            self.trouble = f" ({getattr(why, 'strerror', None) or why})"
            time.sleep(min(_AGAIN_S, max(0.0, until - time.monotonic())))
            return None
        try:
            link.send(hello)
            left = max(0.0, until - time.monotonic())
            readable([link], left)
            welcome = link.receive(Welcome) if time.monotonic() < until else None
        finally:
            link.close()
        if welcome is None:
            time.sleep(min(_AGAIN_S, max(0.0, until - time.monotonic())))
        return welcome

    def _connect(self) -> ControlLink:
        if self._secret is not None:
            return self._connect_remote(self._secret)
        end = seqpacket()
        try:
            end.connect(abstract(f"{self._job}/join"))
            if not is_ours(end):
                raise ConnectionRefusedError("another user's")
        except BaseException:
            end.close()
            raise
        return LocalLink(0, end)

    def _connect_remote(self, secret: Secret) -> ControlLink:
        me = Identity(secret, self._job, self._rank, self._epoch, self._tls)
        try:
            return connect_once(Address.parse(self._address), me, 0, _JOIN)
        except Refused as why:
            if why.result == HandshakeResult.OTHER_EPOCH:
                self._epoch = why.epoch
            elif why.result != HandshakeResult.OTHER_RANK:
                raise
            raise ConnectionAbortedError(str(why)) from why
