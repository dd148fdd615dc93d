"""Collectives on one GPU whose ranks are processes, with and without MPS.

    python -m benchmarks.gpu.processes [-n 2,4,8]

A call is made from Python; CUDA graphs replay one that was captured. With
`nvidia-cuda-mps-control -d` the kernels of all processes run at the same time; without
it the GPU runs the processes by turns, and a call takes several turns.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np

import unisono
from benchmarks.gpu.ranks import array, cuda
from unisono import _native
from unisono.units import format_bytes

SIZES = 16, 64 << 10, 1 << 20, 64 << 20
REPEATS = 10
ROUNDS = 7


def measure(comm: Any, seconds: float) -> list[tuple[int, float, float, bool]]:
    """For each size: the time of a call in a graph and from Python; is it right?"""
    stream = _native.CudaStream(0)
    rows = []
    for nbytes in SIZES:
        x = array(nbytes // 4)
        if nbytes > 1 << 20:
            x.copy_from(np.ones(nbytes // 4, np.float32))

        def call(x: Any = x) -> None:
            comm.all_reduce(x, op="max", stream=stream)

        for _ in range(20):  # until all have mapped the buffer
            call()
            comm.synchronize(60)
            time.sleep(0.01)
        called = _seconds(comm, lambda times: _repeat(call, times), seconds)
        cuda.initialize()
        cuda.begin_capture(stream.handle)
        for _ in range(REPEATS):
            call()
        graph = cuda.instantiate(cuda.end_capture(stream.handle))

        def replay(times: int, graph: int = graph) -> None:
            for _ in range(times):
                cuda.launch_graph(graph, stream.handle)
            cuda.synchronize(stream.handle)

        replayed = _seconds(comm, replay, seconds) / REPEATS
        rows.append((nbytes, replayed, called, bool((x.numpy() == 1).all())))
    return rows


def _repeat(call: Any, times: int) -> None:
    for _ in range(times):
        call()


def _seconds(comm: Any, launch: Any, least: float) -> float:
    """Of one launch: the median of rounds that all ranks begin together."""
    times, took = 1, 0.0
    while took < least:
        took = _timed(comm, launch, times)
        took = float(comm.all_reduce(np.array([took]), op="max")[0])
        times = times if took >= least else max(2 * times, int(times * least / took))
    found = [_timed(comm, launch, times) / times for _ in range(ROUNDS)]
    return float(np.median(comm.all_reduce(np.array(found), op="max")))


def _timed(comm: Any, launch: Any, times: int) -> float:
    comm.barrier()
    begun = time.perf_counter()
    launch(times)
    comm.synchronize(60)
    return time.perf_counter() - begun


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser()
    options.add_argument("-n", default="2,4,8")
    options.add_argument("--seconds", type=float, default=0.05)
    chosen = options.parse_args()
    for n in [int(word) for word in chosen.n.split(",")]:
        begun = time.monotonic()
        for nbytes, replayed, called, right in unisono.spawn(
            measure, n, (chosen.seconds,)
        )[0]:
            print(
                f"all_reduce{n:3} processes {format_bytes(nbytes):>8}: in a graph "
                f"{replayed * 1e6:9.2f} us, from Python {called * 1e6:9.2f} us, "
                f"{'right' if right else 'WRONG'}"
            )
        print(f"  ({time.monotonic() - begun:.1f} s)", flush=True)


if __name__ == "__main__":
    main()
