"""Processes that crash and words that take their time: what survivors agree amid.

The part of the simulation in `survivors` that knows nothing of meetings. Each process
has a seat in every world whose agreement it takes part in; a seat has links to others,
and words that travel over them, for as long as both ends live.
"""

from __future__ import annotations

import heapq
import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from unisono.runtime.agreement import Agreement, Come, Kind, Proposal, Reply, Step

Letter = tuple[int, int, Come]  # from whom, over which link
PATIENCE_S = 10.0
_END_S = 2000.0
_ACTS = {Kind.HOST: "host", Kind.VISIT: "enter", Kind.SETTLE: "settle"}


@dataclass(frozen=True)
class Schedule:
    """What happens in one run: who calls when, who crashes when, what is suspected."""

    seed: int
    calls: tuple[float | None, ...]
    crashes: tuple[float | None, ...]
    suspicion: float = 0.0
    slow: float = 0.05
    is_near: bool = False

    @classmethod
    def random(cls, seed: int) -> Schedule:
        """Two to five ranks, most of them unlucky."""
        rng = random.Random(seed)
        n = rng.choice((2, 3, 3, 4, 4, 5))
        crash_rate = rng.choice((0.2, 0.5, 0.8))
        reach = rng.choice((0.3, 1.0, 6.0))
        crashes = [
            rng.random() * reach if rng.random() < crash_rate else None
            for _ in range(n)
        ]
        calls: list[float | None] = [rng.random() * 0.3 for _ in range(n)]
        suspicion = 0.0
        if rng.random() < 0.4:  # late ones, and doubts
            suspicion = rng.choice((0.0, 0.02, 0.2))
            for rank in range(n):
                calls[rank] = rng.choice((calls[rank], calls[rank], 8.0, 30.0, None))
        slow = rng.choice((0.01, 0.05, 0.3))
        near = not suspicion and rng.random() < 0.5  # on one host there is no doubt
        return cls(seed, tuple(calls), tuple(crashes), suspicion, slow, near)

    @property
    def is_fair(self) -> bool:
        """Whether nobody is late, and none suspected who lives."""
        return not self.suspicion and all(c is not None and c < 1 for c in self.calls)


@dataclass(eq=False, slots=True)
class World:
    """A world that is met, used and left: its members by process."""

    number: int
    members: tuple[int, ...]
    entered: set[int] = field(default_factory=set)
    is_over: bool = False
    is_broken: bool = False
    arrived: tuple[set[int], set[int]] = field(default_factory=lambda: (set(), set()))


@dataclass(eq=False, slots=True)
class Seat:
    """A process's part in the agreement of one world."""

    process: int
    world: World
    rules: Agreement
    asked: dict[int, int] = field(default_factory=dict)  # by rank, the link
    links: dict[int, int] = field(default_factory=dict)  # by which others came
    inbox: list[Letter] = field(default_factory=list)
    is_away: bool = False
    settled: Proposal | None = None
    is_closed: bool = False
    wakes: float = -1.0


class Crowd(ABC):
    """All processes, until nothing more happens."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.rng = random.Random(schedule.seed ^ 0x5EED)
        self.n = len(schedule.calls)
        self.now = 0.0
        self.heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.order = count()
        self.crashed: set[int] = set()
        self.seats: dict[tuple[int, int], Seat] = {}
        self.waiting: dict[tuple[int, int], list[Letter]] = {}
        self.worlds: dict[tuple[int, Proposal], World] = {}
        self.in_use: dict[int, World] = {}
        self.trail: dict[int, list[Seat]] = {p: [] for p in range(self.n)}
        self.ends: dict[int, str] = {}
        first = World(0, tuple(range(self.n)))
        self.numbers = count(1)
        for process in range(self.n):
            crash, call = schedule.crashes[process], schedule.calls[process]
            if crash is not None:
                self.at(crash, self.crash, process)
            if call is not None:
                self.at(call, self.call, process, first)

    def at(self, when: float, what: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self.heap, (when, next(self.order), what, args))

    def soon(self, what: Callable[..., None], *args: Any) -> None:
        delay = self.rng.random() * self.schedule.slow
        self.at(self.now + delay, what, *args)

    def play(self) -> None:
        while self.heap:
            self.now, _, what, args = heapq.heappop(self.heap)
            assert self.now < _END_S, f"{self.schedule}: it never ends"
            what(*args)

    @abstractmethod
    def check_meeting(self, world: World) -> None:
        """See whether a meeting has come to an end."""

    @abstractmethod
    def break_barrier(self, world: World, arrived: set[int]) -> None:
        """Somebody will not come to a barrier."""

    @abstractmethod
    def host(self, seat: Seat, proposal: Proposal) -> None:
        """Tell others of a proposal, and meet them."""

    @abstractmethod
    def enter(self, seat: Seat, proposal: Proposal) -> None:
        """Come to a meeting."""

    @abstractmethod
    def settle(self, seat: Seat, proposal: Proposal) -> None:
        """Stand by a world in which not all are known to be."""

    # --- processes

    def call(self, process: int, world: World) -> None:
        """A process calls shrink."""
        if process in self.crashed:
            return
        self.in_use.pop(process, None)
        rank = world.members.index(process)
        rules = Agreement(
            rank, len(world.members), 0, PATIENCE_S, self.schedule.is_near
        )
        seat = Seat(process, world, rules)
        self.seats[process, world.number] = seat
        self.trail[process].append(seat)
        seat.inbox = self.waiting.pop((process, world.number), [])
        self.go_on(seat)

    def crash(self, process: int) -> None:
        self.crashed.add(process)
        self.in_use.pop(process, None)
        self.ends[process] = "crashed"
        for seat in list(self.seats.values()):
            if process in seat.world.members:
                rank = seat.world.members.index(process)
                self.soon(self.lose, seat, rank, 0)
        for world in self.worlds.values():
            if process in world.members:
                self.check_meeting(world)
                for arrived in world.arrived:
                    self.break_barrier(world, arrived)
        for user, world in list(self.in_use.items()):
            if process in world.members:
                self.soon(self.find_out, user, world)

    def find_out(self, process: int, world: World) -> None:
        """Whoever uses a world with a dead member shrinks it."""
        if self.in_use.get(process) is world:
            self.call(process, world)

    def lose(self, seat: Seat, rank: int, link: int) -> None:
        """A link of this rank has ended, or all (0)."""
        seat.inbox = [one for one in seat.inbox if one[0] != rank or one[1] != link]
        if not self.is_idle(seat):
            return
        if link in (0, seat.asked.get(rank)):
            seat.asked.pop(rank, None)
        if link in (0, seat.links.get(rank)):
            seat.rules.left(rank)
        self.go_on(seat)

    # --- words

    def ask(self, seat: Seat, rank: int) -> None:
        if rank in seat.asked:
            return
        link = seat.asked[rank] = next(self.numbers)
        if self.rng.random() < self.schedule.suspicion:
            self.soon(self.learn, seat, rank, False)
        self.soon(self.arrive, seat, rank, link, seat.rules.come())

    def learn(self, seat: Seat, rank: int, is_dead: bool) -> None:
        if self.is_idle(seat):
            seat.asked.pop(rank, None)
            if is_dead:
                seat.rules.learn(dead=[rank])
            else:
                seat.rules.learn(silent=[rank])
            self.go_on(seat)

    def arrive(self, seat: Seat, rank: int, link: int, word: Come) -> None:
        """What one says reaches the process of another."""
        process = seat.world.members[rank]
        source = seat.rules.me
        key = process, seat.world.number
        other = self.seats.get(key)
        if (
            process in self.crashed
            or (other is not None and other.is_closed)
            or (other is None and process in self.ends)
        ):
            self.soon(self.learn, seat, rank, True)
        elif other is None:
            self.waiting.setdefault(key, []).append((source, link, word))
        elif other.settled is not None:
            self.soon(self.hear, seat, rank, link, Reply(settled=other.settled))
        elif seat.asked.get(rank) == link:  # else it has gone meanwhile
            other.inbox.append((source, link, word))
            self.go_on(other)

    def hear(self, seat: Seat, rank: int, link: int, word: Reply) -> None:
        if self.is_idle(seat) and seat.asked.get(rank) == link:
            seat.rules.heard(rank, word, self.now)
            self.go_on(seat)

    def is_idle(self, seat: Seat) -> bool:
        busy = seat.is_away or seat.is_closed or seat.settled is not None
        return not busy and seat.process not in self.crashed

    def go_on(self, seat: Seat) -> None:
        """Take in what was said, and do what the rules want."""
        if not self.is_idle(seat):
            return
        rules = seat.rules
        for rank, link, word in seat.inbox:
            if seat.world.members[rank] not in self.crashed:
                seat.links[rank] = link
                rules.came(rank, word)
        seat.inbox.clear()
        step = rules.step(self.now)
        self.flush(seat)
        if step.kind is Kind.ASK:
            self.ask_all(seat, step)
        elif step.proposal is not None and step.kind in _ACTS:
            getattr(self, _ACTS[step.kind])(seat, step.proposal)
        else:
            self.end(seat.process, step.kind.name)

    def ask_all(self, seat: Seat, step: Step) -> None:
        """Those of a step, and nobody else."""
        for rank in step.ranks:
            self.ask(seat, rank)
        for rank in seat.asked.keys() - set(step.ranks):
            self.unask(seat, rank)
        if step.until > seat.wakes:
            seat.wakes = step.until
            self.at(step.until + 1e-6, self.go_on, seat)

    def unask(self, seat: Seat, rank: int) -> None:
        """Leave one that was asked."""
        link = seat.asked.pop(rank)
        other = self.seats.get((seat.world.members[rank], seat.world.number))
        if other is not None:
            self.soon(self.lose, other, seat.rules.me, link)

    def flush(self, seat: Seat) -> None:
        for rank, word in seat.rules.outbox:
            other = self.seats.get((seat.world.members[rank], seat.world.number))
            if other is not None and rank in seat.links:
                self.soon(self.hear, other, seat.rules.me, seat.links[rank], word)
        seat.rules.outbox.clear()

    def end(self, process: int, how: str) -> None:
        self.ends[process] = how
        for seat in self.trail[process]:
            seat.is_closed = True
            for rank, _, _ in seat.inbox:
                asker = self.seats.get((seat.world.members[rank], seat.world.number))
                if asker is not None:
                    self.soon(self.learn, asker, seat.rules.me, True)
        for other in list(self.seats.values()):
            if process in other.world.members:
                self.soon(self.lose, other, other.world.members.index(process), 0)
