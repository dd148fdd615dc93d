"""What a transport must do, as a check that any implementation can be put to.

    check_transport("tcp")
    check_transport(MyTransport())

It connects worlds of several sizes over the transport and checks: every collective
against NumPy; messages of no bytes, one, odd numbers and millions, in both directions
at once, from any source, by tags; asynchronous calls; split communicators; bytes that
move in pieces of any size (where this build has failpoints); and that a rank which has
closed, is late, is missing or was killed is named in an error within the timeout. After
each, no descriptor, thread or shared memory may be left.

`check_wire` checks the byte connection below a transport by itself: order, what happens
when it is full or empty, that polling wakes, and how it closes.
"""

from __future__ import annotations

import os
import select
import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import unisono
from unisono._native import Wire
from unisono.errors import BadArgument, CollectiveTimeout, PeerLost
from unisono.runtime.world.address import ADDRESS
from unisono.testing._transport_checks import CHECKS, Ranks, killed, require, run_checks
from unisono.testing.across import world_across
from unisono.transports import registry
from unisono.transports.interface import ConnectOptions, Transport
from unisono.transports.secret import find_secret

__all__ = ["check_transport", "check_wire"]

_WAKE_S = 20.0
"""How long a poll may take to return; exceeded only by one that never does."""

_MOST_BYTES = 64 << 20
"""More than any wire may hold."""

_PERIOD = 99_991
"""After so many bytes what is sent repeats."""

Given = str | Transport | Callable[[], Transport]


@dataclass(frozen=True)
class _Plan:
    transport: Given
    checks: tuple[str, ...]
    timeout_s: float

    def make(self) -> Transport:
        """The transport itself."""
        if isinstance(self.transport, str):
            return registry.get(self.transport)
        if isinstance(self.transport, Transport):
            return self.transport
        return self.transport()


def check_transport(
    transport: Given,
    ranks: Sequence[int] = (2, 3, 5),
    *,
    checks: Sequence[str] | None = None,
    timeout_s: float = 60.0,
) -> None:
    """Check a transport in worlds of so many ranks; AssertionError says what is wrong.

    `transport` is a name, a Transport, or a function that makes one. If it connects
    processes, it is sent to new ones by pickle; between hosts each process is on a
    emulated host of its own. `checks` are names of some of the checks; by default all
    are run. `timeout_s` is the timeout of connecting and of every call.
    """
    wrong = sorted(set(checks or ()) - {*CHECKS, "killed"})
    if wrong:
        raise BadArgument(f"checks = {wrong}: expected some of {[*CHECKS, 'killed']}")
    chosen = tuple(checks) if checks is not None else (*CHECKS, "killed")
    plan = _Plan(transport, tuple(c for c in chosen if c != "killed"), timeout_s)
    capabilities = plan.make().capabilities
    for n in ranks:
        if not capabilities.between_processes:
            _check_threads(plan, n)
            continue
        hosts = [1] * n if capabilities.between_hosts else [n]
        _check_processes(plan, hosts)
        if "killed" in chosen:
            _check_killed(plan, hosts)


# --- ranks as threads


def _check_threads(plan: _Plan, n: int) -> None:
    transport, job = plan.make(), uuid.uuid4().hex
    arrivals = threading.Barrier(n)
    errors: list[AssertionError] = []

    def rank(number: int) -> None:
        options = ConnectOptions(
            number,
            n,
            job,
            unisono.__version__,
            plan.timeout_s,
            lost=lambda: "another rank has failed" if errors else "",
        )
        try:
            ranks = Ranks(transport, options, plan.timeout_s)
            run_checks(ranks, plan.checks, lambda: arrivals.wait(2 * plan.timeout_s))
        except AssertionError as error:
            errors.append(error)
            arrivals.abort()

    threads = [threading.Thread(target=rank, args=(r,)) for r in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    _raise_first(errors)


def _raise_first(errors: Sequence[AssertionError]) -> None:
    """Raise the first failure that is not merely the consequence of another."""
    about_others = (PeerLost, CollectiveTimeout, threading.BrokenBarrierError)
    own = [e for e in errors if not isinstance(e.__cause__, about_others)]
    for error in own or errors:
        raise error


# --- ranks as processes


def _check_processes(plan: _Plan, hosts: Sequence[int]) -> None:
    limit = plan.timeout_s * (len(plan.checks) + 2)
    world_across(hosts, init=False, timeout_s=limit).run(_rank, plan)


def _check_killed(plan: _Plan, hosts: Sequence[int]) -> None:
    across = world_across(hosts, init=False, timeout_s=3 * plan.timeout_s)
    with across.start(_rank_until_killed, plan) as running:
        for end in running.wait():
            if end.rank < sum(hosts) - 1 and end.error is not None:
                raise AssertionError(
                    f"check 'killed' on rank {end.rank} of {sum(hosts)}: "
                    f"{type(end.error).__name__}: {end.error}"
                ) from end.error


def _rank(plan: _Plan) -> None:
    run_checks(_ranks(plan), plan.checks, lambda: None)


def _rank_until_killed(plan: _Plan) -> None:
    killed(_ranks(plan))


def _ranks(plan: _Plan) -> Ranks:
    """This process, by what its environment says."""
    transport = plan.make()
    between = transport.capabilities.between_hosts
    options = ConnectOptions(
        int(os.environ["UNISONO_RANK"]),
        int(os.environ["UNISONO_WORLD_SIZE"]),
        os.environ["UNISONO_JOB"],
        unisono.__version__,
        plan.timeout_s,
        address=os.environ[ADDRESS] if between else "",
        secret=find_secret(os.environ) if between else None,
    )
    return Ranks(transport, options, plan.timeout_s)


# --- wires


def check_wire(pair: Callable[[], tuple[Wire, Wire]]) -> None:
    """Check a kind of wire, of which `pair` makes two connected ends."""
    checks = (_check_order, _check_full, _check_half_close, _check_close)
    for check, turned in product(checks, (False, True)):
        one, other = reversed(pair()) if turned else pair()
        try:
            check(one, other)
        finally:
            one.close()
            other.close()


def _poll(awaited: Sequence[tuple[int, int]], seconds: float) -> bool:
    poll = select.poll()
    for fd, events in awaited:
        poll.register(fd, events)
    return bool(poll.poll(seconds * 1e3))


def _read(wire: Wire, size: int) -> bytes:
    """So many bytes, sleeping as the engine does."""
    found = bytearray()
    while len(found) < size:
        left = size - len(found)
        try:
            more = wire.receive(left)
        except BlockingIOError:
            woken = _poll(wire.await_receive(left), _WAKE_S)
            require(woken, f"no wake-up for {left} bytes that have been sent")
            continue
        require(len(more) > 0, "the wire ended, though its peer is open")
        found += more
    return bytes(found)


def _check_order(one: Wire, other: Wire) -> None:
    """Bytes arrive as they were sent, and an empty wire says so."""
    require(not one.peer_closed(), "peer_closed, though the peer is open")
    try:
        early = other.receive(10)
    except BlockingIOError:
        early = b""
    require(not early, f"{early!r} was received, nothing was sent")
    require(not _poll(other.await_receive(1), 0.0), "ready, though nothing was sent")
    sent = bytes(range(256)) * 3
    for at in range(0, len(sent), 96):
        count = one.send(sent[at : at + 96])
        require(count == len(sent[at : at + 96]), f"{count} bytes of 96 were sent")
        found = _read(other, count)
        require(found == sent[at : at + 96], "what was received is not what was sent")


def _check_full(one: Wire, other: Wire) -> None:
    """A full wire says so, and wakes its sender when there is room again."""
    pattern = os.urandom(_PERIOD)
    twice = pattern * 2
    sent, blocked = 0, False
    while not blocked and sent < _MOST_BYTES:
        at = sent % _PERIOD  # after EAGAIN the same bytes are offered again
        try:
            sent += one.send(twice[at : at + _PERIOD])
        except BlockingIOError:
            blocked = True
    require(blocked, f"{sent} bytes were sent, and nothing was received")
    expected = pattern * (sent // _PERIOD + 2)
    require(_read(other, sent) == expected[:sent], "what was received was not sent so")
    require(_poll(one.await_send(), _WAKE_S), "no wake-up, though there is room")
    more = one.send(expected[sent : sent + _PERIOD])
    found = _read(other, more)
    require(found == expected[sent : sent + more], "what was sent after it was full")


def _check_half_close(one: Wire, other: Wire) -> None:
    """After finish_sending the peer receives what was sent, then the end."""
    one.send(b"the last")
    one.finish_sending()
    require(_read(other, 8) == b"the last", "what was sent before finish_sending")
    require(_poll(other.await_receive(1), _WAKE_S), "no wake-up for the end")
    require(other.receive(1) == b"", "bytes after finish_sending")
    other.send(b"back")
    require(_read(one, 4) == b"back", "the other direction after finish_sending")


def _check_close(one: Wire, other: Wire) -> None:
    """After close the peer finds the end, and cannot send."""
    one.close()
    require(_poll(other.await_receive(1), _WAKE_S), "no wake-up for the end")
    require(other.peer_closed(), "not peer_closed, though the peer has closed")
    for _ in range(3):  # a socket finds out by the second
        try:
            other.send(b"into the void")
        except OSError as error:
            require(
                not isinstance(error, BlockingIOError), "send to a closed peer waits"
            )
            return
    raise AssertionError("send succeeds, though the peer has closed")
