"""all_reduce on CUDA arrays between hosts, as a share of the CPU plane's on that link.

    python -m benchmarks.gpu.hosts [--hosts 1,1] [--sizes 1M,16M,64M] [--rate 10gbit]

The ranks are processes of this machine that share its GPU; hosts are pretended, and
talk over loopback, or with --rate over links of network namespaces (as root). A rank
calls on an array of the device and on one of the host in turns: the same elements, over
the same streams. Without MPS the GPU runs processes by turns; with --threads the ranks
are threads of one process, over pairs of sockets.

Rates are bytes of the array over the time of a call, of the median of rounds. `memory`
is by how much a rank's memory of the host grows in the first call on the device of that
size, whose result is checked.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.ranks import array
from unisono import _native
from unisono.testing import Hosts, world, world_across
from unisono.units import format_bytes, parse_bytes

ROUNDS = 5
LEAST_S = 0.2
LIMIT_S = 120.0

Row = tuple[int, float, float, int, bool]


def measure(comm: Any, sizes: list[int]) -> tuple[int, list[Row]]:
    """Memory for the first call; and for each size what is printed.

    That is seconds on the device and on the host, memory, and whether it is right.
    """
    stream = _native.CudaStream(0)
    x = array(1)
    before = _resident()
    comm.all_reduce(x, stream=stream)  # the ranks connect
    comm.synchronize(LIMIT_S)
    connected = _resident() - before
    rows: list[Row] = []
    for nbytes in sizes:
        here = comm.empty((nbytes // 4,))
        here[:] = comm.rank + 1
        there = array(nbytes // 4)
        there.copy_from(here)
        comm.barrier()
        before = _resident()
        comm.all_reduce(there, stream=stream)
        comm.synchronize(LIMIT_S)
        grown = _resident() - before
        n = comm.world_size
        right = bool((there.numpy() == n * (n + 1) / 2).all())

        def on_device(x: Any = there) -> None:
            comm.all_reduce(x, op="max", stream=stream)
            comm.synchronize(LIMIT_S)

        def on_host(x: Any = here) -> None:
            comm.all_reduce(x, op="max")

        device, host = _seconds(comm, on_device, on_host)
        rows.append((nbytes, device, host, grown, right))
    return connected, rows


def _resident() -> int:
    """The bytes of this process that are in memory."""
    fields = Path("/proc/self/statm").read_text(encoding="ascii").split()
    return int(fields[1]) * 4096


def _seconds(comm: Any, *calls: Callable[[], None]) -> list[float]:
    """Of one call each: the medians of rounds that take turns."""
    times = []
    for call in calls:
        call()
        took = _timed(comm, call, 1)
        times.append(max(1, int(LEAST_S / took)))
    rounds = [
        [_timed(comm, call, k) / k for call, k in zip(calls, times, strict=True)]
        for _ in range(ROUNDS)
    ]
    return [float(np.median(column)) for column in np.transpose(rounds)]


def _timed(comm: Any, call: Callable[[], None], times: int) -> float:
    """Of the slowest rank; the same on all."""
    comm.barrier()
    begun = time.perf_counter()
    for _ in range(times):
        call()
    took = time.perf_counter() - begun
    return float(comm.all_reduce(np.array([took]), op="max")[0])


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser()
    options.add_argument("--hosts", default="1,1", help="ranks of each host")
    options.add_argument("--sizes", default="1M,16M,64M,256M")
    options.add_argument("--threads", action="store_true", help="not processes")
    options.add_argument("--rate", help="of every link, as 10gbit: network namespaces")
    chosen = options.parse_args()
    ranks = [int(word) for word in chosen.hosts.split(",")]
    sizes = [parse_bytes(word) for word in chosen.sizes.split(",")]
    links = Hosts(len(ranks), rate=chosen.rate) if chosen.rate else nullcontext()
    function = import_module("benchmarks.gpu.hosts").measure  # as new processes find it
    with links as on:
        where = {} if on is None else {"on": on}
        numbers = [number for number, k in enumerate(ranks) for _ in range(k)]
        made: Any = (
            world(len(numbers), hosts=numbers)
            if chosen.threads
            else world_across(ranks, timeout_s=600, **where)
        )
        connected, rows = made.run(function, sizes)[0]
    print(f"memory of the host for the first call: {format_bytes(connected)}")
    for nbytes, device, host, grown, right in rows:
        rates = [f"{nbytes / seconds / 1e9:6.3f} GB/s" for seconds in (device, host)]
        print(
            f"all_reduce of {format_bytes(nbytes):>8} on hosts of {chosen.hosts}: "
            f"device {rates[0]}, host {rates[1]}, share {100 * host / device:5.1f} %, "
            f"memory {format_bytes(max(0, grown))}, {'right' if right else 'WRONG'}"
        )


if __name__ == "__main__":
    main()
