"""How the processes of one host find each other.

Rank 0 is the server: it listens at an abstract Unix socket whose name is derived from
the job and the user; the name is in no file system and ends with its process. The
kernel says who connects: a process of another user is rejected, and the process ids in
errors are the kernel's. Ranks may be in different pid namespaces, as containers of a
pod are: an id of one then means nothing in the other, so it is only a name, and only
the end of a rank's socket shows its death. When all have connected, rank 0 makes a pair
of connected sockets for every two ranks, passes the ends to them, and stops listening.
Over these pairs ranks pass each other the descriptors of shared memory.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from unisono.errors import ConnectFailed, NotAuthentic
from unisono.transports.limits import are_used_up, too_few_descriptors
from unisono.transports.unix import (
    abstract,
    credentials,
    readable,
    seqpacket,
)
from unisono.transports.waiting import noticed, ranks_named

_LONGEST = 1 << 16
_TEMPORARY = (errno.ETOOMANYREFS, errno.ENOBUFS, errno.ENOMEM, errno.EINTR)
_T = TypeVar("_T", bound=msgspec.Struct)


class Hello(msgspec.Struct):
    """What a rank sends first."""

    version: str
    rank: int
    world_size: int
    host: str
    identity: str
    pid: int = 0
    namespace: str = ""


class Answer(msgspec.Struct):
    """The answer of rank 0: the ranks, or why the rendezvous fails.

    `apart` are those whose process ids only they themselves know, since they are in
    other pid namespaces than rank 0.
    """

    peers: list[tuple[int, str]] = []
    wrong: str = ""
    missing: list[int] = []
    apart: list[int] = []
    window: int = 0
    note: int = 0


@dataclass(frozen=True)
class _LocalClient:
    """A rank that has connected; `seen` is its process id as the kernel reports it.

    That is 0, or a number of its own, if it is in another pid namespace.
    """

    connection: socket.socket
    seen: int
    hello: Hello

    def is_apart(self, namespace: str) -> bool:
        """Whether its process ids are not those of this pid namespace."""
        return self.hello.namespace != namespace or self.hello.pid != self.seen


class LocalRendezvous:
    """One rank's part in the rendezvous, until its deadline."""

    def __init__(
        self,
        hello: Hello,
        job: str,
        deadline: float,
        timeout_s: float,
        lost: Callable[[], str] = str,
    ) -> None:
        """Nothing is done yet; `lost` returns why it cannot succeed, once known."""
        self.me = hello
        self.lost = lost
        self.deadline = deadline
        self.timeout_s = timeout_s
        self.address = abstract(job)
        self._limit = f"at most {timeout_s:g} s"

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()

    # --- rank 0

    def serve(self, offer: Answer) -> tuple[dict[int, socket.socket], Answer]:
        """Wait for all others, and connect every two of them."""
        n = self.me.world_size
        clients: dict[int, _LocalClient] = {}

        def missing() -> str:
            absent = ranks_named([r for r in range(1, n) if r not in clients])
            return f"rank 0 waits for {absent} to connect ({self._limit})"

        with seqpacket() as listener:
            self._listen(listener)
            try:
                with noticed(missing):
                    self._gather(listener, clients)
                return self._connect_pairs(clients, offer)
            except (ConnectFailed, OSError) as why:
                self._cancel(clients, why)
                raise
            finally:
                for client in clients.values():
                    client.connection.close()

    def _gather(
        self, listener: socket.socket, clients: dict[int, _LocalClient]
    ) -> None:
        """Wait for all others; `clients` are those that have come."""
        for client in self._clients(listener):
            wrong = self._objection(client.hello, clients)
            if wrong:
                _try_send(client.connection, Answer(wrong=wrong))
                client.connection.close()
                raise ConnectFailed(wrong)
            clients[client.hello.rank] = client
            if len(clients) == self.me.world_size - 1:
                return

    def _cancel(self, clients: Mapping[int, _LocalClient], why: Exception) -> None:
        reason = str(why)
        if isinstance(why, OSError) and are_used_up(why):
            reason = too_few_descriptors(0, self.me.world_size)
        answer = Answer(wrong=reason, missing=list(getattr(why, "missing", ())))
        for client in clients.values():
            _try_send(client.connection, answer)

    def _listen(self, listener: socket.socket) -> None:
        taken = (
            "rank 0 waits for its address: another job of the same name starts on "
            f"this host, or has just ended ({self._limit})"
        )
        busy = False
        with noticed(lambda: taken if busy else ""):
            while True:
                try:
                    listener.bind(self.address)
                    listener.listen(1024)
                    return
                except OSError as why:
                    # The rank 0 of a job just ended, or of another of this name.
                    if self.left <= 0:
                        raise ConnectFailed(
                            f"rank 0 cannot listen for its job: {why.strerror}; "
                            "another job of the same name is starting on this host: "
                            "give it another, as in init(job=...)"
                        ) from why
                    busy = True
                    time.sleep(0.01)

    def _clients(self, listener: socket.socket) -> Iterator[_LocalClient]:
        """Clients as they send their hello; a silent one delays no other."""
        n = self.me.world_size
        if n == 1:
            return
        here: dict[int, socket.socket] = {}
        known = {0}
        while True:
            ready = readable([listener, *here], self._wait())
            if why := self.lost():
                raise ConnectFailed(why)
            if not ready and self.left <= 0:
                missing = [r for r in range(n) if r not in known]
                absent = ranks_named(missing)
                raise ConnectFailed(
                    f"{absent} did not connect within {self.timeout_s:g} s; "
                    f"{n - len(missing)} of {n} did: has every rank been started, "
                    "on this host, with the same job?",
                    missing=missing,
                )
            for fd in ready:
                if fd == listener.fileno():
                    client = self._admit(listener)
                    if client is not None:
                        here[client.fileno()] = client
                else:
                    one = here.pop(fd)
                    hello = _receive(one, Hello)
                    if hello is None:
                        one.close()
                    else:
                        known.add(hello.rank)
                        yield _LocalClient(one, credentials(one)[0], hello)

    def _admit(self, listener: socket.socket) -> socket.socket | None:
        connection, _ = listener.accept()
        if credentials(connection)[1] == os.getuid():
            return connection
        connection.close()  # another user's: no answer
        return None

    def _wait(self) -> float:
        return max(0.0, min(self.left, 1.0 if self.lost is str else 0.05))

    def _objection(self, hello: Hello, clients: Mapping[int, _LocalClient]) -> str:
        mine = self.me
        if hello.version != mine.version:
            return (
                f"rank {hello.rank} runs unisono {hello.version}, rank 0 "
                f"{mine.version}: install the same version for all"
            )
        if hello.world_size != mine.world_size:
            return (
                f"rank {hello.rank} has world size {hello.world_size}, rank 0 has "
                f"{mine.world_size}: start all with the same"
            )
        if not 0 < hello.rank < mine.world_size or hello.rank in clients:
            return f"two processes are rank {hello.rank}"
        if hello.identity != mine.identity:
            return (
                f"rank {hello.rank} is on another host ({hello.host}); "
                "ranks on several hosts need an address, UNISONO_ADDRESS"
            )
        return ""

    def _connect_pairs(
        self, clients: Mapping[int, _LocalClient], offer: Answer
    ) -> tuple[dict[int, socket.socket], Answer]:
        n = self.me.world_size
        apart = [r for r, g in clients.items() if g.is_apart(self.me.namespace)]
        pids = {0: os.getpid(), **{r: g.hello.pid for r, g in clients.items()}}
        hosts = {0: self.me.host, **{r: g.hello.host for r, g in clients.items()}}
        peers = [(pids[r], hosts[r]) for r in range(n)]
        answer = msgspec.structs.replace(offer, peers=peers, apart=sorted(apart))
        for client in clients.values():
            _try_send(client.connection, answer)
        mine: dict[int, socket.socket] = {}
        for one in range(n):
            for other in range(one + 1, n):
                ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                for end, holder, peer in zip(
                    ends, (one, other), (other, one), strict=True
                ):
                    if holder == 0:
                        mine[peer] = end
                    else:
                        self._pass_socket(clients[holder], peer, end)
        return mine, answer

    def _pass_socket(self, client: _LocalClient, peer: int, end: socket.socket) -> None:
        rank, to = client.hello.rank, [peer.to_bytes(4, "little")]
        with end:
            while True:
                try:
                    client.connection.settimeout(max(self.left, 0.001))
                    socket.send_fds(client.connection, to, [end.fileno()])
                    return
                except OSError as why:
                    late = self.left <= 0
                    if late or why.errno not in _TEMPORARY:
                        raise _not_passed(rank, client.hello.pid, why) from why
                time.sleep(0.002)  # until others have received theirs

    # --- the others

    def join(self) -> tuple[dict[int, socket.socket], Answer]:
        """Connect to rank 0, and receive from it one socket for every other rank."""
        no_rank_0 = f"rank {self.me.rank} waits for rank 0 to start ({self._limit})"
        with noticed(lambda: no_rank_0):
            connected = self._connected()
        with connected as connection:
            connection.settimeout(max(self.left, 0.001) + 5.0)
            _try_send(connection, self.me)
            try:
                answer = _receive(connection, Answer)
                if answer is None:
                    raise ConnectFailed(
                        "rank 0 closed the connection: it died, or is of another job",
                        missing=[0],
                    )
                if answer.wrong:
                    raise ConnectFailed(answer.wrong, missing=answer.missing)
                return self._sockets(connection), answer
            except TimeoutError as why:
                raise ConnectFailed(
                    f"rank 0 did not answer within {self.timeout_s:g} s", missing=[0]
                ) from why

    def _sockets(self, connection: socket.socket) -> dict[int, socket.socket]:
        sockets: dict[int, socket.socket] = {}
        while len(sockets) < self.me.world_size - 1:
            data, fds, flags, _ = socket.recv_fds(connection, _LONGEST, 1)
            if flags & socket.MSG_CTRUNC:
                raise ConnectFailed(
                    too_few_descriptors(self.me.rank, self.me.world_size)
                )
            if not fds:
                raise _cancelled(data)
            sockets[int.from_bytes(data, "little")] = socket.socket(fileno=fds[0])
            os.set_inheritable(fds[0], False)
        return sockets

    def _connected(self) -> socket.socket:
        pause = 0.001
        while True:
            connection = seqpacket()
            try:
                connection.connect(self.address)
                break
            except OSError as why:
                connection.close()
                if self.left <= 0:
                    raise ConnectFailed(
                        f"rank {self.me.rank} found no rank 0 within "
                        f"{self.timeout_s:g} s: has it been started, on this host, "
                        "with the same job?",
                        missing=[0],
                    ) from why
            if why_lost := self.lost():
                raise ConnectFailed(why_lost)
            time.sleep(min(pause, max(self.left, 0.0)))
            pause = min(2 * pause, 0.05)
        pid, uid, _ = credentials(connection)
        if uid != os.getuid():
            connection.close()
            raise NotAuthentic(
                f"process {pid} of user {uid} listens at the address of rank 0: "
                "give the job another name, as in init(job=...)"
            )
        return connection


def _not_passed(rank: int, pid: int, why: OSError) -> ConnectFailed:
    """Why a socket could not be passed to a rank."""
    who = f"rank {rank} (pid {pid})"
    if isinstance(why, ConnectionError):
        return ConnectFailed(f"{who} died during the rendezvous", missing=[rank])
    reason = why.strerror or "it does not receive"
    if why.errno == errno.ETOOMANYREFS:
        reason = (
            "more descriptors of this user are in transit than it may have open; "
            "allow more of them (ulimit -n)"
        )
    return ConnectFailed(f"rank 0 cannot pass {who} its sockets: {reason}")


def _cancelled(data: bytes) -> ConnectFailed:
    """Why rank 0 passes no more sockets: its reason, or that it has died."""
    try:
        answer = msgspec.json.decode(data, type=Answer)
        return ConnectFailed(answer.wrong, missing=answer.missing)
    except msgspec.DecodeError:
        return ConnectFailed("rank 0 died during the rendezvous", missing=[0])


def _try_send(connection: socket.socket, message: msgspec.Struct) -> None:
    """Send; if the receiver has died, its missing answer shows it."""
    try:
        connection.sendall(msgspec.json.encode(message))
    except OSError:
        return


def _receive(connection: socket.socket, kind: type[_T]) -> _T | None:
    try:
        raw = connection.recv(_LONGEST)
        return msgspec.json.decode(raw, type=kind) if raw else None
    except (ConnectionError, msgspec.DecodeError):
        return None
