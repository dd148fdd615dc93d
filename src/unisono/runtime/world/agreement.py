"""Which ranks survive? The rules of agreement, without sockets and clocks.

The lowest rank that is not known to be gone is the coordinator. The others send it a
request with the ranks that they miss; when every rank has done so or is gone, or the
time is up, it proposes a world: these members, this epoch. The members then enter it by
a rendezvous. That world is *settled* for a rank when its first barrier there has
passed, for then all members have entered it; the agreement ends when the second has,
for then all know that.

  request ──► propose ──► enter, barrier ──► settled, barrier ──► done
    ▲                           │                │
    └── failed: request again ──┘                └── failed: agree again, in that world

If anything fails, ranks send requests again, to the coordinator of that moment. A rank
whose first barrier failed cannot know whether another's has passed. So it keeps that
world and asks all: a rank that has settled a world still answers in the old one, and
replies so; then the asker takes the world for settled too, and all agree again from
there. If no rank replies so, those that could are dead.

*Gone* has two meanings. Dead is certain: the kernel of the rank's own host reports to a
rank of that host that the process has exited, and the others accept that. Anything that
comes over a network is not certain: a rank is *unreachable* if connections to it are
refused, reset, closed or lost, if it sent no request in time, or refuses to. A firewall
answers like a host without the process; the rank may be alive together with others,
even with some that are dead now. So with unreachable ranks a group continues only if it
is more than half of all, or half with rank 0. Of two groups that do not know of each
other at most one is that large. A world in use needs all its members, so two worlds
that share a member are never both in use. On one host every live rank can be reached,
and unreachable only means that it has not called: it has agreed with no other, and gets
a reply when it does. There no majority is needed (`one_host`).

A world that a rank has entered but not settled is binding: another member may have
settled it and continued from there, out of reach. So a rank that has entered a world
joins another one only if the members missing there are dead, or too few to continue
from the world that was entered. And a rank that keeps a world without knowing that all
do (`is_strict`) counts the dead as absent, for they may have joined another world
before.

Unreachability spreads: a request names the ranks that its sender has excluded, and the
coordinator excludes them too, since the sender will not accept them again. An excluded
rank gets a reply that says so.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

RENDEZVOUS_TIMEOUT_S = 10.0
"""How much longer than announced a coordinator may take: it may be in a rendezvous."""
_EPOCHS = range(1 << 31)
_LONGEST_S = 1e6


class Proposal(msgspec.Struct, frozen=True, array_like=True):
    """A proposed world: its epoch, its members and the excluded by their ranks here."""

    epoch: int
    members: tuple[int, ...]
    left_out: tuple[int, ...]
    address: str = ""

    def is_valid(self, n: int) -> bool:
        """Whether a rank of a world of n can have sent this."""
        lists = self.members, self.left_out
        return self.epoch in _EPOCHS and all(_are_ranks(some, n) for some in lists)


class AgreementRequest(msgspec.Struct, frozen=True, array_like=True):
    """A rank follows another as coordinator, or (as coordinator) asks it to follow.

    `entered` has the members of each world that it has entered without knowing it
    settled.
    """

    is_coordinator: bool
    last_epoch: int
    dead: tuple[int, ...]
    unreachable: tuple[int, ...]
    entered: tuple[tuple[int, ...], ...] = ()

    def is_valid(self, n: int) -> bool:
        """Whether a rank of a world of n can have sent this."""
        lists = (self.dead, self.unreachable, *self.entered)
        return self.last_epoch in _EPOCHS and all(_are_ranks(some, n) for some in lists)


class AgreementReply(msgspec.Struct, frozen=True, array_like=True):
    """The reply: a proposal, a settled world, an exclusion, or how long to wait.

    `is_excluded`: the others do not wait for this rank. `missing` are the ranks without
    which there is no majority.
    """

    proposal: Proposal | None = None
    settled: Proposal | None = None
    is_excluded: bool = False
    missing: tuple[int, ...] = ()
    wait_s: float = 0.0

    def is_valid(self, n: int) -> bool:
        """Whether a rank of a world of n can have sent this."""
        worlds = [one for one in (self.proposal, self.settled) if one is not None]
        return (
            all(one.is_valid(n) for one in worlds)
            and _are_ranks(self.missing, n)
            and 0 <= self.wait_s <= _LONGEST_S  # false for NaN
        )


class ActionKind(enum.Enum):
    """What the rank has to do next."""

    ASK = "send requests to these ranks, and wait for messages"
    HOST = "send this proposal to its members, and host their rendezvous"
    JOIN = "join the rendezvous of this proposal"
    SETTLE = "the world that was entered is settled; agree again from there"
    LEFT_OUT = "the others have settled a world without this rank"
    NO_MAJORITY = "too few ranks are left"


@dataclass(frozen=True, slots=True)
class AgreementAction:
    """What to do; `until` is when to ask again if no message arrives."""

    kind: ActionKind
    ranks: tuple[int, ...] = ()
    proposal: Proposal | None = None
    until: float = 0.0


def is_majority(group: Iterable[int], n: int) -> bool:
    """Whether it has more than half of n ranks, or half of them with rank 0."""
    here = set(group)
    return 2 * len(here) > n or (2 * len(here) == n and 0 in here)


def may_continue(group: Iterable[int], members: tuple[int, ...]) -> bool:
    """Whether a group of a world's members is a majority of that world."""
    here = set(group)
    positions = [at for at, rank in enumerate(members) if rank in here]
    return is_majority(positions, len(members))


def _are_ranks(numbers: tuple[int, ...], n: int) -> bool:
    distinct = len(set(numbers)) == len(numbers)
    return distinct and all(0 <= rank < n for rank in numbers)


@dataclass(slots=True)
class Agreement:
    """The state of one rank: report events to it, ask it for the next `step`.

    `voters` is the number of ranks before a growth that not all are known to have
    completed: new ranks do not count for a majority until then. 0 means all.
    """

    me: int
    n: int
    epoch: int
    timeout_s: float
    one_host: bool = False
    is_strict: bool = False
    voters: int = 0
    dead: set[int] = field(default_factory=set)
    unreachable: set[int] = field(default_factory=set)
    followers: set[int] = field(default_factory=set)
    outbox: list[tuple[int, AgreementReply]] = field(default_factory=list)
    """Replies to send, with their destinations; the caller takes them out."""
    unsettled: Proposal | None = None
    """A world that was entered, not settled: a first barrier may have passed."""
    _last_epoch: int = 0
    _president: int = -1
    _until: float = 0.0
    _acked: set[int] = field(default_factory=set)
    _askers: set[int] = field(default_factory=set)
    _entered: dict[int, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    """By rank, the worlds that it has entered: they may be settled, and are binding."""
    _accepted: Proposal | None = None
    _final: AgreementAction | None = None

    def __post_init__(self) -> None:
        """Start from the epoch of the old world."""
        self._last_epoch = self.epoch

    @property
    def coordinator(self) -> int:
        """The lowest rank that is not gone."""
        rank = 0
        while rank in self.dead or rank in self.unreachable:
            rank += 1
        return rank

    def request(self) -> AgreementRequest:
        """The request of this rank."""
        return AgreementRequest(
            self.coordinator == self.me,
            self._last_epoch,
            tuple(self.dead),
            tuple(self.unreachable),
            self._entered.get(self.me, ()),
        )

    # --- events

    def learn(
        self, *, dead: Iterable[int] = (), unreachable: Iterable[int] = ()
    ) -> None:
        """Some ranks are gone."""
        self.dead.update(dead)
        self.dead.discard(self.me)
        self.unreachable.update(unreachable)
        self.unreachable.discard(self.me)

    def receive_request(self, rank: int, message: AgreementRequest) -> None:
        """Another rank has sent a request; an invalid one is ignored."""
        if not (0 <= rank < self.n and rank != self.me and message.is_valid(self.n)):
            return
        self._askers.add(rank)
        if rank in self.unreachable or rank in self.dead:
            return
        if self.me in message.dead or self.me in message.unreachable:
            self.unreachable.add(rank)  # it has excluded us
            return
        self._entered[rank] = message.entered
        self.dead.update(message.dead)
        self.unreachable.update(message.unreachable)
        self._last_epoch = max(self._last_epoch, message.last_epoch)
        if message.is_coordinator:
            return
        self.followers.add(rank)

    def follower_left(self, rank: int) -> None:
        """A follower has disconnected; it may connect again."""
        self.followers.discard(rank)
        self._acked.discard(rank)
        self._askers.discard(rank)

    def receive_reply(self, rank: int, message: AgreementReply, now: float) -> None:
        """A rank has replied to our request."""
        if not message.is_valid(self.n):
            return
        if message.settled is not None:
            self._receive_settled(message.settled)
        elif message.proposal is not None:
            self._receive_proposal(rank, message.proposal)
        elif message.is_excluded:
            self.unreachable.add(rank)
        elif message.missing and rank == self.coordinator:
            self._final = AgreementAction(ActionKind.NO_MAJORITY, message.missing)
        elif message.wait_s and rank == self._president:
            self._until = now + message.wait_s + RENDEZVOUS_TIMEOUT_S

    def _receive_settled(self, settled: Proposal) -> None:
        self._send_to_followers(AgreementReply(settled=settled))
        kind = ActionKind.SETTLE if settled == self.unsettled else ActionKind.LEFT_OUT
        self._final = AgreementAction(kind, proposal=settled)

    def _receive_proposal(self, rank: int, proposal: Proposal) -> None:
        is_later = proposal.epoch > self.epoch
        if is_later and rank == self.coordinator and self.me in proposal.members:
            self._accepted = proposal

    def failed(self, proposal: Proposal, *, entered: bool) -> None:
        """The rendezvous has failed, or the first barrier after it (`entered`)."""
        self._last_epoch = max(self._last_epoch, proposal.epoch)
        self._accepted = None
        self._president = -1
        for ranks in (self.followers, self._acked, self._askers):
            ranks.clear()
        self.unsettled = proposal if entered else None
        mine = self._entered.get(self.me, ())
        if entered and proposal.members not in mine:
            self._entered[self.me] = (*mine, proposal.members)

    # --- actions

    def step(self, now: float) -> AgreementAction:
        """The next action."""
        step = self._final or self._next(now)
        for rank in self._askers & (self.unreachable | self.dead):
            self._askers.discard(rank)
            self.outbox.append((rank, AgreementReply(is_excluded=True)))
        return step

    def _next(self, now: float) -> AgreementAction:
        if self._accepted is not None:
            return AgreementAction(ActionKind.JOIN, proposal=self._accepted)
        while True:
            coordinator = self.coordinator
            if coordinator != self._president:
                self._president = coordinator
                self._until = now + self.timeout_s
            if coordinator == self.me:
                return self._coordinate(now)
            if now < self._until:
                return AgreementAction(
                    ActionKind.ASK, (coordinator,), until=self._until
                )
            self.unreachable.add(coordinator)

    def _coordinate(self, now: float) -> AgreementAction:
        came = {self.me, *self.followers} - self.dead - self.unreachable
        gone = came | self.dead | self.unreachable
        missing = tuple(rank for rank in range(self.n) if rank not in gone)
        if missing and now < self._until:
            self._ask_to_wait(now)
            return AgreementAction(ActionKind.ASK, missing, until=self._until)
        here = self._compatible(came)
        away = set(range(self.n)) - here - self.dead
        if self.me not in here or not self._may_continue(here, away):
            return self._give_up(away - came)
        for rank in came - here:  # bound to a world that conflicts with this one
            self.outbox.append(
                (rank, AgreementReply(missing=tuple(sorted(away - {rank}))))
            )
        self.unreachable.update(came - here)
        self.unreachable.update(missing)
        proposal = Proposal(
            self._last_epoch + 1, tuple(sorted(here)), tuple(sorted(away)), ""
        )
        return AgreementAction(ActionKind.HOST, proposal.members, proposal)

    def _compatible(self, came: set[int]) -> set[int]:
        """The ranks that can be in one world, given the worlds they have entered."""
        here = set(came)
        while bound := {rank for rank in here if self._is_bound(rank, here)}:
            here -= bound
        return here

    def _is_bound(self, rank: int, here: set[int]) -> bool:
        """Whether absent ranks can have settled and continued an entered world."""
        for members in self._entered.get(rank, ()):
            absent = set(members) - here
            if not absent <= self.dead and may_continue(absent, members):
                return True
        return False

    def _may_continue(self, here: set[int], away: set[int]) -> bool:
        if len(here) == self.n:
            return True
        if not self.is_strict and (self.one_host or not away):
            return True
        voters = self.voters or self.n
        return is_majority([rank for rank in here if rank < voters], voters)

    def _give_up(self, away: set[int]) -> AgreementAction:
        missing = tuple(sorted(away or self.dead))
        self._send_to_followers(AgreementReply(missing=missing))
        self._final = AgreementAction(ActionKind.NO_MAJORITY, missing)
        return self._final

    def _ask_to_wait(self, now: float) -> None:
        for rank in self.followers - self._acked:
            self.outbox.append(
                (rank, AgreementReply(wait_s=max(0.001, self._until - now)))
            )
        self._acked |= self.followers

    def _send_to_followers(self, message: AgreementReply) -> None:
        self.outbox.extend((rank, message) for rank in sorted(self.followers))
