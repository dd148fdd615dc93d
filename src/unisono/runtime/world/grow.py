"""`comm.grow` and `unisono.init(join=True)`: a world takes in newcomers.

Rank 0 opens the gate and waits for as many as are wanted; then it tells all, ranks and
newcomers, where to meet in the next epoch. The old communicator is used for that, so a
rank that dies while the others wait is noticed as ever. The new world is settled as
one that shrinks is: by two barriers, and if these fail the ranks agree on what is left.
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
from unisono.runtime.world.agreement import MEETING_S, Proposal
from unisono.runtime.world.first import count_epochs_from, first_communicator
from unisono.runtime.world.membership import Changes, Membership, membership_of
from unisono.runtime.world.shrink import Changing, revoke
from unisono.runtime.world.shrink_protocol import survive
from unisono.transports.addresses import Address
from unisono.transports.endpoints import ControlLink
from unisono.transports.handshake import Identity
from unisono.transports.join import JoinEndpoint, Joiner, Joining, Welcome
from unisono.transports.secret import Secret, find_secret, open_secret
from unisono.transports.session import Session
from unisono.transports.tls import check

_TOLD_BYTES = 1024
_PATIENCE_S = 3 * MEETING_S
"""For those who still wait to meet, or at a barrier, in a world that will not be."""


def grow(
    member: Membership,
    comm: Communicator,
    world_size: int,
    timeout_s: float,
    address: str | None,
) -> Communicator:
    """The world of these ranks and newcomers; see `Communicator.grow`."""
    nanoseconds(timeout_s)
    wanted = whole_number("world_size", world_size)

    if wanted < comm.world_size:
        raise BadArgument(
            f"grow: world_size = {wanted}, but {comm.world_size} ranks are here; "
            "expected as many or more"
        )
    with Changing("grow"):
        comm.core.check_open("grow")
        comm.core.check_usable("grow")
        if wanted == comm.world_size:
            comm.barrier()
            return comm
        if comm.rank == 0:
            return _Host(comm, member, wanted, timeout_s, address).grow()
        told = _tell(comm, None, timeout_s + comm.timeout_s)
        return _meet(comm, member, told)


class _Host:
    """Rank 0's part."""

    def __init__(
        self,
        comm: Communicator,
        member: Membership,
        wanted: int,
        timeout_s: float,
        address: str | None,
    ) -> None:
        self.comm, self.member, self.wanted = comm, member, wanted
        self.timeout_s = timeout_s
        self.address = address or member.address
        self.newcomers: list[ControlLink] = []

    def grow(self) -> Communicator:
        """Wait for newcomers, and meet with all."""
        endpoint: JoinEndpoint | None = None
        try:
            endpoint = self._open_endpoint()
            self._gather(endpoint)
            told = self._welcome(self._place())
            return _meet(self.comm, self.member, told, self._announce)
        except (ConnectFailed, OSError) as why:
            if (
                not self.comm.core.closed
            ):  # it is still good, and the others wait for a word
                wrong = str(why)[: _TOLD_BYTES - 64]
                _tell(self.comm, Welcome(wrong=wrong))
            raise
        finally:
            for link in self.newcomers:
                link.close()
            if endpoint is not None:
                endpoint.close()

    def _open_endpoint(self) -> JoinEndpoint:
        member = self.member
        if not member.across:
            return JoinEndpoint.open_local(member.job)
        secret = _known(member.secret, member.job, member.insecure)
        endpoints = [endpoint.listener for endpoint in member.kept]
        found = [self.comm.core.transport.listener, *endpoints]
        me = Identity(secret, member.job, 0, tls=member.tls)
        return JoinEndpoint.open_remote(self.address, me, [one for one in found if one])

    def _gather(self, endpoint: JoinEndpoint) -> None:
        until = time.monotonic() + self.timeout_s
        needed = self.wanted - self.comm.world_size
        while len(self.newcomers) < needed:
            for link, hello in endpoint.newcomers():
                self._greet(link, hello)
            gone = [link for link in self.newcomers if link.has_ended()]
            for link in gone:
                self.newcomers.remove(link)
                link.close()
            self._look_after_ranks()
            if time.monotonic() > until:
                raise ConnectFailed(
                    f"grow: {len(self.newcomers)} of {needed} newcomers came within "
                    f"{self.timeout_s:g} s{self._where()}: have they been started, "
                    "with UNISONO_JOIN=1 and the same job? The communicator is as "
                    "before"
                )

    def _where(self) -> str:
        return f" to {self.address}" if self.member.across else ""

    def _greet(self, link: ControlLink, hello: Joining) -> None:
        if hello.version != unisono.__version__:
            link.send(
                Welcome(
                    wrong=f"the job runs unisono {unisono.__version__}, pid "
                    f"{hello.pid} on {hello.host} {hello.version}: install the same"
                )
            )
            link.close()
            return
        if len(self.newcomers) < self.wanted - self.comm.world_size:
            self.newcomers.append(link)
        else:
            link.close()  # it may come again, when there is room

    def _look_after_ranks(self) -> None:
        """If one of the ranks is lost, tell the others, who only wait for a word."""
        engine = self.comm.core.transport.engine
        dead = [r for r in range(self.comm.world_size) if engine.dead(r)]
        if dead:
            _tell(self.comm, Welcome(dead=tuple(dead)))
            raise _lost(self.comm, dead)
        self.comm.core.check_usable("grow")

    def _place(self) -> str:
        if not self.member.across:
            return os.urandom(8).hex()
        listener = self.comm.core.transport.listener
        here = Address.parse(self.address) if listener is None else listener.address
        return str(Address(here.host, 0))

    def _welcome(self, place: str) -> Welcome:
        epoch, before = self.member.epoch + 1, self.comm.world_size
        return Welcome(0, self.wanted, epoch, place, before=before)

    def _announce(self, place: str) -> None:
        told = self._welcome(place)
        _tell(self.comm, told)
        for number, link in enumerate(self.newcomers):
            rank = self.comm.world_size + number
            link.send(msgspec.structs.replace(told, rank=rank))


def _tell(
    comm: Communicator, told: Welcome | None, timeout_s: float | None = None
) -> Welcome:
    """What rank 0 tells all ranks.

    They may call later than rank 0 by more than newcomers are waited for: that is no
    reason to break what they have, so they have the time that any call has.
    """
    raw = np.zeros(_TOLD_BYTES, np.uint8)
    if told is not None:
        data = msgspec.msgpack.encode(told)
        raw[: 2 + len(data)] = np.frombuffer(
            len(data).to_bytes(2, "big") + data, np.uint8
        )
    comm.broadcast(raw, timeout_s=timeout_s)
    if told is not None:
        return told
    size = int.from_bytes(raw[:2].tobytes(), "big")
    heard = msgspec.msgpack.decode(raw[2 : 2 + size].tobytes(), type=Welcome)
    if heard.dead and all(0 <= rank < comm.world_size for rank in heard.dead):
        raise _lost(comm, heard.dead)
    if heard.wrong:
        raise ConnectFailed(heard.wrong)
    if not heard.is_sound() or heard.before != comm.world_size:
        raise ConnectFailed("grow: rank 0 tells of a world that cannot be")
    return heard


def _lost(comm: Communicator, dead: Sequence[int]) -> PeerLost:
    peers = [comm.peers[rank] for rank in dead]
    return PeerLost(
        f"grow: {peers[0]} died while the others waited for newcomers; shrink first",
        ranks=dead,
        pids=[peer.pid for peer in peers],
        host=peers[0].host,
        collective="grow",
    )


def _meet(
    comm: Communicator,
    member: Membership,
    told: Welcome,
    announce: Callable[[str], None] = lambda place: None,
) -> Communicator:
    """Meet newcomers as the next world, or agree on another if that fails."""
    old, rank, limit = comm.core.transport, comm.rank, comm.timeout_s
    later = member.later(told.epoch)
    living = [r for r in range(comm.world_size) if not old.engine.dead(r)]

    def lost() -> str:
        gone = [r for r in living if old.engine.dead(r)]
        return f"grow: {old.peers[gone[0]]} died before all had met" if gone else ""

    def attempt() -> Communicator:
        try:
            transport = later.meet(
                rank,
                told.world_size,
                told.place,
                timeout_s=MEETING_S,
                announce=announce,
                lost=lost,
            )
        finally:
            revoke(old)  # if it failed, those who were not told come to agree, too
        return _first(transport, later, limit)

    everybody = tuple(range(comm.world_size))
    found = survive(
        old,
        member,
        _PATIENCE_S,
        lambda made, _: _first(made, later, limit),
        (Proposal(told.epoch, everybody, ()), attempt),
    )
    return _settled(found.comm, found.left_out)


def _first(transport: Session, member: Membership, timeout_s: float) -> Communicator:
    try:
        made = first_communicator(transport, timeout_s=timeout_s, meeting_s=MEETING_S)
    except BaseException:
        transport.close()
        raise
    made.core.membership = member
    return made


def _settled(comm: Communicator, left_out: tuple[int, ...]) -> Communicator:
    comm.left_out = left_out
    count_epochs_from(membership_of(comm).job, membership_of(comm).epoch + 1)
    return comm


# --- newcomers


def join(
    job: str,
    address: str,
    *,
    changes: Changes,
    timeout_s: float,
    meeting_s: float,
    insecure: bool,
    tls: bool = False,
    fabric: str = "",
) -> Communicator:
    """Come to a job that grows, and be one of its ranks."""
    if not job:
        raise BadArgument(
            "join: which job? Set UNISONO_JOB, or pass job=, as its ranks have it"
        )
    secret = None
    if address:
        secret = _known(find_secret(os.environ), job, insecure)
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
    until = time.monotonic() + meeting_s
    while time.monotonic() < until:
        told = coming.ask(hello, until)
        if told is None:
            continue
        if told.wrong:
            raise ConnectFailed(f"join: {told.wrong}")
        if not told.is_sound() or told.rank == 0:
            raise ConnectFailed("join: rank 0 offers a place that cannot be")
        comm = _take_seat(member.later(told.epoch), told, timeout_s)
        if comm is not None:
            return comm
    where = f"at {address}" if address else "on this host"
    raise ConnectFailed(
        f"join: nobody let this process into the job {job!r} {where} within "
        f"{meeting_s:g} s{coming.trouble}: do its ranks call comm.grow, and have they "
        "the same job, address and secret?"
    )


def _take_seat(
    member: Membership, told: Welcome, timeout_s: float
) -> Communicator | None:
    """The communicator of the grown world; None if it came to nothing."""
    comm: Communicator | None = None
    try:
        transport = member.meet(
            told.rank, told.world_size, told.place, timeout_s=MEETING_S
        )
        comm = _first(transport, member, timeout_s)
        comm.barrier(timeout_s=MEETING_S)
    except (UnisonoError, OSError):
        if comm is not None:
            comm.close()
        return None
    try:
        comm.barrier(timeout_s=MEETING_S)
    except UnisonoError:  # the others may have settled it: agree with them from there
        transport = comm.core.transport
        revoke(transport)
        found = survive(
            transport,
            member,
            _PATIENCE_S,
            lambda made, _: _first(made, member, timeout_s),
            voters=told.before,
        )
        return _settled(found.comm, ())
    return _settled(comm, ())


def _known(secret: Secret | None, job: str, insecure: bool) -> Secret:
    return secret or open_secret(job, anywhere=insecure)
