"""Ranks that do not come or are killed, many times over, on a GPU.

    python -m benchmarks.gpu.trials absent [times]
    python -m benchmarks.gpu.trials kill [times [seconds [first]]]

Every survivor must raise the error that names the rank, and go on: with `absent` in a
new world of the same process, with `kill` after `shrink`. Memory of the device and
open files must not grow.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from ctypes import CDLL, byref, c_size_t
from typing import Any

import numpy as np

from benchmarks.gpu.ranks import array, prepare_streams
from unisono import _native
from unisono.errors import CollectiveTimeout, PeerLost, UnisonoError
from unisono.testing import world, world_across

TIMEOUT_S = 0.1
LATE_S = 0.5
"""An error must come so soon after the timeout."""
NOTICED_S = 1.0
"""A death must be noticed so soon."""
RANKS = 8


def absent(times: int) -> int:
    """One rank of three does not make the call, in a new world each time."""
    prepare_streams()
    problems = []
    latest = 0.0
    before: tuple[int, int] | None = None
    for trial in range(times):
        culprit = trial % 3
        with world(3, timeout_s=30) as w:
            for found in w.run(_absent, culprit):
                latest = max(latest, found[0])
                problems += [f"trial {trial}: {text}" for text in found[1:]]
        if trial == min(20, times - 1):
            before = _used()
    time.sleep(1)  # what is released later
    after = _used()
    assert before is not None
    grown = after[0] - before[0], after[1] - before[1]
    print("\n".join(problems[:20]))
    print(
        f"absent: {times} trials, {len(problems)} problems, the latest error "
        f"{latest:.3f} s after the timeout; device memory {grown[0] / 2**20:+.1f} MiB, "
        f"open files {grown[1]:+d}"
    )
    return int(bool(problems) or grown[0] > 64 << 20 or grown[1] > 16)


def _absent(comm: Any, culprit: int) -> tuple[Any, ...]:
    stream = _native.CudaStream(0)
    x = array(1000)
    comm.all_reduce(x, stream=stream)
    comm.synchronize(30)
    if comm.rank == culprit:
        while comm.core.native.failure()[0] == 0:  # until the others have given up
            time.sleep(0.01)
        return (0.0,)
    begun = time.monotonic()
    try:
        comm.all_reduce(x, stream=stream, timeout_s=TIMEOUT_S)
        comm.synchronize(30)
    except CollectiveTimeout as error:
        late = time.monotonic() - begun - TIMEOUT_S
        if error.ranks != (culprit,):
            return late, f"named {error.ranks}, absent was {culprit}"
        return (late,) if late < LATE_S else (late, f"{late:.3f} s late")
    except UnisonoError as error:
        return 0.0, f"raised {error!r}"
    return 0.0, "raised nothing"


def _used() -> tuple[int, int]:
    """Bytes of the device that are used, and open files of this process."""
    free, total = c_size_t(), c_size_t()
    if not _native.cuda_is_emulated():
        CDLL("libcuda.so.1").cuMemGetInfo_v2(byref(free), byref(total))
    return total.value - free.value, len(os.listdir("/proc/self/fd"))


def kill(times: int, seconds: float = float("inf"), first: int = 1) -> int:
    """Worlds of processes, of which one after another is killed in a call."""
    problems, kills, latest = [], 0, 0.0
    seed, end_by = first - 1, time.monotonic() + seconds
    while kills < times and time.monotonic() < end_by:
        seed += 1
        started = world_across([RANKS], env={"UNISONO_ADDRESS": ""}, grace_s=120)
        with started.start(_survive, seed) as running:
            ends = running.wait()
        order = _order(seed)
        for end in ends:
            wanted = 0 if end.rank == order[-1] else -signal.SIGKILL
            if end.status != wanted:
                problems.append(
                    f"world {seed}: rank {end.rank} ended with {end.status}"
                )
        last = ends[order[-1]]
        if last.status == 0:
            latest = max(latest, last.result[0])
            problems += [f"world {seed}: {text}" for text in last.result[1]]
        kills += RANKS - 1
    print("\n".join(problems[:20]))
    print(
        f"kill: {kills} kills in {seed + 1 - first} worlds, {len(problems)} problems, "
        f"the latest error {latest:.3f} s after the death"
    )
    return int(bool(problems))


def _order(seed: int) -> list[int]:
    """The ranks in the order in which they are killed; the last one survives."""
    order = list(range(RANKS))
    random.Random(seed).shuffle(order)
    return order


def _survive(comm: Any, seed: int) -> tuple[float, list[str]]:
    me, problems, latest = comm.rank, [], 0.0
    stream = _native.CudaStream(0)
    alive = list(range(RANKS))
    for victim in _order(seed)[:-1]:
        x = array(5000)
        comm.all_reduce(x, stream=stream)
        comm.synchronize(60)
        if not (x.numpy() == len(alive)).all():
            problems.append(f"a wrong sum on {len(alive)} ranks")
        died = np.zeros(1)
        if alive.index(victim) == comm.rank:
            died[0] = time.monotonic()
        died = comm.all_reduce(died)  # all have ended the call
        if victim == me:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            comm.all_reduce(x, stream=stream)
            comm.synchronize(60)
            problems.append("raised nothing")
        except PeerLost as error:
            latest = max(latest, time.monotonic() - died[0])
            if error.ranks != (alive.index(victim),):
                problems.append(f"named {error.ranks}, killed {alive.index(victim)}")
        comm = comm.shrink()
        alive.remove(victim)
    if latest > NOTICED_S:
        problems.append(f"noticed a death after {latest:.3f} s")
    return latest, problems


if __name__ == "__main__":
    from benchmarks.gpu import trials  # where new processes find it

    what, numbers = sys.argv[1], [int(word) for word in sys.argv[2:]] or [100]
    sys.exit({"absent": trials.absent, "kill": trials.kill}[what](*numbers))
