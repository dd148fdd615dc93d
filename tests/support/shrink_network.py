"""A simulated network: processes crash, partitions separate them, messages are delayed.

The part of `shrink_simulation` below rendezvous and barriers. Each process is a
participant in the agreement of every world that it shrinks; participants are connected,
and messages travel over a connection as long as both ends live and reach each other.

A process learns of another's death as real ones do: the kernel reports the exit of a
process on the same host; from another host it only sees that a connection is refused,
and a firewall does the same in front of a live process.
"""

from __future__ import annotations

import heapq
import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from unisono.runtime.world.agreement import (
    ActionKind,
    Agreement,
    AgreementAction,
    AgreementReply,
    AgreementRequest,
    Proposal,
)

Request = tuple[
    int, int, AgreementRequest
]  # the sender's rank, the connection, the message
WAIT_S = 10.0
_AGAIN_S = 0.5
_END_S = 2000.0
_ACTS = {ActionKind.HOST: "host", ActionKind.JOIN: "join", ActionKind.SETTLE: "settle"}


@dataclass(frozen=True)
class Partition:
    """Processes that cannot reach each other from `begin` to `end`.

    `cut` are pairs of sender and receiver: a partition may have one direction. If it
    refuses, connecting fails at once and existing connections are reset; if not,
    messages are lost until it ends.
    """

    begin: float
    end: float
    cut: frozenset[tuple[int, int]]
    refuses: bool

    def separates(self, one: int, other: int, now: float) -> bool:
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
        # At the start, or when the early ranks have connected without the late ones.
        begin = rng.choice((0.0, rng.random() * 0.5, WAIT_S + rng.random()))
        lasts = rng.choice((0.3, 3.0, 25.0, 1e9))
        return cls(begin, begin + lasts, frozenset(cut), rng.random() < 0.6)


@dataclass(frozen=True)
class FailureSchedule:
    """The events of one run: when each process calls shrink, crashes or is suspected.

    `hosts` are those of the processes; none means that each has its own. Those in
    `wrong_first_address` have a name with two addresses: the first is another's.
    """

    seed: int
    calls: tuple[float | None, ...]
    crashes: tuple[float | None, ...]
    suspicion: float = 0.0
    slow: float = 0.05
    one_host: bool = False
    hosts: tuple[int, ...] = ()
    partitions: tuple[Partition, ...] = ()
    wrong_first_address: frozenset[int] = frozenset()

    @classmethod
    def with_partitions(cls, seed: int) -> FailureSchedule:
        """A random schedule with several hosts and partitions between them."""
        rng = random.Random(seed ^ 0xCA7)
        plain = cls.random(seed)
        n = len(plain.calls)
        hosts = tuple(rng.randrange(rng.choice((2, n))) for _ in range(n))
        number = rng.choice((0, 1, 1, 2))
        partitions = [Partition.random(rng, n) for _ in range(number)]
        for i, each in enumerate(partitions):  # a host always reaches itself
            inside = {(a, b) for a, b in each.cut if hosts[a] == hosts[b]}
            partitions[i] = replace(each, cut=each.cut - inside)
        wrong_first_address = frozenset(p for p in range(n) if rng.random() < 0.2)
        calls = plain.calls
        if rng.random() < 0.3:  # some call when the others have just connected
            late = WAIT_S + rng.random()
            calls = tuple(late if rng.random() < 0.4 else call for call in calls)
        return replace(
            plain,
            calls=calls,
            one_host=False,
            hosts=hosts,
            partitions=tuple(partitions),
            wrong_first_address=wrong_first_address,
        )

    @classmethod
    def random(cls, seed: int) -> FailureSchedule:
        """A random schedule of two to five ranks, most of which fail or are late."""
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
        if rng.random() < 0.4:  # late ranks and false suspicions
            suspicion = rng.choice((0.0, 0.02, 0.2))
            for rank in range(n):
                calls[rank] = rng.choice((calls[rank], calls[rank], 8.0, 30.0, None))
        slow = rng.choice((0.01, 0.05, 0.3))
        near = not suspicion and rng.random() < 0.5  # deaths on one host are certain
        return cls(seed, tuple(calls), tuple(crashes), suspicion, slow, near)

    @property
    def is_fair(self) -> bool:
        """Whether no rank is late and no live rank is suspected."""
        called = all(c is not None and c < 1 for c in self.calls)
        return called and not self.suspicion and not self.partitions

    def host(self, process: int) -> int:
        """The host of a process."""
        if self.one_host:
            return 0
        return self.hosts[process] if self.hosts else process

    def partition(self, one: int, other: int, now: float) -> Partition | None:
        """The partition that separates two processes now."""
        for each in self.partitions:
            if each.separates(one, other, now):
                return each
        return None


@dataclass(eq=False, slots=True)
class SimulatedWorld:
    """A world that is formed, used and left: its members by process."""

    number: int
    members: tuple[int, ...]
    entered: set[int] = field(default_factory=set)
    is_over: bool = False
    is_broken: bool = False
    arrived: tuple[set[int], set[int]] = field(default_factory=lambda: (set(), set()))


@dataclass(eq=False, slots=True)
class Participant:
    """A process in the agreement of one world."""

    process: int
    world: SimulatedWorld
    rules: Agreement
    asked: dict[int, int] = field(default_factory=dict)  # by rank, our connection
    links: dict[int, int] = field(default_factory=dict)  # by rank, their connection
    inbox: list[Request] = field(default_factory=list)
    is_joining: bool = False
    settled: Proposal | None = None
    is_closed: bool = False
    wakes: float = -1.0
    attempts: int = 0


class SimulatedNetwork(ABC):
    """All processes and the events between them, on a virtual clock."""

    def __init__(self, schedule: FailureSchedule) -> None:
        self.schedule = schedule
        self.rng = random.Random(schedule.seed ^ 0x5EED)
        self.n = len(schedule.calls)
        self.now = 0.0
        self.heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.order = count()
        self.crashed: set[int] = set()
        self.participants: dict[tuple[int, int], Participant] = {}
        self.waiting: dict[tuple[int, int], list[Request]] = {}
        self.worlds: dict[tuple[int, Proposal], SimulatedWorld] = {}
        self.in_use: dict[int, SimulatedWorld] = {}
        self.trail: dict[int, list[Participant]] = {p: [] for p in range(self.n)}
        self.ends: dict[int, str] = {}
        first = SimulatedWorld(0, tuple(range(self.n)))
        self.numbers = count(1)
        for process in range(self.n):
            crash, call = schedule.crashes[process], schedule.calls[process]
            if crash is not None:
                self.at(crash, self.crash, process)
            if call is not None:
                self.at(call, self.call, process, first)
        for partition in schedule.partitions:
            self.at(partition.begin, self.begin_partition, partition)

    def at(self, when: float, what: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self.heap, (when, next(self.order), what, args))

    def soon(self, what: Callable[..., None], *args: Any) -> None:
        delay = self.rng.random() * self.schedule.slow
        self.at(self.now + delay, what, *args)

    def play(self) -> None:
        while self.heap:
            self.now, _, what, args = heapq.heappop(self.heap)
            assert self.now < _END_S, f"{self.schedule}: the simulation does not end"
            what(*args)

    @abstractmethod
    def check_rendezvous(self, world: SimulatedWorld) -> None:
        """Complete or fail a rendezvous if its outcome is known."""

    @abstractmethod
    def break_barrier(self, world: SimulatedWorld, arrived: set[int]) -> None:
        """Fail a barrier to which some member will not come."""

    @abstractmethod
    def host(self, participant: Participant, proposal: Proposal) -> None:
        """Send a proposal to its members and join its rendezvous."""

    @abstractmethod
    def join(self, participant: Participant, proposal: Proposal) -> None:
        """Join the rendezvous of a proposal."""

    @abstractmethod
    def settle(self, participant: Participant, proposal: Proposal) -> None:
        """Keep a world of which not all members are known to have it."""

    # --- processes

    def call(
        self, process: int, world: SimulatedWorld, is_strict: bool = False
    ) -> None:
        """A process calls shrink."""
        if process in self.crashed:
            return
        self.in_use.pop(process, None)
        rank = world.members.index(process)
        near = self.schedule.one_host
        rules = Agreement(rank, len(world.members), 0, WAIT_S, near, is_strict)
        participant = Participant(process, world, rules)
        self.participants[process, world.number] = participant
        self.trail[process].append(participant)
        participant.inbox = self.waiting.pop((process, world.number), [])
        self.advance(participant)

    def crash(self, process: int) -> None:
        self.crashed.add(process)
        self.in_use.pop(process, None)
        self.ends[process] = "crashed"
        for participant in list(self.participants.values()):
            if process in participant.world.members:
                rank = participant.world.members.index(process)
                self.soon(self.lose, participant, rank, 0)
        for world in list(self.worlds.values()):
            if process in world.members:
                self.check_rendezvous(world)
                for arrived in world.arrived:
                    self.break_barrier(world, arrived)
        for user, world in list(self.in_use.items()):
            if process in world.members:
                self.soon(self.notice_loss, user, world)

    def begin_partition(self, partition: Partition) -> None:
        """A partition begins: rendezvous and barriers across it fail."""
        for world in list(self.worlds.values()):
            if self.is_partitioned(world):
                self.check_rendezvous(world)
                for arrived in world.arrived:
                    self.break_barrier(world, arrived)
        for user, world in list(self.in_use.items()):
            if self.is_partitioned(world):
                self.soon(self.notice_loss, user, world)
        if partition.refuses:
            self.reset(partition)

    def reset(self, partition: Partition) -> None:
        """Reset the connections across a partition."""
        for participant in list(self.participants.values()):
            for rank, other in enumerate(participant.world.members):
                if partition.separates(participant.process, other, self.now):
                    self.soon(self.lose, participant, rank, 0)

    def is_partitioned(self, world: SimulatedWorld) -> bool:
        """Whether some of its members cannot reach each other."""
        find = self.schedule.partition
        members = world.members
        return any(find(a, b, self.now) for a in members for b in members if a < b)

    def notice_loss(self, process: int, world: SimulatedWorld) -> None:
        """A process that uses a world with a lost member shrinks it."""
        if self.in_use.get(process) is world:
            self.call(process, world)

    def lose(self, participant: Participant, rank: int, link: int) -> None:
        """A connection of this rank has closed, or all of them (0)."""
        participant.inbox = [
            one for one in participant.inbox if one[0] != rank or one[1] != link
        ]
        if not self.is_idle(participant):
            return
        if link in (0, participant.asked.get(rank)):
            participant.asked.pop(rank, None)
        if link in (0, participant.links.get(rank)):
            participant.rules.follower_left(rank)
        self.advance(participant)

    # --- messages

    def ask(self, participant: Participant, rank: int) -> None:
        if rank in participant.asked:
            return
        link = participant.asked[rank] = next(self.numbers)
        if self.rng.random() < self.schedule.suspicion:
            self.soon(self.learn, participant, rank, link, False)
        self.soon(self.try_connect, participant, rank, link)

    def learn(
        self, participant: Participant, rank: int, link: int, is_certain: bool
    ) -> None:
        """An attempt to reach a rank has failed."""
        if self.is_idle(participant) and participant.asked.get(rank) == link:
            participant.asked.pop(rank)
            if is_certain:
                participant.rules.learn(dead=[rank])
            else:
                participant.rules.learn(unreachable=[rank])
            self.advance(participant)

    def refused(self, participant: Participant, rank: int, link: int) -> None:
        """A connection was refused."""
        self.soon(self.learn, participant, rank, link, self.schedule.one_host)

    def addresses(self, process: int) -> list[int]:
        """The processes at the addresses of a process's host name."""
        others = (
            [(process + 1) % self.n]
            if process in self.schedule.wrong_first_address
            else []
        )
        return [*others, process]

    def try_connect(self, participant: Participant, rank: int, link: int) -> None:
        """Try all addresses of a rank; retry later if the network lost the attempt."""
        if participant.asked.get(rank) != link or not self.is_idle(participant):
            return
        process = participant.world.members[rank]
        is_lost = False
        for found in self.addresses(process):
            cut = self.schedule.partition(participant.process, found, self.now)
            if cut is None and found == process and self.listens(participant, process):
                self.arrive(participant, rank, link, participant.rules.request())
                return
            is_lost |= cut is not None and not cut.refuses
        if is_lost:
            self.at(self.now + _AGAIN_S, self.try_connect, participant, rank, link)
        elif self.is_known_dead(participant, process):
            self.soon(self.learn, participant, rank, link, True)
        else:
            self.refused(participant, rank, link)

    def listens(self, participant: Participant, process: int) -> bool:
        """Whether a process accepts connections for this world's agreement."""
        other = self.participants.get((process, participant.world.number))
        if process in self.crashed or (other is not None and other.is_closed):
            return False
        return other is not None or process not in self.ends

    def is_known_dead(self, participant: Participant, process: int) -> bool:
        """Whether this participant knows for certain that a process has exited."""
        host = self.schedule.host
        return process in self.crashed and host(process) == host(participant.process)

    def arrive(
        self, participant: Participant, rank: int, link: int, message: AgreementRequest
    ) -> None:
        """A request reaches the process of another rank."""
        process = participant.world.members[rank]
        source = participant.rules.me
        key = process, participant.world.number
        other = self.participants.get(key)
        if other is None:
            self.waiting.setdefault(key, []).append((source, link, message))
        elif other.settled is not None:
            self.soon(
                self.receive_reply,
                participant,
                rank,
                link,
                AgreementReply(settled=other.settled),
            )
        else:
            other.inbox.append((source, link, message))
            self.advance(other)

    def receive_reply(
        self, participant: Participant, rank: int, link: int, message: AgreementReply
    ) -> None:
        if not self.is_idle(participant) or participant.asked.get(rank) != link:
            return
        other = participant.world.members[rank]
        cut = self.schedule.partition(participant.process, other, self.now)
        if cut is None:
            participant.rules.receive_reply(rank, message, self.now)
            self.advance(participant)
        elif cut.refuses:
            self.soon(self.lose, participant, rank, link)
        elif cut.end < _END_S:  # retransmitted until it gets through
            self.at(cut.end, self.receive_reply, participant, rank, link, message)

    def is_idle(self, participant: Participant) -> bool:
        busy = (
            participant.is_joining
            or participant.is_closed
            or participant.settled is not None
        )
        return not busy and participant.process not in self.crashed

    def advance(self, participant: Participant) -> None:
        """Handle received requests, then do what the agreement's rules ask for."""
        if not self.is_idle(participant):
            return
        rules = participant.rules
        for rank, link, message in participant.inbox:
            if participant.world.members[rank] not in self.crashed:
                participant.links[rank] = link
                rules.receive_request(rank, message)
        participant.inbox.clear()
        members = enumerate(participant.world.members)
        rules.learn(dead=[r for r, p in members if self.is_known_dead(participant, p)])
        step = rules.step(self.now)
        self.flush(participant)
        if step.kind is ActionKind.ASK:
            self.ask_all(participant, step)
        elif step.proposal is not None and step.kind in _ACTS:
            getattr(self, _ACTS[step.kind])(participant, step.proposal)
        else:
            self.end(participant.process, step.kind.name)

    def ask_all(self, participant: Participant, step: AgreementAction) -> None:
        """Send requests to the ranks of a step and cancel all others."""
        for rank in step.ranks:
            self.ask(participant, rank)
        for rank in participant.asked.keys() - set(step.ranks):
            self.cancel_request(participant, rank)
        if step.until > participant.wakes:
            participant.wakes = step.until
            self.at(step.until + 1e-6, self.advance, participant)

    def cancel_request(self, participant: Participant, rank: int) -> None:
        """Close the connection to a rank that was asked."""
        link = participant.asked.pop(rank)
        other = self.participants.get(
            (participant.world.members[rank], participant.world.number)
        )
        if other is not None:
            self.soon(self.lose, other, participant.rules.me, link)

    def flush(self, participant: Participant) -> None:
        for rank, message in participant.rules.outbox:
            other = self.participants.get(
                (participant.world.members[rank], participant.world.number)
            )
            if other is not None and rank in participant.links:
                self.soon(
                    self.receive_reply,
                    other,
                    participant.rules.me,
                    participant.links[rank],
                    message,
                )
        participant.rules.outbox.clear()

    def end(self, process: int, how: str) -> None:
        self.ends[process] = how
        for participant in self.trail[process]:
            participant.is_closed = True
            for rank, link, _ in participant.inbox:
                asker = self.participants.get(
                    (participant.world.members[rank], participant.world.number)
                )
                if asker is not None:
                    self.soon(self.lose, asker, participant.rules.me, link)
        for other in list(self.participants.values()):
            if process in other.world.members:
                self.soon(self.lose, other, other.world.members.index(process), 0)
