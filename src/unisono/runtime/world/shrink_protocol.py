"""`comm.shrink`: those who are left agree on who that is, and meet as a new world.

The rules are in `agreement`; here they are acted out. Each rank opens a door, goes to
whoever presides, and does what it is told; it closes the old world only when all have
come through two barriers in the new one. If the second fails, the rank stands by the
new world and agrees anew from there, while it goes on answering at its old door.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from unisono.errors import ConnectFailed, PeerLost, UnisonoError
from unisono.runtime.communicator import Communicator
from unisono.runtime.world.agreement import (
    MEETING_S,
    Agreement,
    Come,
    Kind,
    Proposal,
    Reply,
    Step,
)
from unisono.runtime.world.membership import Membership, membership_of
from unisono.transports.endpoints import (
    ControlLink,
    ShrinkEndpoint,
    open_shrink_endpoint,
    pause_until,
)
from unisono.transports.session import Session

_RETRY_S = 0.02  # between knocks at a door that is not there yet
_AGAIN_S = 0.5  # at one that cannot be reached
_ENDING_S = 1.0
"""How long after a process has closed its sockets the kernel may say that it ended."""
_ELSEWHERE = Proposal(0, (), ())
"""What is told in a world that came to nothing: those who ask have no part in it."""

First = Callable[[Session, float], "Communicator"]
Attempt = tuple[Proposal, Callable[[], "Communicator"]]
"""A world to be that all have been told of already, and how this rank meets it."""


@dataclass(frozen=True)
class Survived:
    """The new world, and the ranks of the old one that live and have no part in it."""

    comm: Communicator
    left_out: tuple[int, ...]


def survive(
    transport: Session,
    member: Membership,
    timeout_s: float,
    first: First,
    attempt: Attempt | None = None,
    *,
    dead: Iterable[int] = (),
    voters: int = 0,
) -> Survived:
    """Agree with the others of this world; `first` makes a communicator.

    If there is an `attempt`, they agree only if that fails. `dead` are ranks that have
    ended for certain, by the caller's word; `voters` as in Agreement.
    """
    names = list(range(len(transport.peers)))  # in the world that shrink was called on
    parts: list[_Survivor] = []
    left_out: list[int] = []
    is_strict = False
    try:
        while True:
            part = _Survivor(transport, member, timeout_s, first, is_strict, voters)
            parts.append(part)
            part.rules.learn(dead=dead)
            dead = ()
            proposal, comm, all_know = part.agree(attempt)
            voters = len(proposal.members) if attempt is not None else 0
            attempt = None
            is_strict = is_strict or bool(proposal.left_out)
            left_out += [names[r] for r in proposal.left_out]
            names = [names[r] for r in proposal.members]
            names += [-1] * (comm.world_size - len(names))  # newcomers had none
            member = member.later(proposal.epoch)
            transport = comm.core.transport
            if all_know:
                break
            parts[-1].answer(proposal)
            comm.core.abandon()
    except BaseException:
        for part in parts:
            part.transport.close()
            part.close()
        member.let_go()
        raise
    if left_out:
        parts[-1].answer(proposal)
        member = member.later(
            member.epoch, tuple(d for p in parts for d in p.endpoints)
        )
    comm.core.membership = member
    for part in parts:
        _retire(part.transport, keeps_endpoint=bool(left_out))
        if not left_out:
            part.close()
    return Survived(comm, tuple(sorted(r for r in left_out if r >= 0)))


def _retire(transport: Session, *, keeps_endpoint: bool) -> None:
    """End a world, but not necessarily the place where others knock."""
    if not keeps_endpoint or transport.listener is None:
        transport.close()
        return
    transport.retire()
    if transport.streams is not None:
        transport.streams.close()


@dataclass(eq=False)
class _Survivor:
    """One rank's part in the agreement of one world."""

    transport: Session
    member: Membership
    timeout_s: float
    first: First
    is_strict: bool = False
    voters: int = 0
    endpoints: list[ShrinkEndpoint] = field(default_factory=list)
    asked: dict[int, ControlLink] = field(default_factory=dict)
    """Links that this rank has made."""
    came: dict[int, ControlLink] = field(default_factory=dict)
    """Links of those who have come, and said so."""
    mute: list[ControlLink] = field(default_factory=list)
    """Links of those who have said nothing yet."""
    retry: dict[int, float] = field(default_factory=dict)
    ending: dict[int, float] = field(default_factory=dict)
    """Until when the kernel is waited for to say that a rank of this host ended."""
    held: Communicator | None = None
    attempts: int = 0

    def __post_init__(self) -> None:
        """Open the door."""
        self.endpoint = open_shrink_endpoint(
            self.transport, self.member.job, self.member.epoch
        )
        self.endpoints.append(self.endpoint)
        self.rules = Agreement(
            self.transport.rank,
            len(self.transport.peers),
            self.member.epoch,
            self.timeout_s,
            self.endpoint.is_local,
            self.is_strict,
            self.voters,
        )

    def agree(
        self, attempt: Attempt | None = None
    ) -> tuple[Proposal, Communicator, bool]:
        """What was settled, and whether all are known to have settled it."""
        try:
            found = None
            if attempt is not None:
                found = self._try(attempt[0], lambda _: attempt[1]())
            while found is None:
                found = self._act()
            return found
        finally:
            self._drop_links()
            self._drop_held()

    def _act(self) -> tuple[Proposal, Communicator, bool] | None:
        """One step by the rules."""
        self._hear_kernel()
        step = self.rules.step(time.monotonic())
        self._tell_all()
        if step.kind is Kind.ASK:
            self._ask(step)
            return None
        if step.kind is Kind.SETTLE and step.proposal and self.held is not None:
            comm, self.held = self.held, None
            return self._settled(step.proposal, comm, False)
        if step.kind in (Kind.HOST, Kind.VISIT) and step.proposal:
            hosts = step.kind is Kind.HOST
            return self._try(step.proposal, lambda met: self._meet(met, hosts))
        raise self._error(step)

    # --- words

    def _ask(self, step: Step) -> None:
        """Go to those who are wanted, and wait until something happens."""
        now = time.monotonic()
        for rank in self.asked.keys() - set(step.ranks):
            self.asked.pop(rank).close()
        for rank in step.ranks:
            if rank not in self.asked and self.retry.get(rank, 0.0) <= now:
                self._connect(rank)
                if rank in self.rules.dead or rank in self.rules.silent:
                    return
        waits = [self.retry[r] for r in step.ranks if r not in self.asked]
        links = [*self.asked.values(), *self.came.values(), *self.mute]
        for link in pause_until(self.endpoint, links, min([step.until, *waits])):
            self._read(link)
        self.mute += self.endpoint.arrivals()

    def _hear_kernel(self) -> None:
        """Learn who of this host has ended, which nobody else can tell for certain.

        A process that ends closes its connections first. So if others have given up a
        rank of this host, the kernel is given a moment to say whether it has ended.
        """
        if self.endpoint.is_local:  # there the other's door tells, see `_refused`
            return
        engine, rules = self.transport.engine, self.rules
        for rank in self.transport.here(range(rules.n)):
            if rank == rules.me or rank in rules.dead:
                continue
            while not engine.ended(rank) and self._may_be_ending(rank):
                time.sleep(_RETRY_S)
            if engine.ended(rank):
                rules.learn(dead=[rank])

    def _may_be_ending(self, rank: int) -> bool:
        if rank not in self.rules.silent:
            return False
        now = time.monotonic()
        return now < self.ending.setdefault(rank, now + _ENDING_S)

    def _connect(self, rank: int) -> None:
        is_dead = self.transport.engine.dead(rank)
        self.retry[rank] = time.monotonic() + _RETRY_S
        try:
            link = self.endpoint.connect(rank)
        except ConnectionRefusedError:
            self._refused(rank, is_dead)
        except ConnectionError:
            return  # it closed on us: full, or just about to end
        except OSError:
            self.retry[rank] = time.monotonic() + _AGAIN_S
            if is_dead:
                self.rules.learn(silent=[rank])
        else:
            link.send(self.rules.come())
            self.asked[rank] = link

    def _refused(self, rank: int, is_dead: bool) -> None:
        """Nobody opens. Only within a host that is certain to be the rank's own doing.

        On one host a rank opens its door only when it comes to agree; if it is dead, or
        has left its world, it will not. From another host the same answer may be a
        firewall's, and the rank may live: it is given up, but not for dead.
        """
        if self.endpoint.is_local and not is_dead:
            return
        if self.endpoint.is_local:
            self.rules.learn(dead=[rank])
        else:
            self.rules.learn(silent=[rank])

    def _read(self, link: ControlLink) -> None:
        rank = link.rank
        if self.asked.get(rank) is link:
            reply = link.receive(Reply)
            if reply is None or not reply.is_sound(self.rules.n):
                self.asked.pop(rank).close()
                self.retry[rank] = time.monotonic() + _RETRY_S
            else:
                self.rules.heard(rank, reply, time.monotonic())
            return
        come = link.receive(Come)
        if link in self.mute:
            self.mute.remove(link)
            if come is not None and self._may_say(rank, come):
                self._replace(rank, link)
                self.rules.came(rank, come)
                return
        elif self.came.get(rank) is link:
            del self.came[rank]
            self.rules.left(rank)
        link.close()

    def _may_say(self, rank: int, come: Come) -> bool:
        """Whether it is a rank of this world that speaks, and of no other."""
        is_other = 0 <= rank < self.rules.n and rank != self.rules.me
        return is_other and come.is_sound(self.rules.n)

    def _replace(self, rank: int, link: ControlLink) -> None:
        """A rank that comes anew has given up how it came before."""
        older = self.came.pop(rank, None)
        if older is not None:
            self.rules.left(rank)
            older.close()
        self.came[rank] = link

    def _tell_all(self) -> None:
        for rank, reply in self.rules.outbox:
            if rank in self.came:
                self.came[rank].send(reply)
        self.rules.outbox.clear()

    def _drop_links(self) -> None:
        for link in [*self.asked.values(), *self.came.values(), *self.mute]:
            link.close()
        self.asked.clear()
        self.came.clear()
        self.mute.clear()

    # --- meetings

    def _try(
        self, proposal: Proposal, meet: Callable[[list[Proposal]], Communicator]
    ) -> tuple[Proposal, Communicator, bool] | None:
        """Meet those of a proposal, and pass two barriers with them."""
        self._drop_held()
        self.attempts += 1
        met = [proposal]
        comm: Communicator | None = None
        try:
            comm = meet(met)
            comm.barrier(timeout_s=MEETING_S)
        except (UnisonoError, OSError):
            if self.attempts > 2 * self.rules.n + 3:
                if comm is not None:
                    comm.close()
                raise
            self._failed(met[0], comm)
            return None
        except BaseException:
            if comm is not None:
                comm.close()
            raise
        try:
            comm.barrier(timeout_s=MEETING_S)
        except UnisonoError:
            return self._settled(met[0], comm, False)
        return self._settled(met[0], comm, True)

    def _meet(self, met: list[Proposal], hosts: bool) -> Communicator:
        """The communicator of a proposal; what is in `met` gets its place."""
        proposal = met[0]
        place = proposal.address
        if hosts:
            place = self._own_place()

        def announce(found: str) -> None:
            if hosts:
                met[0] = msgspec.structs.replace(proposal, address=found)
                for rank in proposal.members:
                    if rank in self.came:
                        self.came[rank].send(Reply(proposal=met[0]))

        member = self.member.later(proposal.epoch)
        transport = member.meet(
            proposal.members.index(self.rules.me),
            len(proposal.members),
            place,
            timeout_s=min(MEETING_S, max(self.timeout_s, 1.0)),
            announce=announce,
            lost=self._loss_of(proposal),
        )
        try:
            comm = self.first(transport, MEETING_S)
        except BaseException:
            transport.close()
            raise
        comm.core.membership = member
        return comm

    def _own_place(self) -> str:
        if self.transport.listener is None:
            return secrets.token_hex(8)
        here = self.transport.listener.address
        return str(type(here)(here.host, 0))

    def _loss_of(self, proposal: Proposal) -> Callable[[], str]:
        """Tells why a meeting cannot be: one has died, or the host gave it up."""
        engine, peers = self.transport.engine, self.transport.peers
        living = [r for r in proposal.members if not engine.dead(r)]
        host = self.asked.get(proposal.members[0])

        def lost() -> str:
            for rank in living:
                if engine.dead(rank):
                    return f"shrink: {peers[rank]} died before all had met"
            if host is not None and host.has_ended():
                return f"shrink: {peers[host.rank]} gave up the meeting"
            return ""

        return lost

    def _failed(self, proposal: Proposal, comm: Communicator | None) -> None:
        self.held = comm
        self._drop_links()
        self.retry.clear()
        self.rules.failed(proposal, met=comm is not None)

    def _drop_held(self) -> None:
        """What was met came to nothing: whoever stands by it is to know."""
        comm, self.held = self.held, None
        if comm is None:
            return
        member = membership_of(comm)
        comm.core.abandon()
        transport = comm.core.transport
        if len(transport.peers) > 1:
            endpoint = open_shrink_endpoint(transport, member.job, member.epoch)
            endpoint.answer(Reply(settled=_ELSEWHERE))
            self.endpoints.append(endpoint)
        _retire(transport, keeps_endpoint=True)

    def _settled(
        self, proposal: Proposal, comm: Communicator, all_know: bool
    ) -> tuple[Proposal, Communicator, bool]:
        for link in self.came.values():
            link.send(Reply(settled=proposal))
        return proposal, comm, all_know

    def answer(self, proposal: Proposal) -> None:
        """From now on tell whoever still comes to this world what was settled."""
        self.endpoint.answer(Reply(settled=proposal))

    def close(self) -> None:
        """Leave this world for good."""
        for endpoint in self.endpoints:
            endpoint.close()

    # --- errors

    def _error(self, step: Step) -> UnisonoError:
        peers = self.transport.peers
        if step.kind is Kind.HOPELESS:
            away = ", ".join(str(peers[r]) for r in step.ranks)
            return ConnectFailed(
                f"shrink: {away} did not come within {self.timeout_s:g} s or cannot be "
                "reached, and may live: from another host a process that ended and a "
                "network that refuses look the same. Those who came are too few to go "
                f"on without them (more than half of {self.rules.n}, or half with rank "
                "0): start the job again, call shrink with a longer timeout_s on all, "
                "or, if you know that they have ended, with dead=[their ranks]",
                missing=step.ranks,
            )
        return PeerLost(
            f"shrink: rank {self.rules.me} was left out: the others have gone on "
            f"without it{_epoch_of(step.proposal)}, because it did not come in time "
            "or could not be reached; start it anew, with init(join=True), while they "
            "call grow",
            ranks=[self.rules.me],
            pids=[peers[self.rules.me].pid],
            host=peers[self.rules.me].host,
            collective="shrink",
        )


def _epoch_of(proposal: Proposal | None) -> str:
    if proposal is None or not proposal.members:
        return ""
    told = ", ".join(map(str, proposal.members))
    return f" in epoch {proposal.epoch} (ranks {told} of this one)"
