"""Processes that crash, networks that part, and words that take their time.

The part of the simulation in `survivors` that knows nothing of meetings. Each process
has a seat in every world whose agreement it takes part in; a seat has links to others,
and words that travel over them, for as long as both ends live and reach each other.

What a process learns of another is what it can in truth: the kernel tells it who of its
own host has ended; from elsewhere it only hears that a connection is refused, and a
firewall says the same of one that lives.
"""

from __future__ import annotations

import heapq
import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from unisono.runtime.world.agreement import Agreement, Come, Kind, Proposal, Reply, Step

Letter = tuple[int, int, Come]  # from whom, over which link
PATIENCE_S = 10.0
_AGAIN_S = 0.5
_END_S = 2000.0
_ACTS = {Kind.HOST: "host", Kind.VISIT: "enter", Kind.SETTLE: "settle"}


@dataclass(frozen=True)
class Partition:
    """From when to when which processes do not reach which; what the network says.

    `cut` are pairs of sender and receiver: a partition may have one direction. If it
    refuses, who connects is told at once that nobody is there, and connections that
    were there are reset; if not, what is sent is lost until it ends.
    """

    begin: float
    end: float
    cut: frozenset[tuple[int, int]]
    refuses: bool

    def parts(self, one: int, other: int, now: float) -> bool:
        """Whether no connection between the two works."""
        either = (one, other) in self.cut or (other, one) in self.cut
        return either and self.begin <= now < self.end

    @classmethod
    def random(cls, rng: random.Random, n: int) -> Partition:
        """Two sides, both directions or one, most of the pairs between them."""
        side = {p for p in range(n) if rng.random() < 0.5}
        one_way, leaky = rng.random() < 0.3, rng.random() < 0.3
        cut = {
            (a, b)
            for a in range(n)
            for b in range(n)
            if (a in side) != (b in side)
            and (a in side or not one_way)
            and not (leaky and rng.random() < 0.3)
        }
        # At the beginning, or when those who did not wait for the late ones have met.
        begin = rng.choice((0.0, rng.random() * 0.5, PATIENCE_S + rng.random()))
        lasts = rng.choice((0.3, 3.0, 25.0, 1e9))
        return cls(begin, begin + lasts, frozenset(cut), rng.random() < 0.6)


@dataclass(frozen=True)
class Schedule:
    """What happens in one run: who calls when, who crashes when, what is suspected.

    `hosts` are those of the processes; none means that each has its own. `misnamed` are
    those whose names stand for two addresses, of which the first is another's.
    """

    seed: int
    calls: tuple[float | None, ...]
    crashes: tuple[float | None, ...]
    suspicion: float = 0.0
    slow: float = 0.05
    is_near: bool = False
    hosts: tuple[int, ...] = ()
    partitions: tuple[Partition, ...] = ()
    misnamed: frozenset[int] = frozenset()

    @classmethod
    def parted(cls, seed: int) -> Schedule:
        """The same with several hosts, and a network that parts them."""
        rng = random.Random(seed ^ 0xCA7)
        plain = cls.random(seed)
        n = len(plain.calls)
        hosts = tuple(rng.randrange(rng.choice((2, n))) for _ in range(n))
        parts = rng.choice((0, 1, 1, 2))
        partitions = [Partition.random(rng, n) for _ in range(parts)]
        for number, part in enumerate(partitions):  # a host reaches itself
            inside = {(a, b) for a, b in part.cut if hosts[a] == hosts[b]}
            partitions[number] = replace(part, cut=part.cut - inside)
        misnamed = frozenset(p for p in range(n) if rng.random() < 0.2)
        calls = plain.calls
        if rng.random() < 0.3:  # some come while the others have just met
            late = PATIENCE_S + rng.random()
            calls = tuple(late if rng.random() < 0.4 else call for call in calls)
        return replace(
            plain,
            calls=calls,
            is_near=False,
            hosts=hosts,
            partitions=tuple(partitions),
            misnamed=misnamed,
        )

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
        called = all(c is not None and c < 1 for c in self.calls)
        return called and not self.suspicion and not self.partitions

    def host(self, process: int) -> int:
        """Where a process runs."""
        if self.is_near:
            return 0
        return self.hosts[process] if self.hosts else process

    def partition(self, one: int, other: int, now: float) -> Partition | None:
        """What keeps two processes apart now."""
        for each in self.partitions:
            if each.parts(one, other, now):
                return each
        return None


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
    attempts: int = 0


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
        for partition in schedule.partitions:
            self.at(partition.begin, self.part, partition)

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

    def call(self, process: int, world: World, is_strict: bool = False) -> None:
        """A process calls shrink."""
        if process in self.crashed:
            return
        self.in_use.pop(process, None)
        rank = world.members.index(process)
        near = self.schedule.is_near
        rules = Agreement(rank, len(world.members), 0, PATIENCE_S, near, is_strict)
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
        for world in list(self.worlds.values()):
            if process in world.members:
                self.check_meeting(world)
                for arrived in world.arrived:
                    self.break_barrier(world, arrived)
        for user, world in list(self.in_use.items()):
            if process in world.members:
                self.soon(self.find_out, user, world)

    def part(self, partition: Partition) -> None:
        """A partition begins: what goes on between its sides comes to an end."""
        for world in list(self.worlds.values()):
            if self.is_parted(world):
                self.check_meeting(world)
                for arrived in world.arrived:
                    self.break_barrier(world, arrived)
        for user, world in list(self.in_use.items()):
            if self.is_parted(world):
                self.soon(self.find_out, user, world)
        if partition.refuses:
            self.reset(partition)

    def reset(self, partition: Partition) -> None:
        """End the links across a partition."""
        for seat in list(self.seats.values()):
            for rank, other in enumerate(seat.world.members):
                if partition.parts(seat.process, other, self.now):
                    self.soon(self.lose, seat, rank, 0)

    def is_parted(self, world: World) -> bool:
        """Whether some of its members do not reach each other."""
        find = self.schedule.partition
        members = world.members
        return any(find(a, b, self.now) for a in members for b in members if a < b)

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
            self.soon(self.learn, seat, rank, link, False)
        self.soon(self.knock, seat, rank, link)

    def learn(self, seat: Seat, rank: int, link: int, is_certain: bool) -> None:
        """What became of an attempt to reach somebody: it is gone."""
        if self.is_idle(seat) and seat.asked.get(rank) == link:
            seat.asked.pop(rank)
            if is_certain:
                seat.rules.learn(dead=[rank])
            else:
                seat.rules.learn(silent=[rank])
            self.go_on(seat)

    def refused(self, seat: Seat, rank: int, link: int) -> None:
        """Nobody listens there, or so it is said."""
        self.soon(self.learn, seat, rank, link, self.schedule.is_near)

    def addresses(self, process: int) -> list[int]:
        """Which processes are found at the addresses that a process's name has."""
        others = [(process + 1) % self.n] if process in self.schedule.misnamed else []
        return [*others, process]

    def knock(self, seat: Seat, rank: int, link: int) -> None:
        """Try to reach another: at all addresses, until there is an answer."""
        if seat.asked.get(rank) != link or not self.is_idle(seat):
            return
        process = seat.world.members[rank]
        is_lost = False
        for found in self.addresses(process):
            cut = self.schedule.partition(seat.process, found, self.now)
            if cut is None and found == process and self.listens(seat, process):
                self.arrive(seat, rank, link, seat.rules.come())
                return
            is_lost |= cut is not None and not cut.refuses
        if is_lost:
            self.at(self.now + _AGAIN_S, self.knock, seat, rank, link)
        elif self.kernel_tells(seat, process):
            self.soon(self.learn, seat, rank, link, True)
        else:
            self.refused(seat, rank, link)

    def listens(self, seat: Seat, process: int) -> bool:
        """Whether a process takes connections for the agreement of this world."""
        other = self.seats.get((process, seat.world.number))
        if process in self.crashed or (other is not None and other.is_closed):
            return False
        return other is not None or process not in self.ends

    def kernel_tells(self, seat: Seat, process: int) -> bool:
        """Whether it is certain to this seat that a process has ended."""
        host = self.schedule.host
        return process in self.crashed and host(process) == host(seat.process)

    def arrive(self, seat: Seat, rank: int, link: int, word: Come) -> None:
        """What one says reaches the process of another."""
        process = seat.world.members[rank]
        source = seat.rules.me
        key = process, seat.world.number
        other = self.seats.get(key)
        if other is None:
            self.waiting.setdefault(key, []).append((source, link, word))
        elif other.settled is not None:
            self.soon(self.hear, seat, rank, link, Reply(settled=other.settled))
        else:
            other.inbox.append((source, link, word))
            self.go_on(other)

    def hear(self, seat: Seat, rank: int, link: int, word: Reply) -> None:
        if not self.is_idle(seat) or seat.asked.get(rank) != link:
            return
        other = seat.world.members[rank]
        cut = self.schedule.partition(seat.process, other, self.now)
        if cut is None:
            seat.rules.heard(rank, word, self.now)
            self.go_on(seat)
        elif cut.refuses:
            self.soon(self.lose, seat, rank, link)
        elif cut.end < _END_S:  # sent again until it gets through
            self.at(cut.end, self.hear, seat, rank, link, word)

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
        members = enumerate(seat.world.members)
        rules.learn(dead=[r for r, p in members if self.kernel_tells(seat, p)])
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
            for rank, link, _ in seat.inbox:
                asker = self.seats.get((seat.world.members[rank], seat.world.number))
                if asker is not None:
                    self.soon(self.lose, asker, seat.rules.me, link)
        for other in list(self.seats.values()):
            if process in other.world.members:
                self.soon(self.lose, other, other.world.members.index(process), 0)
