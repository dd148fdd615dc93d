"""What is made of collectives: smaller communicators, objects, uneven exchanges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from unisono.errors import (
    BadArgument,
    CollectiveTimeout,
    ConnectFailed,
    Corrupted,
    PeerLost,
    UnisonoError,
    whole_number,
)
from unisono.runtime.base import agreed_number
from unisono.runtime.buffers import readable
from unisono.runtime.failures import Trouble
from unisono.runtime.objects import MOST_BYTES, decode, encode
from unisono.units import format_bytes

if TYPE_CHECKING:
    from unisono.runtime.communicator import Communicator

_NO_COLOR = -(1 << 62)
_MOST_ROWS = 1 << 48
"""More than any machine holds: who announces that many is mistaken."""
_LEFT, _DEAD = 4, 5  # among what the native core tells of a rank
_LOOK_NS = 50_000_000
_GRACE_NS = 2_000_000_000
"""For the last words of a barrier that others have passed, and may have closed."""


def split(comm: Communicator, color: int | None, key: int) -> Communicator | None:
    """One communicator for each color: on each host its first makes the memory."""
    mine = _NO_COLOR if color is None else whole_number("color", color)
    told = comm.all_gather(np.array([[mine, whole_number("key", key)]], np.int64))
    order = sorted(range(comm.world_size), key=lambda r: (int(told[r, 1]), r))
    members = [r for r in order if color is not None and told[r, 0] == mine]
    world = [comm._ranks[r] for r in members]
    segment = 0
    owner = comm._transport.owner(world) if members else -1
    if owner == comm._ranks[comm.rank]:
        segment = comm._transport.memory_for(world)
    segments = comm.all_gather(np.array([segment], np.int64))
    comm._splits += 1
    if not members:
        return None
    number = int(segments[comm._ranks.index(owner)])
    try:
        made = comm.joined(
            comm._transport,
            world,
            number,
            agreed=agreed_number(f"{comm._agreed}/{comm._splits}/{mine}"),
            timeout_s=comm.timeout_s,
            meeting_s=comm.timeout_s,
            name=f"{comm.name}/{mine}",
            in_vain=lambda: bool(_hindered(comm, members)),
        )
    except ConnectFailed as error:
        if _hindered(comm, members):
            raise _broken(comm, members) from error
        raise
    _await_all(comm, made, members)
    return made


def _await_all(comm: Communicator, made: Communicator, members: Sequence[int]) -> None:
    """Wait until all have joined: nobody may close it before all found its memory.

    A rank that fails before it has joined cannot say so in the new communicator, only
    by leaving or breaking the one that it was made from: so that is looked at, too.
    """
    try:
        work = made.barrier(async_op=True)
        native = work.native
        while not native.wait(_LOOK_NS):
            if _hindered(comm, members) and not native.wait(_GRACE_NS):
                break
        else:
            work.wait()
            return
    except PeerLost as error:
        made.close()
        if _is_broken(comm):  # then others left because of that
            raise comm._failure(refused="split") from error
        raise _renamed(error, comm, members) from error
    except CollectiveTimeout as error:
        made.close()
        late = [members[r] for r in error.ranks]
        told = ", ".join(str(comm.peers[r]) for r in late)
        raise CollectiveTimeout(
            f"split: {told} did not join the new communicator within "
            f"{comm.timeout_s:g} s",
            ranks=late,
            collective="split",
            seq=error.seq,
        ) from error
    made.close()
    raise _broken(comm, members)


def _renamed(
    error: PeerLost, comm: Communicator, members: Sequence[int]
) -> UnisonoError:
    """The same by the ranks that the caller knows."""
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


def _hindered(comm: Communicator, members: Sequence[int]) -> list[int]:
    """Who keeps some from joining: one who has left, or, breaking all, has died."""
    states = comm._native.states()
    gone = [r for r, state in enumerate(states) if state[_DEAD]]
    gone += [r for r in members if states[r][_LEFT]]
    return gone or ([comm.rank] if _is_broken(comm) else [])


def _broken(comm: Communicator, members: Sequence[int]) -> UnisonoError:
    """Break the communicator for all, unless it is, and tell why it cannot be used."""
    if not _is_broken(comm):
        comm._native.give_up(_hindered(comm, members)[0], False)
    return comm._failure(refused="split")


def _is_broken(comm: Communicator) -> bool:
    return comm._native.verdict()[0] != Trouble.NONE


def broadcast_object(
    comm: Communicator, thing: Any, root: int, allow_pickle: bool
) -> Any:
    """The root's object on every rank: its size first, then its bytes."""
    if comm.rank != root:
        size = int(comm.broadcast(np.zeros(1, np.int64), root=root)[0])
        _check_sizes(comm, "broadcast_object", {root: size})
        data = comm.broadcast(np.empty(size, np.uint8), root=root)
        return decode(data.data, allow_pickle=allow_pickle)
    data = _encoded(thing, allow_pickle)
    comm.broadcast(np.array([data.size], np.int64), root=root)
    comm.broadcast(data.copy(), root=root)
    return thing


def gather_objects(
    comm: Communicator, thing: Any, root: int | None, allow_pickle: bool
) -> list[Any] | None:
    """Everybody's object on the root, or on every rank if there is none."""
    data = _encoded(thing, allow_pickle)
    sizes = comm.all_gather(np.array([data.size], np.int64)).tolist()
    _check_sizes(comm, "gathering objects", dict(enumerate(sizes)))
    if root is None:
        joined = comm.all_gather(data, counts=sizes)
    else:
        joined = comm.gather(data, root=root, counts=sizes)
    if joined is None:
        return None
    ends = np.cumsum(sizes)
    parts = [joined[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    return [decode(part.data, allow_pickle=allow_pickle) for part in parts]


def _check_sizes(comm: Communicator, what: str, sizes: Mapping[int, int]) -> None:
    """Before memory is taken: all ranks see the same sizes, and refuse together."""
    for rank, size in sizes.items():
        if not 0 < size <= MOST_BYTES:
            raise Corrupted(
                f"{what}: {comm.peers[rank]} announces an object of {size} bytes; one "
                f"has from 1 to {format_bytes(MOST_BYTES)}"
            )


def _encoded(thing: Any, allow_pickle: bool) -> NDArray[np.uint8]:
    return np.frombuffer(encode(thing, allow_pickle=allow_pickle), dtype=np.uint8)


def exchange_counts(
    comm: Communicator,
    x: Any,
    send: Sequence[int] | None,
    recv: Sequence[int] | None,
) -> list[list[int]]:
    """What every rank sends to every other, in rows, told by all to all."""
    n = comm.world_size
    if send is None:
        rows = readable(x, "all_to_all").rows
        send = [rows // n] * n if rows % n == 0 else []
    mine = [whole_number("send_counts", c) for c in send]
    wrong = len(mine) != n or min(mine, default=0) < 0
    # A rank with a mistake still takes part, so that the others are not left waiting.
    told = comm.all_gather(np.array([[-1] * n if wrong else mine], np.int64))
    if wrong:
        raise BadArgument(
            f"all_to_all: send_counts = {list(send)}: expected {n} numbers, "
            "none negative"
        )
    bad = [r for r in range(n) if not ((told[r] >= 0) & (told[r] <= _MOST_ROWS)).all()]
    if bad:
        raise BadArgument(f"all_to_all: rank {bad[0]} gave wrong send_counts")
    arriving = told[:, comm.rank].tolist()
    if recv is not None and list(recv) != arriving:
        raise BadArgument(
            f"all_to_all: recv_counts = {list(recv)}, but the others send {arriving}"
        )
    matrix: list[list[int]] = told.tolist()
    return matrix
