"""What `comm.shrink` does before and after the agreement.

First the old world is revoked. Every communicator of it is closed on this rank, which
aborts all calls in flight: here at once, and on the others as soon as they notice, with
an error that names a rank. So all survivors call shrink, one after another, even if
only one of them noticed the failure.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from unisono.errors import BadArgument, UsageError, whole_number
from unisono.runtime.call.timeouts import nanoseconds
from unisono.runtime.communicator import Communicator
from unisono.runtime.world.first import count_epochs_from, first_communicator
from unisono.runtime.world.membership import Membership, membership_of
from unisono.runtime.world.shrink_protocol import form_world
from unisono.service_threads import ServiceThread
from unisono.transports.session import Session

_CHANGING = threading.Lock()
"""Held while a rank shrinks or grows: a process does so in one thread at a time."""


class ResizeLock:
    """For `with ResizeLock("shrink"):`; a second thread is refused."""

    def __init__(self, what: str) -> None:
        """`what` is named in the error."""
        self._what = what

    def __enter__(self) -> None:
        """Take the lock, or raise UsageError."""
        if not _CHANGING.acquire(blocking=False):
            raise UsageError(
                f"{self._what}: another thread of this process is in shrink or grow; "
                "call it once on each rank, and share the new communicator"
            )

    def __exit__(self, *error: object) -> None:
        """Release the lock."""
        _CHANGING.release()


def shrink(
    member: Membership, comm: Communicator, timeout_s: float, dead: Sequence[int]
) -> Communicator:
    """The world of the surviving ranks; see `Communicator.shrink`."""
    nanoseconds(timeout_s)
    known = [_other_rank(comm, rank) for rank in dead]
    with ResizeLock("shrink"):
        comm.core.check_open("shrink")
        session = comm.core.session
        limit = comm.timeout_s
        revoke(session)

        def first(made: Session, rendezvous_timeout_s: float) -> Communicator:
            return first_communicator(
                made, timeout_s=limit, rendezvous_timeout_s=rendezvous_timeout_s
            )

        found = form_world(session, member, timeout_s, first, dead=known)
        made = found.comm
        made.left_out = found.left_out
        made.core.device.given = comm.core.device.given
        count_epochs_from(member.job, membership_of(made).epoch + 1)
        return made


def _other_rank(comm: Communicator, rank: int) -> int:
    found = whole_number("dead", rank)
    if not 0 <= found < comm.world_size or found == comm.rank:
        raise BadArgument(
            f"shrink: dead = {found}: expected other ranks of {comm.name!r}, 0 to "
            f"{comm.world_size - 1} without {comm.rank}"
        )
    return found


def revoke(session: Session) -> None:
    """Close every communicator of a world, but not the world's session.

    All at once: closing one waits for the thread that runs calls in flight on the
    others, and that runs until they are closed, too.
    """
    users = list(session.users)
    closing = [ServiceThread(target=user.abandon) for user in users[1:]]
    for thread in closing:
        thread.start()
    for user in users[:1]:
        user.abandon()
    for thread in closing:
        thread.join()
