"""Communicators of some ranks: on each host one rank makes the shared memory."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TypeVar
from weakref import ref

import numpy as np
from numpy.typing import NDArray

from unisono.errors import (
    CollectiveTimeout,
    ConnectFailed,
    PeerLost,
    UnisonoError,
    whole_number,
)
from unisono.runtime.collectives import Collectives
from unisono.runtime.core import Core
from unisono.runtime.observe.failures import FailureCode

Group = TypeVar("Group", bound=Collectives)

_NO_COLOR = -(1 << 62)
_FEW_RANKS = 16
_LEFT, _DEAD = 4, 5  # fields of the native core's state of a rank
_LOOK_NS = 50_000_000
_GRACE_NS = 2_000_000_000
"""For the last messages of a barrier that others have passed and may have closed."""


def agreed_number(text: str) -> int:
    """A 64-bit hash of a text that is the same on all ranks."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


def duplicate(comm: Group) -> Group:
    """A communicator of all ranks."""
    made = split(comm, 0, comm.rank)
    assert made is not None
    return made


def split(comm: Group, color: int | None, key: int, name: str = "") -> Group | None:
    """One communicator for each color; it is called by its color, if by no name."""
    mine = _NO_COLOR if color is None else whole_number("color", color)
    pairs = _exchanged(comm, mine, whole_number("key", key))
    order = sorted(range(comm.world_size), key=lambda r: (int(pairs[r, 1]), r))
    members = [r for r in order if color is not None and pairs[r, 0] == mine]
    world = [comm.core.world_ranks[r] for r in members]
    segment = 0
    owner = comm.core.session.owner(world) if members else -1
    if owner == comm.core.world_ranks[comm.rank]:
        segment = comm.core.session.memory_for(world)
    segments = _exchanged(comm, segment)
    comm.core.splits += 1
    if not members:
        return None
    number = int(segments[comm.core.world_ranks.index(owner), 0])
    try:
        joined = Core.joined(
            comm.core.session,
            world,
            number,
            agreed=agreed_number(f"{comm.core.agreed}/{comm.core.splits}/{mine}"),
            timeout_s=comm.timeout_s,
            rendezvous_timeout_s=comm.timeout_s,
            name=f"{comm.name}/{name or mine}",
            cancelled=lambda: bool(_blockers(comm, members)),
        )
    except ConnectFailed as error:
        if _blockers(comm, members):
            raise _broken(comm, members) from error
        raise
    joined.device.given = comm.core.device.given
    made = type(comm)(joined)
    _await_all(comm, made, members)
    return made


def _exchanged(comm: Group, *numbers: int) -> NDArray[np.int64]:
    """A row with the numbers of each rank.

    Of many ranks as a sum along a tree: every rank plans the transfers of all, and
    those of an all_gather are n².
    """
    mine = np.array([numbers], np.int64)
    if comm.world_size <= _FEW_RANKS:
        return np.asarray(comm.all_gather(mine))
    rows = np.zeros((comm.world_size, len(numbers)), np.int64)
    rows[comm.rank] = mine
    return np.asarray(comm.all_reduce(rows, algorithm="tree"))


def splitter(comm: Collectives) -> Callable[[int | None, str], Core | None]:
    """Makes cores of the ranks that give one color; refers to `comm` weakly."""
    known = ref(comm)

    def make(color: int | None, name: str) -> Core | None:
        parent = known()
        assert parent is not None
        made = split(parent, color, parent.rank, name)
        return None if made is None else made.core

    return make


def _await_all(comm: Collectives, made: Collectives, members: Sequence[int]) -> None:
    """Wait until all have joined: no rank may close it before all have its memory.

    A rank that fails before it has joined cannot report that in the new communicator,
    only by leaving or breaking the parent: so that is checked, too.
    """
    try:
        work = made.barrier(async_op=True)
        native = work.native
        while not native.wait(_LOOK_NS):
            if _blockers(comm, members) and not native.wait(_GRACE_NS):
                break
        else:
            work.wait()
            return
    except PeerLost as error:
        made.close()
        if _is_broken(comm):  # then others left because of it
            raise comm.core.failure(refused="split") from error
        raise _renamed(error, comm, members) from error
    except CollectiveTimeout as error:
        made.close()
        late = [members[r] for r in error.ranks]
        names = ", ".join(str(comm.peers[r]) for r in late)
        raise CollectiveTimeout(
            f"split: {names} did not join the new communicator within "
            f"{comm.timeout_s:g} s",
            ranks=late,
            collective="split",
            seq=error.seq,
        ) from error
    made.close()
    raise _broken(comm, members)


def _renamed(
    error: PeerLost, comm: Collectives, members: Sequence[int]
) -> UnisonoError:
    """The same error with the parent's ranks."""
    lost = [members[r] for r in error.ranks]
    return PeerLost(
        f"split: {comm.peers[lost[0]]} was lost before all had joined the new "
        "communicator",
        ranks=lost,
        pids=error.pids,
        host=error.host,
        collective=error.collective,
        seq=error.seq,
    )


def _blockers(comm: Collectives, members: Sequence[int]) -> list[int]:
    """The ranks that prevent the split: those that have left or died."""
    states = comm.core.native.states()
    gone = [r for r, state in enumerate(states) if state[_DEAD]]
    gone += [r for r in members if states[r][_LEFT]]
    return gone or ([comm.rank] if _is_broken(comm) else [])


def _broken(comm: Collectives, members: Sequence[int]) -> UnisonoError:
    """Break the communicator for all, unless it is broken already; the error."""
    if not _is_broken(comm):
        comm.core.native.abort_unreachable(_blockers(comm, members)[0], False)
    return comm.core.failure(refused="split")


def _is_broken(comm: Collectives) -> bool:
    return comm.core.native.failure()[0] != FailureCode.NONE
