"""Rank 0's tuned table on every rank, if it was measured on the machines of all."""

from __future__ import annotations

import msgspec
import numpy as np

from unisono.errors import BadArgument
from unisono.runtime.communicator import Communicator
from unisono.runtime.plan.tuned import (
    MOST_AGREED,
    Tuned,
    TunedWorld,
    load,
    machine,
    path,
    placement_of,
    warn_unused,
)


class _Agreed(msgspec.Struct):
    """Rank 0's table as it is broadcast; no worlds mean that there is none."""

    worlds: tuple[TunedWorld, ...] = ()
    origin: str = ""


def agree(comm: Communicator, timeout_s: float | None = None) -> Tuned | None:
    """Rank 0's table on every rank, if it is for the machines of all; called by all."""
    table = _wire(comm) if comm.rank == 0 else b""
    sizes = np.array([len(table)], np.int64)
    size = int(comm.broadcast(sizes, timeout_s=timeout_s)[0])
    if not size:
        return None
    data = np.frombuffer(table, np.uint8).copy() if table else np.empty(size, np.uint8)
    comm.broadcast(data, timeout_s=timeout_s)
    found = msgspec.msgpack.decode(data.tobytes(), type=_Agreed)
    # A world is used only if it was measured on the machines of all ranks: a later
    # group of other ranks might use it, too.
    n, mine = comm.world_size, [machine() in world.machines for world in found.worlds]
    votes = np.array([*mine, n if any(mine) else comm.rank], np.int64)
    comm.all_reduce(votes, op="min", timeout_s=timeout_s)
    *fits, unknown = votes.tolist()
    worlds = [world for world, fit in zip(found.worlds, fits, strict=True) if fit]
    if worlds:
        return Tuned(worlds, found.origin)
    if comm.rank == 0:
        who = f"{comm.peers[unknown]} is" if unknown < n else "some ranks are"
        what = f"{who} on a machine that is not in the table"
        warn_unused(f"{found.origin}: {what}; run unisono tune on all of them")
    return None


def _wire(comm: Communicator) -> bytes:
    """Rank 0's table: the worlds up to this size, as many as fit."""
    file = path()
    if file is None:
        return b""
    try:
        table = load(file)
    except BadArgument as why:
        warn_unused(str(why))
        return b""
    n, here = comm.world_size, placement_of(comm.world_size, comm.hosts)
    fitting = [w for w in table.worlds if w.n <= n]
    # This world first, then large ones: the least likely groups are left out.
    fitting.sort(key=lambda w: ((w.n, w.placement) != (n, here), -w.n))
    encoded, origin = b"", str(file)
    for count in range(1, len(fitting) + 1):
        bare = [msgspec.structs.replace(w, links=()) for w in fitting[:count]]
        more = msgspec.msgpack.encode(_Agreed(tuple(bare), origin))
        if len(more) > MOST_AGREED:
            break
        encoded = more
    return encoded
