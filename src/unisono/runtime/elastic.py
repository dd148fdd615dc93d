"""Worlds that change: what `comm.shrink` does before and after the agreement.

First the old world is revoked. Every communicator of it is closed on this rank, which
ends whatever is in flight: here at once, and on the others as soon as they notice, with
an error that names a rank. So all survivors come to shrink, one after another, even if
only one of them found out why.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from unisono.errors import BadArgument, UsageError, whole_number
from unisono.runtime.base import nanoseconds
from unisono.runtime.membership import Membership
from unisono.runtime.shrinking import survive
from unisono.runtime.start import count_epochs_from, first_communicator
from unisono.transports.base import Transport

if TYPE_CHECKING:
    from unisono.runtime.communicator import Communicator

_CHANGING = threading.Lock()
"""Held while a rank shrinks or grows: a process does so in one thread at a time."""


class Changing:
    """For `with Changing("shrink"):`; a second thread is refused."""

    def __init__(self, what: str) -> None:
        """`what` is for the error."""
        self._what = what

    def __enter__(self) -> None:
        """Take the lock, or say why not."""
        if not _CHANGING.acquire(blocking=False):
            raise UsageError(
                f"{self._what}: another thread of this process is at shrink or grow; "
                "call it once on each rank, and hand the new communicator around"
            )

    def __exit__(self, *error: object) -> None:
        """Let the next one."""
        _CHANGING.release()


def shrink(
    comm: Communicator, timeout_s: float, dead: Sequence[int] = ()
) -> Communicator:
    """The world of those who are left; see `Communicator.shrink`."""
    nanoseconds(timeout_s)
    known = [_other_rank(comm, rank) for rank in dead]
    with Changing("shrink"):
        member = world_of(comm, "shrink")
        transport = comm._transport
        limit = comm.timeout_s
        revoke(transport)

        def first(made: Transport, meeting_s: float) -> Communicator:
            return first_communicator(made, timeout_s=limit, meeting_s=meeting_s)

        found = survive(transport, member, timeout_s, first, dead=known)
        made = found.comm
        made.left_out = found.left_out
        assert made._member is not None
        count_epochs_from(member.job, made._member.epoch + 1)
        return made


def _other_rank(comm: Communicator, rank: int) -> int:
    found = whole_number("dead", rank)
    if not 0 <= found < comm.world_size or found == comm.rank:
        raise BadArgument(
            f"shrink: dead = {found}: expected other ranks of {comm.name!r}, 0 to "
            f"{comm.world_size - 1} without {comm.rank}"
        )
    return found


def world_of(comm: Communicator, what: str) -> Membership:
    """How the world of a communicator came to be; UsageError if it cannot change."""
    if comm._transport.engine.forked():
        raise UsageError(
            f"{what}: this process is a fork of rank {comm.rank} and not itself a "
            "rank; only the ranks themselves can change their world"
        )
    if comm._closed:
        raise UsageError(f"{what}: the communicator {comm.name!r} is closed")
    if comm._member is None and comm._agreed:
        raise UsageError(
            f"{what}: {comm.name!r} is a part of a world, made by split or duplicate; "
            f"{what} the world, on all its ranks, and split that again"
        )
    if comm._member is None:
        raise UsageError(
            f"{what}: the ranks of {comm.name!r} were not brought together by "
            "unisono.init, but are threads or belong to another library; only worlds "
            "from unisono.init can change"
        )
    return comm._member


def revoke(transport: Transport) -> None:
    """Close every communicator of a world, and leave the world itself as it is.

    All at once: one that closes waits for the thread that carries on what is in flight
    on the others, and that goes on until they are closed, too.
    """
    users = list(transport.users)
    closing = [threading.Thread(target=user._give_up) for user in users[1:]]
    for thread in closing:
        thread.start()
    for user in users[:1]:
        user._give_up()
    for thread in closing:
        thread.join()
