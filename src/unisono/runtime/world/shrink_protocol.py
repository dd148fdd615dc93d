"""`comm.shrink`: surviving ranks agree on who they are, and form a new world.

The rules are in `agreement`; here their actions are carried out. Each rank opens an
endpoint, connects to the coordinator, and does what the rules ask for; it closes the
old world only when all have passed two barriers in the new one. If the second fails,
the rank keeps the new world and agrees again from there, while it still answers at its
old endpoint.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from unisono.errors import UnisonoError
from unisono.runtime.communicator import Communicator
from unisono.runtime.world.agreement import (
    RENDEZVOUS_TIMEOUT_S,
    ActionKind,
    Agreement,
    AgreementAction,
    AgreementReply,
    AgreementRequest,
    Proposal,
)
from unisono.runtime.world.membership import Membership, membership_of
from unisono.runtime.world.shrink_errors import agreement_error
from unisono.transports.attempts import Attempts
from unisono.transports.endpoints import (
    ControlLink,
    ShrinkEndpoint,
    open_shrink_endpoint,
    pause_until,
)
from unisono.transports.session import Session

_RETRY_S = 0.02  # to an endpoint that is not open yet
_UNREACHABLE_RETRY_S = 0.5  # to one that cannot be reached
_EXIT_S = 1.0
"""How long after closing a process's sockets the kernel may take to report its exit."""
_NO_WORLD = Proposal(0, (), ())
"""The answer in a world that was not formed: a rank that asks there is left out."""

MakeCommunicator = Callable[[Session, float], "Communicator"]
PreparedWorld = tuple[Proposal, Callable[[], "Communicator"]]
"""A world that all ranks know of already, and how this rank joins it."""


@dataclass(frozen=True)
class FormedWorld:
    """The new world, and the live ranks of the old one that are not in it."""

    comm: Communicator
    left_out: tuple[int, ...]


def form_world(
    session: Session,
    member: Membership,
    timeout_s: float,
    first: MakeCommunicator,
    attempt: PreparedWorld | None = None,
    *,
    dead: Iterable[int] = (),
    voters: int = 0,
) -> FormedWorld:
    """Agree with the others of this world and form the next; `first` makes it.

    With an `attempt`, ranks agree only if that fails. `dead` are ranks that, the caller
    says, have certainly exited; `voters` as in `Agreement`.
    """
    names = list(
        range(len(session.peers))
    )  # their ranks in the world that shrink was called on
    drivers: list[_AgreementDriver] = []
    left_out: list[int] = []
    is_strict = False
    try:
        while True:
            part = _AgreementDriver(
                session, member, timeout_s, first, is_strict, voters
            )
            drivers.append(part)
            part.rules.learn(dead=dead)
            dead = ()
            proposal, comm, all_settled = part.agree(attempt)
            voters = len(proposal.members) if attempt is not None else 0
            attempt = None
            is_strict = is_strict or bool(proposal.left_out)
            left_out += [names[r] for r in proposal.left_out]
            names = [names[r] for r in proposal.members]
            names += [-1] * (comm.world_size - len(names))  # joining ranks had none
            member = member.later(proposal.epoch)
            session = comm.core.session
            if all_settled:
                break
            drivers[-1].answer(proposal)
            comm.core.abandon()
    except BaseException:
        for part in drivers:
            part.session.close()
            part.close()
        member.release()
        raise
    if left_out:
        drivers[-1].answer(proposal)
        member = member.later(
            member.epoch, tuple(d for p in drivers for d in p.endpoints)
        )
    comm.core.membership = member
    for part in drivers:
        _retire(part.session, keeps_endpoint=bool(left_out))
        if not left_out:
            part.close()
    return FormedWorld(comm, tuple(sorted(r for r in left_out if r >= 0)))


def _retire(session: Session, *, keeps_endpoint: bool) -> None:
    """Close a world, but keep its endpoint if others may still connect."""
    if not keeps_endpoint or session.listener is None:
        session.close()
        return
    session.retire()
    if session.streams is not None:
        session.streams.close()


@dataclass(eq=False)
class _AgreementDriver:
    """Carries out one rank's agreement in one world."""

    session: Session
    member: Membership
    timeout_s: float
    first: MakeCommunicator
    is_strict: bool = False
    voters: int = 0
    endpoints: list[ShrinkEndpoint] = field(default_factory=list)
    outgoing: dict[int, ControlLink] = field(default_factory=dict)
    """Connections that this rank has made."""
    incoming: dict[int, ControlLink] = field(default_factory=dict)
    """Connections from ranks that have sent a request."""
    unidentified: list[ControlLink] = field(default_factory=list)
    """Connections that have sent nothing yet."""
    retry: dict[int, float] = field(default_factory=dict)
    were_dead: set[int] = field(default_factory=set)
    """Ranks that were dead before the last attempt to connect to them."""
    exit_deadline: dict[int, float] = field(default_factory=dict)
    """Until when to wait for the kernel to report the exit of a rank of this host."""
    unsettled: Communicator | None = None
    attempts: int = 0

    def __post_init__(self) -> None:
        """Open the endpoint."""
        self.endpoint = open_shrink_endpoint(
            self.session, self.member.job, self.member.epoch
        )
        self.endpoints.append(self.endpoint)
        self.connecting = Attempts(self.endpoint)
        self.rules = Agreement(
            self.session.rank,
            len(self.session.peers),
            self.member.epoch,
            self.timeout_s,
            self.endpoint.is_local,
            self.is_strict,
            self.voters,
        )

    def agree(
        self, attempt: PreparedWorld | None = None
    ) -> tuple[Proposal, Communicator, bool]:
        """The settled world, and whether all are known to have settled it."""
        try:
            found = None
            if attempt is not None:
                found = self._try_proposal(attempt[0], lambda _: attempt[1]())
            while found is None:
                found = self._act()
            return found
        finally:
            self._close_links()
            self.connecting.close()
            self._drop_unsettled()

    def _act(self) -> tuple[Proposal, Communicator, bool] | None:
        """Carry out the next action.

        What has come by the time by which the rules judge is heard before they do: a
        rank that was slow itself does not exclude others that were not.
        """
        now = time.monotonic()
        self._hear()
        if self._check_local_exits():
            self._pause(now + _RETRY_S)
            return None
        step = self.rules.step(now)
        self._send_replies()
        if step.kind is ActionKind.ASK:
            self._ask(step)
            return None
        if (
            step.kind is ActionKind.SETTLE
            and step.proposal
            and self.unsettled is not None
        ):
            comm, self.unsettled = self.unsettled, None
            return self._settled(step.proposal, comm, False)
        if step.kind in (ActionKind.HOST, ActionKind.JOIN) and step.proposal:
            hosts = step.kind is ActionKind.HOST
            return self._try_proposal(
                step.proposal, lambda proposed: self._rendezvous(proposed, hosts)
            )
        raise agreement_error(step, self.rules, self.session.peers)

    # --- messages

    def _ask(self, step: AgreementAction) -> None:
        """Send requests to the ranks of this action, and wait for messages."""
        now = time.monotonic()
        for rank in self.outgoing.keys() - set(step.ranks):
            self.outgoing.pop(rank).close()
        self.connecting.abandon(but=step.ranks)
        missing = [
            rank
            for rank in step.ranks
            if rank not in self.outgoing and rank not in self.connecting
        ]
        for rank in missing:
            if self.retry.get(rank, 0.0) <= now:
                self._connect(rank)
        waits = [self.retry[r] for r in missing if r not in self.connecting]
        if not self.connecting.has_ended():
            self._pause(min([step.until, *waits]))

    def _links(self) -> list[ControlLink]:
        return [*self.outgoing.values(), *self.incoming.values(), *self.unidentified]

    def _pause(self, until: float) -> None:
        """Wait until there is something to hear."""
        pause_until(self.endpoint, self._links(), until)

    def _hear(self) -> None:
        """Take in what has come: connections, made by others or here, and messages."""
        self.unidentified += self.endpoint.arrivals()
        for rank, outcome in self.connecting.ended():
            self._attempted(rank, outcome)
        for link in pause_until(self.endpoint, self._links(), 0.0):
            self._read(link)

    def _check_local_exits(self) -> bool:
        """Learn which ranks of this host have exited; only this host can be certain.

        A process that exits closes its connections first. So if others cannot reach a
        rank of this host, the kernel is given a moment to report its exit: whether
        there is one to wait for.
        """
        if self.endpoint.is_local:  # the other's endpoint shows it, see `_refused`
            return False
        engine, rules = self.session.engine, self.rules
        awaits = False
        for rank in self.session.here(range(rules.n)):
            if rank == rules.me or rank in rules.dead:
                continue
            if engine.ended(rank):
                rules.learn(dead=[rank])
            elif self._may_be_exiting(rank):
                awaits = True
        return awaits

    def _may_be_exiting(self, rank: int) -> bool:
        if rank not in self.rules.unreachable:
            return False
        now = time.monotonic()
        return now < self.exit_deadline.setdefault(rank, now + _EXIT_S)

    def _connect(self, rank: int) -> None:
        """Begin to connect to a rank; `_attempted` is called when that has ended."""
        self.were_dead.discard(rank)
        if self.session.engine.dead(rank):
            self.were_dead.add(rank)
        self.connecting.begin(rank)

    def _attempted(self, rank: int, outcome: ControlLink | Exception) -> None:
        self.retry[rank] = time.monotonic() + _RETRY_S
        if isinstance(outcome, ControlLink):
            outcome.send(self.rules.request())
            self.outgoing[rank] = outcome
        elif isinstance(outcome, ConnectionRefusedError):
            self._refused(rank, rank in self.were_dead)
        elif isinstance(outcome, ConnectionError):
            return  # it closed the connection: its queue is full, or it exits
        elif isinstance(outcome, OSError):
            self.retry[rank] = time.monotonic() + _UNREACHABLE_RETRY_S
            if rank in self.were_dead:
                self.rules.learn(unreachable=[rank])
        else:
            raise outcome

    def _refused(self, rank: int, is_dead: bool) -> None:
        """A connection was refused. Only within one host does that mean it is dead.

        On one host a rank opens its endpoint only when it calls shrink; if it is dead,
        or has left its world, it will not. From another host a firewall may refuse, and
        the rank may be alive: it is unreachable, but not dead.
        """
        if self.endpoint.is_local and not is_dead:
            return
        if self.endpoint.is_local:
            self.rules.learn(dead=[rank])
        else:
            self.rules.learn(unreachable=[rank])

    def _read(self, link: ControlLink) -> None:
        rank = link.rank
        if self.outgoing.get(rank) is link:
            reply = link.receive(AgreementReply)
            if reply is None or not reply.is_valid(self.rules.n):
                self.outgoing.pop(rank).close()
                self.retry[rank] = time.monotonic() + _RETRY_S
            else:
                self.rules.receive_reply(rank, reply, time.monotonic())
            return
        come = link.receive(AgreementRequest)
        if link in self.unidentified:
            self.unidentified.remove(link)
            if come is not None and self._is_acceptable(rank, come):
                self._replace(rank, link)
                self.rules.receive_request(rank, come)
                return
        elif self.incoming.get(rank) is link:
            del self.incoming[rank]
            self.rules.follower_left(rank)
        link.close()

    def _is_acceptable(self, rank: int, come: AgreementRequest) -> bool:
        """Whether another rank of this world can have sent this request."""
        is_other = 0 <= rank < self.rules.n and rank != self.rules.me
        return is_other and come.is_valid(self.rules.n)

    def _replace(self, rank: int, link: ControlLink) -> None:
        """Replace the earlier connection of a rank that has connected again."""
        older = self.incoming.pop(rank, None)
        if older is not None:
            self.rules.follower_left(rank)
            older.close()
        self.incoming[rank] = link

    def _send_replies(self) -> None:
        for rank, reply in self.rules.outbox:
            if rank in self.incoming:
                self.incoming[rank].send(reply)
        self.rules.outbox.clear()

    def _close_links(self) -> None:
        self.connecting.abandon()
        for link in self._links():
            link.close()
        self.outgoing.clear()
        self.incoming.clear()
        self.unidentified.clear()

    # --- rendezvous

    def _try_proposal(
        self, proposal: Proposal, enter: Callable[[list[Proposal]], Communicator]
    ) -> tuple[Proposal, Communicator, bool] | None:
        """Form the world of a proposal, and pass two barriers in it."""
        self._drop_unsettled()
        self.connecting.abandon()
        self.attempts += 1
        proposed = [proposal]
        comm: Communicator | None = None
        try:
            comm = enter(proposed)
            comm.barrier(timeout_s=RENDEZVOUS_TIMEOUT_S)
        except (UnisonoError, OSError):
            if self.attempts > 2 * self.rules.n + 3:
                if comm is not None:
                    comm.close()
                raise
            self._failed(proposed[0], comm)
            return None
        except BaseException:
            if comm is not None:
                comm.close()
            raise
        try:
            comm.barrier(timeout_s=RENDEZVOUS_TIMEOUT_S)
        except UnisonoError:
            return self._settled(proposed[0], comm, False)
        return self._settled(proposed[0], comm, True)

    def _rendezvous(self, proposed: list[Proposal], hosts: bool) -> Communicator:
        """The communicator of a proposal; the one in `proposed` gets its address."""
        proposal = proposed[0]
        place = proposal.address
        if hosts:
            place = self._own_address()

        def announce(found: str) -> None:
            if hosts:
                proposed[0] = msgspec.structs.replace(proposal, address=found)
                for rank in proposal.members:
                    if rank in self.incoming:
                        self.incoming[rank].send(AgreementReply(proposal=proposed[0]))

        member = self.member.later(proposal.epoch)
        session = member.rendezvous(
            proposal.members.index(self.rules.me),
            len(proposal.members),
            place,
            timeout_s=min(RENDEZVOUS_TIMEOUT_S, max(self.timeout_s, 1.0)),
            announce=announce,
            lost=self._failure_of(proposal),
        )
        try:
            comm = self.first(session, RENDEZVOUS_TIMEOUT_S)
        except BaseException:
            session.close()
            raise
        comm.core.membership = member
        return comm

    def _own_address(self) -> str:
        if self.session.listener is None:
            return secrets.token_hex(8)
        here = self.session.listener.address
        return str(type(here)(here.host, 0))

    def _failure_of(self, proposal: Proposal) -> Callable[[], str]:
        """A function that says why a rendezvous cannot succeed, or nothing."""
        engine, peers = self.session.engine, self.session.peers
        living = [r for r in proposal.members if not engine.dead(r)]
        host = self.outgoing.get(proposal.members[0])

        def lost() -> str:
            for rank in living:
                if engine.dead(rank):
                    return f"shrink: {peers[rank]} died during the rendezvous"
            if host is not None and host.has_ended():
                return f"shrink: {peers[host.rank]} has left the rendezvous"
            return ""

        return lost

    def _failed(self, proposal: Proposal, comm: Communicator | None) -> None:
        self.unsettled = comm
        self._close_links()
        self.retry.clear()
        self.rules.failed(proposal, entered=comm is not None)

    def _drop_unsettled(self) -> None:
        """The world that was entered is not formed: answer ranks that keep it."""
        comm, self.unsettled = self.unsettled, None
        if comm is None:
            return
        member = membership_of(comm)
        comm.core.abandon()
        session = comm.core.session
        if len(session.peers) > 1:
            endpoint = open_shrink_endpoint(session, member.job, member.epoch)
            endpoint.answer(AgreementReply(settled=_NO_WORLD))
            self.endpoints.append(endpoint)
        _retire(session, keeps_endpoint=True)

    def _settled(
        self, proposal: Proposal, comm: Communicator, all_settled: bool
    ) -> tuple[Proposal, Communicator, bool]:
        for link in self.incoming.values():
            link.send(AgreementReply(settled=proposal))
        return proposal, comm, all_settled

    def answer(self, proposal: Proposal) -> None:
        """From now on answer every request in this world with what was settled."""
        self.endpoint.answer(AgreementReply(settled=proposal))

    def close(self) -> None:
        """Close all endpoints of this world."""
        for endpoint in self.endpoints:
            endpoint.close()
