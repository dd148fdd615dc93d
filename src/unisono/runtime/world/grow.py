"""`comm.grow` and `unisono.init(join=True)`: a world takes in new processes.

Rank 0 opens the join endpoint and waits for as many processes as are missing; then it
sends all, ranks and new processes, the rendezvous of the next epoch. Ranks get it over
the old communicator, so a rank that dies while the others wait is noticed as in any
call. The new world is settled as in shrink: by two barriers, and if these fail the
ranks agree on who is left.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

import unisono
from unisono.errors import (
    BadArgument,
    ConnectFailed,
    PeerLost,
    UnisonoError,
    whole_number,
)
from unisono.runtime.call.timeouts import nanoseconds
from unisono.runtime.communicator import Communicator
from unisono.runtime.world.agreement import RENDEZVOUS_TIMEOUT_S, Proposal
from unisono.runtime.world.first import count_epochs_from, first_communicator
from unisono.runtime.world.membership import Membership, ResizeFunctions, membership_of
from unisono.runtime.world.shrink import ResizeLock, revoke
from unisono.runtime.world.shrink_protocol import form_world
from unisono.transports.addresses import Address
from unisono.transports.endpoints import ControlLink
from unisono.transports.handshake import Identity
from unisono.transports.join import JoinEndpoint, Joiner, Joining, Welcome
from unisono.transports.secret import Secret, find_secret, open_secret
from unisono.transports.session import Session
from unisono.transports.tls import check

_MESSAGE_BYTES = 1024
_AGREEMENT_TIMEOUT_S = 3 * RENDEZVOUS_TIMEOUT_S
"""For ranks that still wait, at a rendezvous or barrier, in a world that has failed."""


def grow(
    member: Membership,
    comm: Communicator,
    world_size: int,
    timeout_s: float,
    address: str | None,
) -> Communicator:
    """The world of these ranks and new processes; see `Communicator.grow`."""
    nanoseconds(timeout_s)
    world_size = whole_number("world_size", world_size)

    if world_size < comm.world_size:
        raise BadArgument(
            f"grow: world_size = {world_size}, but {comm.world_size} ranks are here; "
            "expected as many or more"
        )
    with ResizeLock("grow"):
        comm.core.check_open("grow")
        comm.core.check_usable("grow")
        if world_size == comm.world_size:
            comm.barrier()
            return comm
        if comm.rank == 0:
            return _GrowCoordinator(comm, member, world_size, timeout_s, address).grow()
        welcome = _broadcast_welcome(comm, None, timeout_s + comm.timeout_s)
        return _form_world(comm, member, welcome)


class _GrowCoordinator:
    """What rank 0 does in grow."""

    def __init__(
        self,
        comm: Communicator,
        member: Membership,
        world_size: int,
        timeout_s: float,
        address: str | None,
    ) -> None:
        self.comm, self.member, self.world_size = comm, member, world_size
        self.timeout_s = timeout_s
        self.address = address or member.address
        self.joining: list[ControlLink] = []

    def grow(self) -> Communicator:
        """Wait for new processes, and form the next world with all."""
        endpoint: JoinEndpoint | None = None
        try:
            endpoint = self._open_endpoint()
            self._gather(endpoint)
            welcome = self._welcome(self._rendezvous_address())
            return _form_world(self.comm, self.member, welcome, self._announce)
        except (ConnectFailed, OSError) as why:
            # If it is still open, the others wait for a message.
            if not self.comm.core.closed:
                wrong = str(why)[: _MESSAGE_BYTES - 64]
                _broadcast_welcome(self.comm, Welcome(wrong=wrong))
            raise
        finally:
            for link in self.joining:
                link.close()
            if endpoint is not None:
                endpoint.close()

    def _open_endpoint(self) -> JoinEndpoint:
        member = self.member
        if not member.across:
            return JoinEndpoint.open_local(member.job)
        secret = _secret_or_open(member.secret, member.job, member.insecure)
        endpoints = [endpoint.listener for endpoint in member.kept]
        found = [self.comm.core.session.listener, *endpoints]
        me = Identity(secret, member.job, 0, tls=member.tls)
        return JoinEndpoint.open_remote(self.address, me, [one for one in found if one])

    def _gather(self, endpoint: JoinEndpoint) -> None:
        until = time.monotonic() + self.timeout_s
        needed = self.world_size - self.comm.world_size
        while len(self.joining) < needed:
            for link, hello in endpoint.newcomers():
                self._admit(link, hello)
            gone = [link for link in self.joining if link.has_ended()]
            for link in gone:
                self.joining.remove(link)
                link.close()
            self._check_ranks()
            if time.monotonic() > until:
                raise ConnectFailed(
                    f"grow: {len(self.joining)} of {needed} processes joined within "
                    f"{self.timeout_s:g} s{self._where()}: have they been started, "
                    "with UNISONO_JOIN=1 and the same job? The communicator is "
                    "unchanged"
                )

    def _where(self) -> str:
        return f" to {self.address}" if self.member.across else ""

    def _admit(self, link: ControlLink, hello: Joining) -> None:
        if hello.version != unisono.__version__:
            link.send(
                Welcome(
                    wrong=f"the job runs unisono {unisono.__version__}, pid "
                    f"{hello.pid} on {hello.host} {hello.version}: install the same"
                )
            )
            link.close()
            return
        if len(self.joining) < self.world_size - self.comm.world_size:
            self.joining.append(link)
        else:
            link.close()  # it may connect again, when there is room

    def _check_ranks(self) -> None:
        """If one of the ranks is lost, tell the others, which wait for a message."""
        engine = self.comm.core.session.engine
        dead = [r for r in range(self.comm.world_size) if engine.dead(r)]
        if dead:
            _broadcast_welcome(self.comm, Welcome(dead=tuple(dead)))
            raise _lost(self.comm, dead)
        self.comm.core.check_usable("grow")

    def _rendezvous_address(self) -> str:
        if not self.member.across:
            return os.urandom(8).hex()
        listener = self.comm.core.session.listener
        here = Address.parse(self.address) if listener is None else listener.address
        return str(Address(here.host, 0))

    def _welcome(self, place: str) -> Welcome:
        epoch, before = self.member.epoch + 1, self.comm.world_size
        return Welcome(0, self.world_size, epoch, place, before=before)

    def _announce(self, place: str) -> None:
        welcome = self._welcome(place)
        _broadcast_welcome(self.comm, welcome)
        for number, link in enumerate(self.joining):
            rank = self.comm.world_size + number
            link.send(msgspec.structs.replace(welcome, rank=rank))


def _broadcast_welcome(
    comm: Communicator, welcome: Welcome | None, timeout_s: float | None = None
) -> Welcome:
    """Send rank 0's message to all ranks.

    They may call grow later than rank 0 by more than its timeout: that is no reason to
    break the communicator, so they have the timeout of any call.
    """
    raw = np.zeros(_MESSAGE_BYTES, np.uint8)
    if welcome is not None:
        data = msgspec.msgpack.encode(welcome)
        raw[: 2 + len(data)] = np.frombuffer(
            len(data).to_bytes(2, "big") + data, np.uint8
        )
    comm.broadcast(raw, timeout_s=timeout_s)
    if welcome is not None:
        return welcome
    size = int.from_bytes(raw[:2].tobytes(), "big")
    welcome = msgspec.msgpack.decode(raw[2 : 2 + size].tobytes(), type=Welcome)
    if welcome.dead and all(0 <= rank < comm.world_size for rank in welcome.dead):
        raise _lost(comm, welcome.dead)
    if welcome.wrong:
        raise ConnectFailed(welcome.wrong)
    if not welcome.is_valid() or welcome.before != comm.world_size:
        raise ConnectFailed("grow: rank 0 sent an invalid world")
    return welcome


def _lost(comm: Communicator, dead: Sequence[int]) -> PeerLost:
    peers = [comm.peers[rank] for rank in dead]
    return PeerLost(
        f"grow: {peers[0]} died while the others waited for joining processes; "
        "shrink first",
        ranks=dead,
        pids=[peer.pid for peer in peers],
        host=peers[0].host,
        collective="grow",
    )


def _form_world(
    comm: Communicator,
    member: Membership,
    welcome: Welcome,
    announce: Callable[[str], None] = lambda place: None,
) -> Communicator:
    """Form the next world with the new processes, or agree on another if that fails."""
    old, rank, limit = comm.core.session, comm.rank, comm.timeout_s
    later = member.later(welcome.epoch)
    living = [r for r in range(comm.world_size) if not old.engine.dead(r)]

    def lost() -> str:
        gone = [r for r in living if old.engine.dead(r)]
        return f"grow: {old.peers[gone[0]]} died during the rendezvous" if gone else ""

    def attempt() -> Communicator:
        try:
            session = later.rendezvous(
                rank,
                welcome.world_size,
                welcome.place,
                timeout_s=RENDEZVOUS_TIMEOUT_S,
                announce=announce,
                lost=lost,
            )
        finally:
            revoke(old)  # if it failed, ranks that do not know of it call shrink, too
        return _first(session, later, limit)

    all_ranks = tuple(range(comm.world_size))
    found = form_world(
        old,
        member,
        _AGREEMENT_TIMEOUT_S,
        lambda made, _: _first(made, later, limit),
        (Proposal(welcome.epoch, all_ranks, ()), attempt),
    )
    found.comm.core.device.given = comm.core.device.given
    return _settled(found.comm, found.left_out)


def _first(session: Session, member: Membership, timeout_s: float) -> Communicator:
    try:
        made = first_communicator(
            session, timeout_s=timeout_s, rendezvous_timeout_s=RENDEZVOUS_TIMEOUT_S
        )
    except BaseException:
        session.close()
        raise
    made.core.membership = member
    return made


def _settled(comm: Communicator, left_out: tuple[int, ...]) -> Communicator:
    comm.left_out = left_out
    count_epochs_from(membership_of(comm).job, membership_of(comm).epoch + 1)
    return comm


# --- new processes


def join(
    job: str,
    address: str,
    *,
    changes: ResizeFunctions,
    timeout_s: float,
    rendezvous_timeout_s: float,
    insecure: bool,
    tls: bool = False,
    fabric: str = "",
) -> Communicator:
    """Join a job that grows, as one of its ranks."""
    if not job:
        raise BadArgument(
            "join: which job? Set UNISONO_JOB, or pass job=, as its ranks have it"
        )
    secret = None
    if address:
        secret = _secret_or_open(find_secret(os.environ), job, insecure)
        if tls:
            check(secret)
    interface = os.environ.get("UNISONO_INTERFACE")
    member = Membership(
        job,
        changes,
        across=bool(address),
        address=address,
        secret=secret,
        interface=interface,
        insecure=insecure,
        tls=tls,
        fabric=fabric,
    )
    hello = Joining(unisono.__version__, os.getpid(), socket.gethostname())
    coming = Joiner(job, address, secret, tls)
    until = time.monotonic() + rendezvous_timeout_s
    while time.monotonic() < until:
        welcome = coming.ask(hello, until)
        if welcome is None:
            continue
        if welcome.wrong:
            raise ConnectFailed(f"join: {welcome.wrong}")
        if not welcome.is_valid() or welcome.rank == 0:
            raise ConnectFailed("join: rank 0 sent an invalid rank or world size")
        comm = _join_world(member.later(welcome.epoch), welcome, timeout_s)
        if comm is not None:
            return comm
    where = f"at {address}" if address else "on this host"
    raise ConnectFailed(
        f"join: no rank admitted this process to the job {job!r} {where} within "
        f"{rendezvous_timeout_s:g} s{coming.trouble}: do its ranks call comm.grow, and "
        "have they the same job, address and secret?"
    )


def _join_world(
    member: Membership, welcome: Welcome, timeout_s: float
) -> Communicator | None:
    """The communicator of the grown world; None if it was not formed."""
    comm: Communicator | None = None
    try:
        session = member.rendezvous(
            welcome.rank,
            welcome.world_size,
            welcome.place,
            timeout_s=RENDEZVOUS_TIMEOUT_S,
        )
        comm = _first(session, member, timeout_s)
        comm.barrier(timeout_s=RENDEZVOUS_TIMEOUT_S)
    except (UnisonoError, OSError):
        if comm is not None:
            comm.close()
        return None
    try:
        comm.barrier(timeout_s=RENDEZVOUS_TIMEOUT_S)
    except UnisonoError:  # the others may have settled it: agree with them
        session = comm.core.session
        revoke(session)
        found = form_world(
            session,
            member,
            _AGREEMENT_TIMEOUT_S,
            lambda made, _: _first(made, member, timeout_s),
            voters=welcome.before,
        )
        return _settled(found.comm, ())
    return _settled(comm, ())


def _secret_or_open(secret: Secret | None, job: str, insecure: bool) -> Secret:
    return secret or open_secret(job, anywhere=insecure)
