"""Ranks that have several slow cores each, on a machine that has few.

    sudo .venv/bin/python benchmarks/slow_cores.py [-n 4,8] [--cores 2] [--sizes 8M,64M]
        [--collectives all_reduce,all_to_all] [--ways 0/1,1/1,3/2] [--rounds 3]

What I/O threads are worth between hosts shows where every rank has cores to spare. Here
each thread that moves bytes is a core of its own, a slow one: the kernel's deadline
scheduler gives it the same part of every 0.4 ms, whatever else runs, and no more. With
`--cores 2` each rank has two of them: for the calling thread and for one more.

A way is UNISONO_IO_THREADS/UNISONO_LANES; gloo, whose threads are as slow, is beside
them. Ratios compare how work is divided between threads; caches and memory are faster
than such cores, so times mean nothing. all_reduce is by ring, as large ones are.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import socket
import statistics
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from unisono import Communicator
from unisono.testing import world_across
from unisono.transports.lanes import IO_THREADS, LANES
from unisono.transports.session import cores_here
from unisono.units import format_bytes, parse_bytes

PERIOD_NS = 400_000
"""Shorter than a millisecond, so that a thread without its part is not missed long."""
USED = 0.9
"""Of the cores of this machine, by all threads together."""
CALLS = 9
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}[os.uname().machine]
_SCHED_DEADLINE = 6
_LIMIT = Path("/proc/sys/kernel/sched_rt_runtime_us")


def slow_down(thread: int, share: float) -> None:
    """Give a thread this part of a core."""
    runtime = int(PERIOD_NS * share)
    size = struct.calcsize("IIQiIQQQ")
    attributes = struct.pack(
        "IIQiIQQQ", size, _SCHED_DEADLINE, 0, 0, 0, runtime, PERIOD_NS, PERIOD_NS
    )
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(_SCHED_SETATTR, thread, attributes, 0) != 0:
        raise OSError(ctypes.get_errno(), f"thread {thread} cannot be slowed down")


@contextmanager
def deadlines_allowed() -> Iterator[None]:
    """More of them than the kernel could meet: threads that are idle have one, too."""
    before = _LIMIT.read_text()
    _LIMIT.write_text("-1")
    try:
        yield
    finally:
        until = time.monotonic() + 10
        while not _is_set(before):  # busy until the last of them are forgotten
            if time.monotonic() > until:
                print(f"{_LIMIT} is still -1: set it to {before.strip()}")
                break
            time.sleep(0.1)


def _is_set(limit: str) -> bool:
    with suppress(OSError):
        _LIMIT.write_text(limit)
        return True
    return False


def threads() -> set[int]:
    """Those of this process."""
    return {int(name) for name in os.listdir("/proc/self/task")}


def timed(
    call: Callable[[], object],
    barrier: Callable[[], object],
    share: float,
    before: set[int],
) -> float:
    """The median of some calls, when this thread and those begun since are slow."""
    for _ in range(3):
        call()
    for thread in {os.getpid()} | (threads() - before):
        with suppress(ProcessLookupError):  # it has ended
            slow_down(thread, share)
    seconds = []
    for _ in range(CALLS):
        barrier()
        begun = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begun)
    barrier()
    return statistics.median(seconds)


def ours(comm: Communicator, name: str, nbytes: int, share: float) -> float:
    """A rank of unisono."""
    before = threads()
    x = np.ones(nbytes // 4, np.float32)
    out = np.empty_like(x)
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: comm.all_reduce(x, algorithm="ring"),
        "all_to_all": lambda: comm.all_to_all(x, out=out),
    }
    return timed(calls[name], comm.barrier, share, before)


def gloo(port: int, n: int, name: str, nbytes: int, share: float) -> float:
    """A rank of gloo."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    before = threads()
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=int(os.environ["UNISONO_RANK"]),
        world_size=n,
    )
    x = torch.ones(nbytes // 4)
    out = torch.empty_like(x)
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(x),
        "all_to_all": lambda: dist.all_to_all_single(out, x),
    }
    took = timed(calls[name], dist.barrier, share, before)
    dist.destroy_process_group()
    return took


def one_round(way: str, n: int, name: str, nbytes: int, share: float) -> float:
    """Seconds of the slowest rank."""
    here = import_module("slow_cores")  # by its name, so that ranks find its functions
    if way == "gloo":
        with socket.create_server(("127.0.0.1", 0)) as found:
            port = found.getsockname()[1]
        world = world_across([1] * n, init=False)
        took = world.run(here.gloo, port, n, name, nbytes, share)
    else:
        env = dict(zip((IO_THREADS, LANES), way.split("/"), strict=True))
        took = world_across([1] * n, env=env).run(here.ours, name, nbytes, share)
    return float(max(took))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", default="4,8")
    parser.add_argument("--cores", type=int, default=2, help="slow ones of each rank")
    parser.add_argument("--sizes", default="8M,64M")
    parser.add_argument("--collectives", default="all_reduce,all_to_all")
    parser.add_argument("--ways", default="0/1,1/1")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    for n in map(int, args.n.split(",")):
        share = USED * cores_here() / (n * args.cores)
        print(f"{n} ranks, {args.cores} cores of {share:.2f} each: time over gloo's")
        for name in args.collectives.split(","):
            for nbytes in map(parse_bytes, args.sizes.split(",")):
                ways = [*args.ways.split(","), "gloo"]
                found: dict[str, list[float]] = {way: [] for way in ways}
                for _ in range(args.rounds):
                    for way in ways:
                        took = one_round(way, n, name, nbytes, share)
                        found[way].append(took)
                peer = statistics.median(found["gloo"])
                line = f"{name:<12}{format_bytes(nbytes):>8}  gloo {peer * 1e3:.0f} ms"
                for way in ways[:-1]:
                    mine = statistics.median(found[way])
                    line += f"  {way} {mine * 1e3:.0f} ms {mine / peer:.2f}"
                print(line, flush=True)


if __name__ == "__main__":
    if os.getuid() != 0:
        sys.exit("benchmarks/slow_cores.py: only root may set deadlines")
    with deadlines_allowed():
        main()
