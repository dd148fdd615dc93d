"""Ranks on several hosts: how they meet, and what they then know of each other.

Rank 0 listens at an address that all were told. Each of the others opens a reception
of its own, dials rank 0, authenticates, and says hello: its version, the size of its
world, its host, where its reception is. It dials once more for its lifeline, which
stays: rank 0 holds one to everybody, everybody one to rank 0, and whose lifeline ends
has died. When all are there, rank 0 tells everybody the roll:

    roll = meet_across(rank, n, job, "10.0.3.1:29500", secret=..., version=...)
    roll.hosts                  [0, 0, 1, 1]: the host of each rank, as they come
    roll.local()                the ranks that share memory with this one
    roll.lifelines              rank 0: {1: ..., 2: ...}; others: {0: ...}
    roll.reception.dial(3, data(1))   the first connection to rank 3, when needed

What is said travels sealed (`letters`), after the handshake. If somebody does not fit,
all are told why, and nobody meets. Rank 0's reception stays open afterwards, like all.
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
from unisono.transports.addresses import Address, Choice, choose, stay
from unisono.transports.base import cores_here, refuse_too_many
from unisono.transports.connect import Connection, dial
from unisono.transports.control import Letters
from unisono.transports.handshake import MEET, Member, life
from unisono.transports.listener import Reception
from unisono.transports.rank_table import HOST_ID, Entry, Roll, host_identity
from unisono.transports.secret import Secret, open_secret

_HELLO_LONGEST = 4096
_HELLO_S = 5.0  # a rank that has authenticated says hello at once
_TICK_S = 0.05  # how often one looks whether the meeting can still be
_GRACE_S = 5.0  # for rank 0 to tell who is missing


class _Hello(msgspec.Struct):
    """What a rank says of itself; `life` marks the lifeline that it dials next."""

    version: str
    world_size: int
    life: int
    entry: Entry


class _Answer(msgspec.Struct):
    """What rank 0 says: who all are, or why it will not be."""

    entries: list[Entry] = []
    wrong: str = ""
    missing: list[int] = []


def meet_across(
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
    announce: Callable[[Address], None] | None = None,
    lost: Callable[[], str] = str,
) -> Roll:
    """Find the other ranks of `job`, wherever they are, or tell who is missing.

    `address` is where rank 0 listens, as host:port. If the port is 0, rank 0 takes a
    free one, and `announce` is called with it, to hand it on to the others. `interface`
    is what choose() takes. Without a secret only loopback addresses will do, unless
    `insecure`. `lost` says why the meeting cannot be, as soon as that is known. With
    `tls` all is encrypted, here and later.
    """
    refuse_too_many(world_size)
    if not 0 <= rank < world_size:
        raise BadArgument(f"rank = {rank}: expected 0 to {world_size - 1}")
    place = Address.parse(address)
    if rank > 0 and place.port == 0:
        raise BadArgument(f"address = {address}: rank {rank} needs the real port")
    known = secret or open_secret(job, anywhere=insecure)
    me = Member(known, job, rank, epoch, tls)
    until = time.monotonic() + timeout_s
    if rank == 0:
        choice = choose(interface, place) if interface else stay(place)
        place = Address(choice.bind or choice.host, place.port)
    else:
        choice = choose(interface, place)
    own = place if rank == 0 else choice.door()
    reception = _open(own, me, until, choice.others if rank == 0 else ())
    try:
        public = choice.published(reception.address.port)
        hello = _hello(rank, world_size, version, public)
        if rank == 0:
            if announce is not None:
                announce(public)
            host = _Hosting(reception, hello, until, timeout_s, str(choice), lost)
            return host.gather()
        guest = _Visit(reception, hello, until, timeout_s, choice, lost)
        return guest.pay(place)
    except BaseException:
        reception.close()
        raise


def _hello(rank: int, world_size: int, version: str, public: Address) -> _Hello:
    host = os.environ.get(HOST_ID) or socket.gethostname()
    entry = Entry(
        *(rank, os.getpid(), host, host_identity(), cores_here()), str(public.sent())
    )
    return _Hello(version, world_size, secrets.randbits(64), entry)


def _open(
    address: Address, me: Member, until: float, others: Sequence[str]
) -> Reception:
    """Listen; if the job before this one still has the port, as soon as it is free."""
    while True:
        try:
            return Reception(address, me, others=others)
        except ConnectFailed as why:
            taken = getattr(why.__cause__, "errno", None) == errno.EADDRINUSE
            if not taken or time.monotonic() >= until:
                raise
        time.sleep(0.02)


class _Hosting:
    """Rank 0's part."""

    def __init__(
        self,
        reception: Reception,
        hello: _Hello,
        until: float,
        timeout_s: float,
        why: str,
        lost: Callable[[], str],
    ) -> None:
        self.reception, self.me, self.why = reception, hello, why
        self.lost = lost
        self.until, self.timeout_s = until, timeout_s
        self.guests: dict[int, tuple[Letters, _Hello]] = {}
        self.lives: dict[tuple[int, int], Connection] = {}
        self.queue: list[Connection] = []

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self.until - time.monotonic()

    def gather(self) -> Roll:
        """Wait for all others, and make them known to each other."""
        try:
            while self._absent():
                if self.left <= 0 or self.reception.differs:
                    raise self._missing()
                self._await_guests()
            return self._introduce()
        except ConnectFailed as why:
            answer = _Answer(wrong=str(why), missing=list(why.missing))
            self._tell(answer)
            self.queue += self.reception.next_of("meet", timeout_s=0.0)
            for connection in self.queue:
                self._send(Letters(connection), answer)
            raise
        finally:
            guests = [letters.connection for letters, _ in self.guests.values()]
            for connection in [*guests, *self.lives.values(), *self.queue]:
                connection.close()  # lifelines that are in the roll are not here

    def _absent(self) -> list[int]:
        """The ranks that have not come, or not with a lifeline, or are gone again."""
        absent = [r for r in range(1, self.me.world_size) if not self._is_here(r)]
        if absent and self.left > 0:
            return absent
        for rank in [r for r, (one, _) in self.guests.items() if one.has_ended()]:
            self.guests.pop(rank)[0].connection.close()  # it may come again
        return [r for r in range(1, self.me.world_size) if not self._is_here(r)]

    def _is_here(self, rank: int) -> bool:
        return rank in self.guests and (rank, self.guests[rank][1].life) in self.lives

    def _await_guests(self) -> None:
        wait = self.left if self.lost is str else min(self.left, _TICK_S)
        self.queue += self.reception.next_of("meet", "life", timeout_s=wait)
        while self.queue:
            one = self.queue.pop(0)
            if one.label == MEET:
                self._greet(Letters(one))
            else:
                self.lives[one.peer, one.label.communicator] = one
        if why := self.lost():
            raise ConnectFailed(why)

    def _greet(self, letters: Letters) -> None:
        connection = letters.connection
        try:
            hello = letters.receive(
                _Hello,
                longest=_HELLO_LONGEST,
                timeout_s=max(0.1, min(self.left, _HELLO_S)),
            )
            Address.parse(hello.entry.address)
        except OSError:  # gone again: still missing
            connection.close()
            return
        except (Corrupted, BadArgument) as why:  # most likely of another version
            wrong = f"rank {connection.peer} says what is no hello: {why}"
            self._send(letters, _Answer(wrong=wrong))
            connection.close()
            raise ConnectFailed(wrong) from why
        wrong = self._objection(connection.peer, hello)
        if wrong:
            self._send(letters, _Answer(wrong=wrong))
            connection.close()
            raise ConnectFailed(wrong)
        if connection.peer in self.guests:  # one that has ended
            self.guests[connection.peer][0].connection.close()
        self.guests[connection.peer] = letters, hello

    def _objection(self, rank: int, hello: _Hello) -> str:
        mine = self.me
        if hello.version != mine.version:
            return (
                f"rank {rank} runs unisono {hello.version}, rank 0 "
                f"{mine.version}: install the same version for all"
            )
        if hello.entry.rank != rank:
            return f"rank {rank} says that it is rank {hello.entry.rank}"
        if hello.world_size != mine.world_size or rank >= mine.world_size:
            return (
                f"rank {rank} was told of {hello.world_size} ranks, rank 0 of "
                f"{mine.world_size}: start all with one world size"
            )
        first = self.guests.get(rank)
        if first is not None and not first[0].has_ended():
            one, two = first[1].entry, hello.entry
            return (
                f"two processes say that they are rank {rank}: pid {one.pid} on "
                f"{one.host} and pid {two.pid} on {two.host}"
            )
        return ""

    def _missing(self) -> ConnectFailed:
        if self.reception.differs:
            return ConnectFailed(self.reception.differs)
        n = self.me.world_size
        missing = self._absent()
        told = ", ".join(map(str, missing))
        told = f"ranks {told}" if len(missing) > 1 else f"rank {told}"
        return ConnectFailed(
            f"{told} did not appear at {self.reception.address} within "
            f"{self.timeout_s:g} s; {n - len(missing)} of {n} did"
            f"{self.reception.complaint()}: has every rank been started, with this "
            f"address and the same secret? Rank 0 listens at {self.why}",
            missing=missing,
        )

    def _introduce(self) -> Roll:
        entries = [self.me.entry, *(h.entry for _, h in self.guests.values())]
        entries.sort(key=lambda entry: entry.rank)
        self._tell(_Answer(entries))
        lifelines = {
            rank: self.lives.pop((rank, hello.life))
            for rank, (_, hello) in self.guests.items()
        }
        self.reception.know(
            {e.rank: Address.parse(e.address) for e in entries if e.rank}
        )
        return Roll(0, tuple(entries), self.reception, lifelines, self.why)

    def _tell(self, answer: _Answer) -> None:
        for letters, _ in self.guests.values():
            self._send(letters, answer)

    def _send(self, letters: Letters, answer: _Answer) -> None:
        """Send; one that has died is found out by its lifeline."""
        try:
            letters.send(answer, timeout_s=_GRACE_S)
        except OSError:
            return


class _Visit:
    """The part of every other rank."""

    def __init__(
        self,
        reception: Reception,
        hello: _Hello,
        until: float,
        timeout_s: float,
        choice: Choice,
        lost: Callable[[], str],
    ) -> None:
        self.reception, self.hello, self.choice = reception, hello, choice
        self.lost = lost
        self.until, self.timeout_s = until, timeout_s

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return max(0.0, self.until - time.monotonic())

    def pay(self, place: Address) -> Roll:
        """Go to rank 0, say hello, and hear who all are."""
        me = self.reception.me
        connection = dial(place, me, 0, MEET, timeout_s=self.left, lost=self.lost)
        try:
            letters = Letters(connection)
            letters.send(self.hello, timeout_s=max(self.left, 0.1))
            lifeline = self._lifeline(place, connection)
            try:
                return self._roll(place, self._answer(letters), lifeline)
            except BaseException:
                if lifeline is not None:
                    lifeline.close()
                raise
        except OSError as why:
            raise _gone() from why
        finally:
            connection.close()

    def _lifeline(self, place: Address, meeting: Connection) -> Connection | None:
        """The lifeline, or None if rank 0 has answered before: then it refuses."""

        def answered() -> str:
            return "rank 0 has answered" if meeting.can_be_read() else ""

        try:
            return dial(
                place,
                self.reception.me,
                0,
                life(self.hello.life),
                timeout_s=max(self.left, 0.1),
                lost=answered,
            )
        except PeerLost:
            return None
        except TransportError:
            if meeting.can_be_read():
                return None
            raise

    def _answer(self, letters: Letters) -> _Answer:
        n = self.hello.world_size
        try:
            answer = letters.receive(
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

    def _roll(
        self, place: Address, answer: _Answer, lifeline: Connection | None
    ) -> Roll:
        if lifeline is None or len(answer.entries) != self.hello.world_size:
            raise _gone()
        entries = tuple(answer.entries)
        if [entry.rank for entry in entries] != list(range(len(entries))):
            raise ConnectFailed("rank 0 tells of ranks that cannot be", missing=[0])
        interface = self.choice.interface
        self.reception.know(
            {e.rank: Address.parse(e.address).received(interface) for e in entries}
        )
        self.reception.know({0: place})  # as it was reached, whatever it says itself
        me = self.hello.entry.rank
        return Roll(me, entries, self.reception, {0: lifeline}, str(self.choice))


def _gone() -> ConnectFailed:
    return ConnectFailed("rank 0 closed the meeting: it has died", missing=[0])
