"""What is made of collectives: smaller communicators, objects, uneven exchanges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from unisono.errors import BadArgument, PeerLost, whole_number
from unisono.runtime.base import agreed_number
from unisono.runtime.buffers import readable
from unisono.runtime.objects import decode, encode

if TYPE_CHECKING:
    from unisono.runtime.communicator import Communicator

_NO_COLOR = -(1 << 62)


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
    made = comm.joined(
        comm._transport,
        world,
        number,
        agreed=agreed_number(f"{comm._agreed}/{comm._splits}/{mine}"),
        timeout_s=comm.timeout_s,
        meeting_s=comm.timeout_s,
        name=f"{comm.name}/{mine}",
    )
    try:
        made.barrier()  # nobody may close it before all have found its memory
    except PeerLost as error:  # by the ranks that the caller knows
        lost = [members[r] for r in error.ranks]
        raise PeerLost(
            f"split: {comm.peers[lost[0]]} was lost before all had joined the new "
            "communicator",
            ranks=lost,
            pids=error.pids,
            host=error.host,
            collective=error.collective,
            seq=error.seq,
        ) from error
    return made


def broadcast_object(
    comm: Communicator, thing: Any, root: int, allow_pickle: bool
) -> Any:
    """The root's object on every rank: its size first, then its bytes."""
    if comm.rank != root:
        size = int(comm.broadcast(np.zeros(1, np.int64), root=root)[0])
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
    if root is None:
        joined = comm.all_gather(data, counts=sizes)
    else:
        joined = comm.gather(data, root=root, counts=sizes)
    if joined is None:
        return None
    ends = np.cumsum(sizes)
    parts = [joined[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    return [decode(part.data, allow_pickle=allow_pickle) for part in parts]


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
    bad = [r for r in range(n) if told[r, 0] < 0]
    if bad:
        raise BadArgument(f"all_to_all: rank {bad[0]} gave wrong send_counts")
    arriving = told[:, comm.rank].tolist()
    if recv is not None and list(recv) != arriving:
        raise BadArgument(
            f"all_to_all: recv_counts = {list(recv)}, but the others send {arriving}"
        )
    matrix: list[list[int]] = told.tolist()
    return matrix
