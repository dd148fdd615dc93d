"""Ranks that are streams of one process, driven by one thread."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))
if os.environ.get("UNISONO_CUDA_DRIVER") != "emulated":
    os.environ["UNISONO_GPU_TESTS"] = "1"

import numpy as np

from unisono import _native, cuda_queues
from unisono.devices.arrays import DeviceArray
from unisono.testing import world

cuda: Any = import_module("emulated")
"""CUDA's driver: that of the machine, or the emulation."""
ROUNDS = 5
_COPIES = 50
LEAST_S = 0.05
"""A round has as many launches as take so long."""


def prepare_streams() -> None:
    """Let every stream have a queue of the device; before the driver is initialized.

    Not for ranks that are processes: a GPU has room for few contexts with so many.
    """
    cuda_queues.request_all()
    cuda.initialize()


class StreamRanks:
    """n ranks, with a stream each, on device 0."""

    def __init__(self, n: int) -> None:
        """Connect them; `prepare_streams` was called before."""
        self.n = n
        self.world = world(n)
        self.comms = self.world.comms
        self.streams = [_native.CudaStream(0) for _ in range(n)]
        self.world.run(self._connect)

    def _connect(self, comm: Any) -> None:
        comm.all_reduce(array(1), stream=self.streams[comm.rank])
        comm.synchronize(60)

    def each(self, call: Callable[[Any, int, Any], Any]) -> list[Any]:
        """call(comm, rank, stream) on every rank; none waits for the device."""
        streams = enumerate(self.streams)
        return [call(self.comms[rank], rank, stream) for rank, stream in streams]

    def synchronize(self) -> None:
        """Wait for all calls."""
        for comm in self.comms:
            comm.synchronize(60)

    def captured(self, call: Callable[[Any, int, Any], Any], repeats: int) -> Graph:
        """A graph in which every rank makes the call so many times."""
        self.world.run(lambda c: call(c, c.rank, self.streams[c.rank]))
        self.synchronize()
        handles = [stream.handle for stream in self.streams]
        first = handles[0]
        cuda.begin_capture(first)
        fork = cuda.event()
        cuda.record(fork, first)
        for other in handles[1:]:
            cuda.wait(other, fork)
        for _ in range(repeats):
            self.each(call)
        for other in handles[1:]:
            join = cuda.event()
            cuda.record(join, other)
            cuda.wait(first, join)
        return Graph(cuda.instantiate(cuda.end_capture(first)), first, repeats)

    def seconds(self, call: Callable[[Any, int, Any], Any], repeats: int = 20) -> float:
        """Of one call, in a graph that has it several times."""
        graph = self.captured(call, repeats)
        took = graph.seconds()
        self.synchronize()
        return took

    def close(self) -> None:
        """Close all ranks."""
        self.world.close()


class Graph:
    """A captured graph on a stream."""

    def __init__(self, exec_: int, stream: int, repeats: int) -> None:
        """It has so many calls one after the other."""
        self.exec = exec_
        self.stream = stream
        self.repeats = repeats

    def launch(self, times: int) -> None:
        """Launch it so many times."""
        for _ in range(times):
            cuda.launch_graph(self.exec, self.stream)

    def seconds(self) -> float:
        """Of one of its calls: the median of several rounds."""
        return seconds(self.launch, self.stream) / self.repeats


def seconds(launch: Callable[[int], None], stream: int) -> float:
    """Of one launch, of as many as fill a round; the median of several rounds."""
    times = 1
    while (took := _timed(launch, times, stream)) < LEAST_S:
        times = max(times + 1, min(4 * times, int(times * 1.2 * LEAST_S / took)))
    return (
        sorted(_timed(launch, times, stream) for _ in range(ROUNDS))[ROUNDS // 2]
        / times
    )


def _timed(launch: Callable[[int], None], times: int, stream: int) -> float:
    cuda.synchronize(stream)
    begun = time.perf_counter()
    launch(times)
    cuda.synchronize(stream)
    return time.perf_counter() - begun


def array(count: int, dtype: str = "float32") -> DeviceArray:
    """Ones on the device."""
    made = DeviceArray((count,), dtype, 0)
    if count * np.dtype(dtype).itemsize <= 1 << 20:
        made.copy_from(np.ones(count, dtype))
    return made


def copy_speed() -> float:
    """Bytes per second, read and written, of the driver's copy inside the device."""
    nbytes = 1 << 20 if _native.cuda_is_emulated() else 1 << 30
    return 2 * nbytes / _native.cuda_copy_seconds(0, nbytes, _COPIES)
