"""Who is left? The rules by which survivors agree, without sockets and clocks.

The lowest rank that is not known to be gone presides. The others come to it and say
whom they miss; when everybody has come or is gone, or the time is up, it proposes a
world: these members, this epoch. The members then meet. What they have met becomes
*settled* for a rank when its first barrier there has passed, for then all members have
met; and it ends the matter when the second has, for then all know that.

    come ──► propose ──► meet, barrier ──► settled, barrier ──► done
      ▲                        │                │
      └── failed: come again ──┘                └── failed: agree again, in that world

If anything fails, ranks come again, to whoever presides then. One whose first barrier
failed cannot know whether another's has passed. So it keeps what it met, and asks all:
whoever has settled a world goes on answering in the old one, and says so; then the
asker takes it for settled too, and all agree anew from there. If nobody says so, those
who could are dead.

*Gone* has two meanings. Dead is certain: the kernel of the rank's own host says that
its process has ended, to a rank of that host, which is believed by the others. All that
comes over a network is not: a rank is silent if connections to it are refused, reset,
closed or lost, if it did not come in time, or refuses to come. A firewall answers as a
host without the process does; the rank may live, and have others around it; even those
that are dead now may have been with it. So where somebody is silent a group goes on
only if it is more than half of all, or half with rank 0. Of two groups that do not know
of each other at most one can be so. A world in use needs all its members, so two worlds
that share a member are never both in use. On one host nobody is out of reach, and
silent is only who has not come: it has agreed with nobody, and will be told when it
comes. There no majority is needed (`one_host`).

What was met and not settled binds: another member may have settled it, and gone on from
there, out of our reach. So a rank that has met a world joins another one only if the
members that are missing there are dead, or too few to go on from what was met. And who
stands by a world without knowing that all do (`is_strict`) counts the dead as absent,
for they may have joined another before.

Silence is contagious: who comes to another president says whom it gave up, and is
believed, since it will not come back. A rank that others have given up is told so.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

MEETING_S = 10.0
"""How much longer than said a president is waited for: it may be in a meeting."""
_EPOCHS = range(1 << 31)
_LONGEST_S = 1e6


class Proposal(msgspec.Struct, frozen=True, array_like=True):
    """A world to be: its epoch, its members by their ranks here, who is not asked."""

    epoch: int
    members: tuple[int, ...]
    left_out: tuple[int, ...]
    address: str = ""

    def is_sound(self, n: int) -> bool:
        """Whether a rank of a world of n can have said this."""
        lists = self.members, self.left_out
        return self.epoch in _EPOCHS and all(_are_ranks(some, n) for some in lists)


class Come(msgspec.Struct, frozen=True, array_like=True):
    """What a rank says to another: it follows it, or (presiding) wants it to come.

    `met` are the members of each world that it has met without knowing it settled.
    """

    presides: bool
    tried: int
    dead: tuple[int, ...]
    silent: tuple[int, ...]
    met: tuple[tuple[int, ...], ...] = ()

    def is_sound(self, n: int) -> bool:
        """Whether a rank of a world of n can have said this."""
        lists = (self.dead, self.silent, *self.met)
        return self.tried in _EPOCHS and all(_are_ranks(some, n) for some in lists)


class Reply(msgspec.Struct, frozen=True, array_like=True):
    """What it hears: a proposal, what is settled, that it is given up, or to wait.

    `given_up` are those whom the others will not wait for; `hopeless` are those without
    whom it cannot go on.
    """

    proposal: Proposal | None = None
    settled: Proposal | None = None
    given_up: bool = False
    hopeless: tuple[int, ...] = ()
    wait_s: float = 0.0

    def is_sound(self, n: int) -> bool:
        """Whether a rank of a world of n can have said this."""
        told = [one for one in (self.proposal, self.settled) if one is not None]
        return (
            all(one.is_sound(n) for one in told)
            and _are_ranks(self.hopeless, n)
            and 0 <= self.wait_s <= _LONGEST_S  # not so for a NaN
        )


class Kind(enum.Enum):
    """What is to be done next."""

    ASK = "say Come to some ranks that have not been asked, and wait for news"
    HOST = "tell the members of this proposal, and meet them"
    VISIT = "meet the others of this proposal"
    SETTLE = "what was met is settled after all; agree anew from there"
    LEFT_OUT = "the others have settled a world without this rank"
    HOPELESS = "too few are here"


@dataclass(frozen=True, slots=True)
class Step:
    """What to do; `until` is when to look again if there is no news."""

    kind: Kind
    ranks: tuple[int, ...] = ()
    proposal: Proposal | None = None
    until: float = 0.0


def outweighs(group: Iterable[int], n: int) -> bool:
    """Whether no other group of the same n ranks can be as heavy."""
    here = set(group)
    return 2 * len(here) > n or (2 * len(here) == n and 0 in here)


def can_go_on(group: Iterable[int], members: tuple[int, ...]) -> bool:
    """Whether a group out of a world's members may go on from there by its number."""
    here = set(group)
    places = [place for place, rank in enumerate(members) if rank in here]
    return outweighs(places, len(members))


def _are_ranks(told: tuple[int, ...], n: int) -> bool:
    return len(set(told)) == len(told) and all(0 <= rank < n for rank in told)


@dataclass(slots=True)
class Agreement:
    """One rank's part. Tell it what happens, ask it for the next `step`.

    `voters` are as many as were there before a growth that not all are known to have
    come through: newcomers are no part of a majority until then. 0 means all.
    """

    me: int
    n: int
    epoch: int
    patience_s: float
    one_host: bool = False
    is_strict: bool = False
    voters: int = 0
    dead: set[int] = field(default_factory=set)
    silent: set[int] = field(default_factory=set)
    guests: set[int] = field(default_factory=set)
    outbox: list[tuple[int, Reply]] = field(default_factory=list)
    """What is to be told to whom; whoever acts takes it out."""
    held: Proposal | None = None
    """What was met, but not settled: somebody else's first barrier may have passed."""
    _tried: int = 0
    _president: int = -1
    _until: float = 0.0
    _acked: set[int] = field(default_factory=set)
    _askers: set[int] = field(default_factory=set)
    _met: dict[int, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    """By rank, what it has met: it may be settled, and binds."""
    _accepted: Proposal | None = None
    _verdict: Step | None = None

    def __post_init__(self) -> None:
        """Nothing has been tried beyond the epoch that ends."""
        self._tried = self.epoch

    @property
    def president(self) -> int:
        """The lowest that is not gone."""
        rank = 0
        while rank in self.dead or rank in self.silent:
            rank += 1
        return rank

    def come(self) -> Come:
        """What this rank says when it asks another."""
        return Come(
            self.president == self.me,
            self._tried,
            tuple(self.dead),
            tuple(self.silent),
            self._met.get(self.me, ()),
        )

    # --- what happens

    def learn(self, *, dead: Iterable[int] = (), silent: Iterable[int] = ()) -> None:
        """Some are gone."""
        self.dead.update(dead)
        self.dead.discard(self.me)
        self.silent.update(silent)
        self.silent.discard(self.me)

    def came(self, rank: int, word: Come) -> None:
        """Another rank has said this; what no rank can say is passed over."""
        if not (0 <= rank < self.n and rank != self.me and word.is_sound(self.n)):
            return
        self._askers.add(rank)
        if rank in self.silent or rank in self.dead:
            return
        if self.me in word.dead or self.me in word.silent:
            self.silent.add(rank)  # it will not take part with us
            return
        self._met[rank] = word.met
        self.dead.update(word.dead)
        self.silent.update(word.silent)
        self._tried = max(self._tried, word.tried)
        if word.presides:
            return
        self.guests.add(rank)

    def left(self, rank: int) -> None:
        """A guest has gone; it may come again."""
        self.guests.discard(rank)
        self._acked.discard(rank)
        self._askers.discard(rank)

    def heard(self, rank: int, word: Reply, now: float) -> None:
        """One that was asked has answered."""
        if not word.is_sound(self.n):
            return
        if word.settled is not None:
            self._hear_settled(word.settled)
        elif word.proposal is not None:
            self._hear_proposal(rank, word.proposal)
        elif word.given_up:
            self.silent.add(rank)
        elif word.hopeless and rank == self.president:
            self._verdict = Step(Kind.HOPELESS, word.hopeless)
        elif word.wait_s and rank == self._president:
            self._until = now + word.wait_s + MEETING_S

    def _hear_settled(self, settled: Proposal) -> None:
        self._tell_guests(Reply(settled=settled))
        kind = Kind.SETTLE if settled == self.held else Kind.LEFT_OUT
        self._verdict = Step(kind, proposal=settled)

    def _hear_proposal(self, rank: int, proposal: Proposal) -> None:
        is_later = proposal.epoch > self.epoch
        if is_later and rank == self.president and self.me in proposal.members:
            self._accepted = proposal

    def failed(self, proposal: Proposal, *, met: bool) -> None:
        """The members have not met, or their first barrier has failed (met)."""
        self._tried = max(self._tried, proposal.epoch)
        self._accepted = None
        self._president = -1
        for ranks in (self.guests, self._acked, self._askers):
            ranks.clear()
        self.held = proposal if met else None
        mine = self._met.get(self.me, ())
        if met and proposal.members not in mine:
            self._met[self.me] = (*mine, proposal.members)

    # --- what to do

    def step(self, now: float) -> Step:
        """What to do now."""
        step = self._verdict or self._next(now)
        for rank in self._askers & (self.silent | self.dead):
            self._askers.discard(rank)
            self.outbox.append((rank, Reply(given_up=True)))
        return step

    def _next(self, now: float) -> Step:
        if self._accepted is not None:
            return Step(Kind.VISIT, proposal=self._accepted)
        while True:
            president = self.president
            if president != self._president:
                self._president = president
                self._until = now + self.patience_s
            if president == self.me:
                return self._preside(now)
            if now < self._until:
                return Step(Kind.ASK, (president,), until=self._until)
            self.silent.add(president)

    def _preside(self, now: float) -> Step:
        came = {self.me, *self.guests} - self.dead - self.silent
        gone = came | self.dead | self.silent
        missing = tuple(rank for rank in range(self.n) if rank not in gone)
        if missing and now < self._until:
            self._ask_to_wait(now)
            return Step(Kind.ASK, missing, until=self._until)
        here = self._free(came)
        away = set(range(self.n)) - here - self.dead
        if self.me not in here or not self._may_go_on(here, away):
            return self._despair(away - came)
        for rank in came - here:  # bound by a world that this one would be without
            self.outbox.append((rank, Reply(hopeless=tuple(sorted(away - {rank})))))
        self.silent.update(came - here)
        self.silent.update(missing)
        proposal = Proposal(
            self._tried + 1, tuple(sorted(here)), tuple(sorted(away)), ""
        )
        return Step(Kind.HOST, proposal.members, proposal)

    def _free(self, came: set[int]) -> set[int]:
        """Those who may be in a world together, for all that they have met before."""
        here = set(came)
        while bound := {rank for rank in here if self._is_bound(rank, here)}:
            here -= bound
        return here

    def _is_bound(self, rank: int, here: set[int]) -> bool:
        """Whether others can have settled what this rank met, and go on from there."""
        for members in self._met.get(rank, ()):
            absent = set(members) - here
            if not absent <= self.dead and can_go_on(absent, members):
                return True
        return False

    def _may_go_on(self, here: set[int], away: set[int]) -> bool:
        if len(here) == self.n:
            return True
        if not self.is_strict and (self.one_host or not away):
            return True
        voters = self.voters or self.n
        return outweighs([rank for rank in here if rank < voters], voters)

    def _despair(self, away: set[int]) -> Step:
        missing = tuple(sorted(away or self.dead))
        self._tell_guests(Reply(hopeless=missing))
        self._verdict = Step(Kind.HOPELESS, missing)
        return self._verdict

    def _ask_to_wait(self, now: float) -> None:
        for rank in self.guests - self._acked:
            self.outbox.append((rank, Reply(wait_s=max(0.001, self._until - now))))
        self._acked |= self.guests

    def _tell_guests(self, word: Reply) -> None:
        self.outbox.extend((rank, word) for rank in sorted(self.guests))
