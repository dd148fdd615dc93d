"""The rendezvous of ranks on several hosts, and what each then knows of the others.

Rank 0 is the server: it listens at an address that all ranks know. Each of the others,
the clients, opens a listener of its own, connects to rank 0, authenticates, and sends a
hello: its version, the size of its world, its host, the address of its listener. It
connects once more for its lifeline, which stays: rank 0 has one to every other rank,
and a rank whose lifeline ends has died. When all are connected, rank 0 sends the rank
table to all:

    table = rendezvous(rank, n, job, "10.0.3.1:29500", secret=..., version=...)
    table.hosts                 [0, 0, 1, 1]: the number of each rank's host
    table.local()               the ranks that share memory with this one
    table.lifelines             rank 0: {1: ..., 2: ...}; others: {0: ...}
    table.listener.connect(3, data_purpose(1))    a connection to rank 3, when needed

Control messages (`control`) carry this, after the handshake. If one rank does not fit,
all get the reason, and the rendezvous fails. All listeners stay open afterwards.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence

import msgspec

from unisono.errors import (
    BadArgument,
    ConnectFailed,
    Corrupted,
    PeerLost,
    TransportError,
)
from unisono.transports.addresses import (
    Address,
    Choice,
    choose,
    chosen_address,
    refuse_open,
)
from unisono.transports.connect import Connection, connect_to
from unisono.transports.control import ControlMessages
from unisono.transports.handshake import RENDEZVOUS, Identity, lifeline_purpose
from unisono.transports.listener import Listener
from unisono.transports.rank_table import HOST_ID, RankEntry, RankTable, host_identity
from unisono.transports.secret import Secret, open_secret
from unisono.transports.session import cores_here, refuse_too_many
from unisono.transports.waiting import noticed, ranks_named

_HELLO_LONGEST = 4096
_HELLO_S = 5.0  # an authenticated rank sends its hello at once
_TICK_S = 0.05  # how often to check whether the rendezvous can still succeed
_GRACE_S = 5.0  # for rank 0 to report who is missing


class _Hello(msgspec.Struct):
    """What a rank sends first; `life` is the token of its lifeline, which follows."""

    version: str
    world_size: int
    life: int
    entry: RankEntry


class _Answer(msgspec.Struct):
    """The answer of rank 0: the ranks, or why the rendezvous fails."""

    entries: list[RankEntry] = []
    wrong: str = ""
    missing: list[int] = []


def rendezvous(
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
    fabric: str = "tcp",
    announce: Callable[[Address], None] | None = None,
    lost: Callable[[], str] = str,
) -> RankTable:
    """Find the other ranks of `job`, wherever they are, or say who is missing.

    `address` is where rank 0 listens, as host:port. If the port is 0, rank 0 takes a
    free one, and `announce` is called with it, to pass it on to the others. `interface`
    is what choose() takes. Without a secret only loopback addresses are accepted,
    unless `insecure`. `lost` returns why the rendezvous cannot succeed, once that is
    known. With `tls` all is encrypted, here and later. `fabric` is the name of the
    transport, which all ranks learn.
    """
    refuse_too_many(world_size)
    if not 0 <= rank < world_size:
        raise BadArgument(f"rank = {rank}: expected 0 to {world_size - 1}")
    place = Address.parse(address)
    if rank > 0 and place.port == 0:
        raise BadArgument(f"address = {address}: rank {rank} needs the real port")
    known = secret or open_secret(job, anywhere=insecure)
    if place.is_number():  # said even where there is no route to it
        refuse_open(place.host, known)
    me = Identity(known, job, rank, epoch, tls)
    until = time.monotonic() + timeout_s
    if rank == 0:
        choice = choose(interface, place) if interface else chosen_address(place)
        place = Address(choice.bind or choice.host, place.port)
    else:
        choice = choose(interface, place)
    own = place if rank == 0 else choice.listen_address()
    listener = _open(own, me, until, choice.others)
    try:
        public = choice.published(listener.address.port)
        rails = [Address(rail.host, listener.address.port) for rail in choice.rails]
        hello = _hello(rank, world_size, version, public, fabric, rails)
        if rank == 0:
            if announce is not None:
                announce(public)
            server = _Server(listener, hello, until, timeout_s, choice, lost)
            return server.gather()
        client = _Client(listener, hello, until, timeout_s, choice, lost)
        return client.join(place)
    except BaseException:
        listener.close()
        raise


def _hello(
    rank: int,
    world_size: int,
    version: str,
    public: Address,
    fabric: str = "tcp",
    rails: Sequence[Address] = (),
) -> _Hello:
    host = os.environ.get(HOST_ID) or socket.gethostname()
    entry = RankEntry(
        rank,
        os.getpid(),
        host,
        host_identity(),
        cores_here(),
        str(public.sent()),
        fabric,
        tuple(map(str, rails)),
    )
    return _Hello(version, world_size, secrets.randbits(64), entry)


def _open(
    address: Address, me: Identity, until: float, others: Sequence[str]
) -> Listener:
    """Listen; if the job before this one still has the port, as soon as it is free."""
    limit = f"at most {until - time.monotonic():.0f} s"
    busy = f"rank {me.rank} waits for {address}, which another process uses ({limit})"
    taken = False
    with noticed(lambda: busy if taken else ""):
        while True:
            try:
                return Listener(address, me, others=others)
            except ConnectFailed as why:
                taken = getattr(why.__cause__, "errno", None) == errno.EADDRINUSE
                if not taken or time.monotonic() >= until:
                    raise
            time.sleep(0.02)


class _Server:
    """Rank 0's part."""

    def __init__(
        self,
        listener: Listener,
        hello: _Hello,
        until: float,
        timeout_s: float,
        choice: Choice,
        lost: Callable[[], str],
    ) -> None:
        self.listener, self.me, self.choice = listener, hello, choice
        self.lost = lost
        self.until, self.timeout_s = until, timeout_s
        self.clients: dict[int, tuple[ControlMessages, _Hello]] = {}
        self.lives: dict[tuple[int, int], Connection] = {}
        self.queue: list[Connection] = []

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self.until - time.monotonic()

    def gather(self) -> RankTable:
        """Wait for all others, and send them the rank table."""
        try:
            with noticed(self._notice):
                while self._absent():
                    if self.left <= 0 or self.listener.tls_mismatch:
                        raise self._missing()
                    self._await_clients()
            return self._publish()
        except ConnectFailed as why:
            answer = _Answer(wrong=str(why), missing=list(why.missing))
            self._send_all(answer)
            self.queue += self.listener.next_of("rdzv", timeout_s=0.0)
            for connection in self.queue:
                self._send(ControlMessages(connection), answer)
            raise
        finally:
            clients = [messages.connection for messages, _ in self.clients.values()]
            for connection in [*clients, *self.lives.values(), *self.queue]:
                connection.close()  # those of the rank table are not here

    def _absent(self) -> list[int]:
        """The ranks that are not connected, or without a lifeline."""
        absent = [r for r in range(1, self.me.world_size) if not self._is_connected(r)]
        if absent and self.left > 0:
            return absent
        for rank in [r for r, (one, _) in self.clients.items() if one.has_ended()]:
            self.clients.pop(rank)[0].connection.close()  # it may connect again
        return [r for r in range(1, self.me.world_size) if not self._is_connected(r)]

    def _is_connected(self, rank: int) -> bool:
        return rank in self.clients and (rank, self.clients[rank][1].life) in self.lives

    def _await_clients(self) -> None:
        wait = self.left if self.lost is str else min(self.left, _TICK_S)
        self.queue += self.listener.next_of("rdzv", "life", timeout_s=wait)
        while self.queue:
            one = self.queue.pop(0)
            if one.purpose == RENDEZVOUS:
                self._greet(ControlMessages(one))
            else:
                self.lives[one.peer, one.purpose.communicator] = one
        if why := self.lost():
            raise ConnectFailed(why)

    def _greet(self, messages: ControlMessages) -> None:
        connection = messages.connection
        try:
            hello = messages.receive(
                _Hello,
                longest=_HELLO_LONGEST,
                timeout_s=max(0.1, min(self.left, _HELLO_S)),
            )
            for address in (hello.entry.address, *hello.entry.rails):
                Address.parse(address)
        except OSError:  # closed again: still missing
            connection.close()
            return
        except (Corrupted, BadArgument) as why:  # probably of another version
            wrong = f"the hello of rank {connection.peer} cannot be read: {why}"
            self._send(messages, _Answer(wrong=wrong))
            connection.close()
            raise ConnectFailed(wrong) from why
        wrong = self._objection(connection.peer, hello)
        if wrong:
            self._send(messages, _Answer(wrong=wrong))
            connection.close()
            raise ConnectFailed(wrong)
        if connection.peer in self.clients:  # one that has ended
            self.clients[connection.peer][0].connection.close()
        self.clients[connection.peer] = messages, hello

    def _objection(self, rank: int, hello: _Hello) -> str:
        mine = self.me
        if hello.version != mine.version:
            return (
                f"rank {rank} runs unisono {hello.version}, rank 0 "
                f"{mine.version}: install the same version for all"
            )
        if hello.entry.rank != rank:
            return f"rank {rank} has sent the hello of rank {hello.entry.rank}"
        if hello.world_size != mine.world_size or rank >= mine.world_size:
            return (
                f"rank {rank} has world size {hello.world_size}, rank 0 has "
                f"{mine.world_size}: start all with the same"
            )
        first = self.clients.get(rank)
        if first is not None and not first[0].has_ended():
            one, two = first[1].entry, hello.entry
            return (
                f"two processes are rank {rank}: pid {one.pid} on {one.host} and pid "
                f"{two.pid} on {two.host}"
            )
        return ""

    def _notice(self) -> str:
        ranks = range(1, self.me.world_size)
        absent = ranks_named([r for r in ranks if not self._is_connected(r)])
        where, limit = self.listener.address, f"at most {self.timeout_s:g} s"
        return f"rank 0 waits for {absent} to connect to {where} ({limit})"

    def _missing(self) -> ConnectFailed:
        if self.listener.tls_mismatch:
            return ConnectFailed(self.listener.tls_mismatch)
        n = self.me.world_size
        missing = self._absent()
        return ConnectFailed(
            f"{ranks_named(missing)} did not connect to {self.listener.address} within "
            f"{self.timeout_s:g} s; {n - len(missing)} of {n} did"
            f"{self.listener.rejections()}: has every rank been started, with this "
            f"address and the same secret? Rank 0 listens at {self.choice}",
            missing=missing,
        )

    def _publish(self) -> RankTable:
        entries = [self.me.entry, *(h.entry for _, h in self.clients.values())]
        entries.sort(key=lambda entry: entry.rank)
        self._send_all(_Answer(entries))
        lifelines = {
            rank: self.lives.pop((rank, hello.life))
            for rank, (_, hello) in self.clients.items()
        }
        self.listener.add_addresses(
            {e.rank: Address.parse(e.address) for e in entries if e.rank}
        )
        why, rails = str(self.choice), self.choice.rails
        return RankTable(0, tuple(entries), self.listener, lifelines, why, rails)

    def _send_all(self, answer: _Answer) -> None:
        for messages, _ in self.clients.values():
            self._send(messages, answer)

    def _send(self, messages: ControlMessages, answer: _Answer) -> None:
        """Send; the lifeline shows if the rank has died."""
        try:
            messages.send(answer, timeout_s=_GRACE_S)
        except OSError:
            return


class _Client:
    """The part of every other rank."""

    def __init__(
        self,
        listener: Listener,
        hello: _Hello,
        until: float,
        timeout_s: float,
        choice: Choice,
        lost: Callable[[], str],
    ) -> None:
        self.listener, self.hello, self.choice = listener, hello, choice
        self.lost = lost
        self.until, self.timeout_s = until, timeout_s

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return max(0.0, self.until - time.monotonic())

    def join(self, place: Address) -> RankTable:
        """Connect to rank 0, send the hello, and receive the rank table."""
        me = self.listener.me
        no_rank_0 = (
            f"rank {me.rank} waits for rank 0 to answer at {place} "
            f"(at most {self.timeout_s:g} s)"
        )
        with noticed(lambda: no_rank_0):
            connection = connect_to(
                place, me, 0, RENDEZVOUS, timeout_s=self.left, lost=self.lost
            )
        try:
            messages = ControlMessages(connection)
            messages.send(self.hello, timeout_s=max(self.left, 0.1))
            lifeline = self._lifeline(place, connection)
            try:
                return self._table(place, self._answer(messages), lifeline)
            except BaseException:
                if lifeline is not None:
                    lifeline.close()
                raise
        except OSError as why:
            raise _gone() from why
        finally:
            connection.close()

    def _lifeline(self, place: Address, rendezvous: Connection) -> Connection | None:
        """The lifeline; None if rank 0 has answered already, which is a refusal."""

        def answered() -> str:
            return "rank 0 has answered" if rendezvous.can_be_read() else ""

        try:
            return connect_to(
                place,
                self.listener.me,
                0,
                lifeline_purpose(self.hello.life),
                timeout_s=max(self.left, 0.1),
                lost=answered,
            )
        except PeerLost:
            return None
        except TransportError:
            if rendezvous.can_be_read():
                return None
            raise

    def _answer(self, messages: ControlMessages) -> _Answer:
        n = self.hello.world_size
        try:
            answer = messages.receive(
                _Answer,
                longest=_HELLO_LONGEST * (n + 1),
                timeout_s=self.left + _GRACE_S,
            )
        except TimeoutError as why:
            raise ConnectFailed(
                f"rank 0 did not answer within {self.timeout_s:g} s", missing=[0]
            ) from why
        if answer.wrong:
            raise ConnectFailed(answer.wrong, missing=answer.missing)
        return answer

    def _table(
        self, place: Address, answer: _Answer, lifeline: Connection | None
    ) -> RankTable:
        if lifeline is None or len(answer.entries) != self.hello.world_size:
            raise _gone()
        entries = tuple(answer.entries)
        if [entry.rank for entry in entries] != list(range(len(entries))):
            raise ConnectFailed("rank 0 sent an impossible rank table", missing=[0])
        interface = self.choice.interface
        self.listener.add_addresses(
            {e.rank: Address.parse(e.address).received(interface) for e in entries}
        )
        # Rank 0 as it was reached, whatever it says of itself.
        self.listener.add_addresses({0: place})
        me, lifelines = self.hello.entry.rank, {0: lifeline}
        why, rails = str(self.choice), self.choice.rails
        return RankTable(me, entries, self.listener, lifelines, why, rails)


def _gone() -> ConnectFailed:
    return ConnectFailed(
        "rank 0 closed the connection at the rendezvous: it has died", missing=[0]
    )
