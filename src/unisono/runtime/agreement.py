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

*Gone* has two meanings. Dead is certain: a process that ended, or closed for good.
Silent is not: it cannot be reached, did not come in time, or refuses to come; it may
live, and have others around it; even those that are dead now may have been with it. So
where somebody is silent a group goes on only if it is more than half of all, or half
with rank 0. Of two groups that do not know of each other at most one can be so. A world
in use needs all its members, so two worlds that share a member are never both in use.
On one host nobody is out of reach, and silent is only who has not come: it has agreed
with nobody, and will be told when it comes. There no majority is needed (`is_near`).

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


class Proposal(msgspec.Struct, frozen=True, array_like=True):
    """A world to be: its epoch, its members by their ranks here, who is not asked."""

    epoch: int
    members: tuple[int, ...]
    left_out: tuple[int, ...]
    address: str = ""


class Come(msgspec.Struct, frozen=True, array_like=True):
    """What a rank says to another: it follows it, or (presiding) wants it to come."""

    presides: bool
    tried: int
    dead: tuple[int, ...]
    silent: tuple[int, ...]


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


@dataclass(slots=True)
class Agreement:
    """One rank's part. Tell it what happens, ask it for the next `step`."""

    me: int
    n: int
    epoch: int
    patience_s: float
    is_near: bool = False
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
        )

    # --- what happens

    def learn(self, *, dead: Iterable[int] = (), silent: Iterable[int] = ()) -> None:
        """Some are gone."""
        self.dead.update(dead)
        self.dead.discard(self.me)
        self.silent.update(silent)
        self.silent.discard(self.me)

    def came(self, rank: int, word: Come) -> None:
        """Another rank has said this."""
        self._askers.add(rank)
        if rank in self.silent or rank in self.dead:
            return
        if self.me in word.dead or self.me in word.silent:
            self.silent.add(rank)  # it will not take part with us
            return
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
        if rank == self.president and self.me in proposal.members:
            self._accepted = proposal

    def failed(self, proposal: Proposal, *, met: bool) -> None:
        """The members have not met, or their first barrier has failed (met)."""
        self._tried = max(self._tried, proposal.epoch)
        self._accepted = None
        self._president = -1
        for ranks in (self.guests, self._acked, self._askers):
            ranks.clear()
        self.held = proposal if met else None

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
        here = {self.me, *self.guests} - self.dead - self.silent
        gone = here | self.dead | self.silent
        missing = tuple(rank for rank in range(self.n) if rank not in gone)
        if missing and now < self._until:
            self._ask_to_wait(now)
            return Step(Kind.ASK, missing, until=self._until)
        away = self.silent.union(missing) - self.dead
        if away and not self.is_near and not outweighs(here, self.n):
            self._tell_guests(Reply(hopeless=tuple(sorted(away))))
            self._verdict = Step(Kind.HOPELESS, tuple(sorted(away)))
            return self._verdict
        self.silent.update(missing)
        proposal = Proposal(
            self._tried + 1, tuple(sorted(here)), tuple(sorted(away)), ""
        )
        return Step(Kind.HOST, proposal.members, proposal)

    def _ask_to_wait(self, now: float) -> None:
        for rank in self.guests - self._acked:
            self.outbox.append((rank, Reply(wait_s=max(0.001, self._until - now))))
        self._acked |= self.guests

    def _tell_guests(self, word: Reply) -> None:
        self.outbox.extend((rank, word) for rank in sorted(self.guests))
