"""The driver may wait for kernels where a rank makes a call: no rank depends on it.

To allocate memory or to load a kernel, CUDA may wait for the kernels that run. With
ranks that are threads of one process those wait for a call that is not made yet.
"""

import threading
import time
from functools import partial

import numpy as np
import pytest

import emulated as cuda
from device_cases import to_device
from processes import on_processes
from unisono import _native
from unisono.testing import world

WITHIN_S = 30
TIMEOUT_S = 20


@pytest.fixture
def spawn(monkeypatch):
    """Run a program in a process of its own, whose driver waits whenever it may."""
    monkeypatch.setenv("UNISONO_EMULATED_WAITS", "1")
    return lambda program: on_processes(program, 1)[0]


class Turns:
    """The last rank makes each call when the kernels of the others run it already."""

    def __init__(self, n):
        self.n = n
        self.launched = threading.Barrier(n)

    def call(self, comm, stream, make):
        if comm.rank < self.n - 1:
            made = make()
            assert cuda.query(stream.handle) == 600  # not ready
            self.launched.wait()
            return made
        self.launched.wait()
        return make()


def first_uses(comm, turns):
    """Calls that each need new tables: other sizes, algorithms and operations."""
    cuda.initialize()
    stream = _native.CudaStream(0)
    arrays = [to_device(np.ones(10 * i)) for i in range(1, 9)]
    comm.timeout_s = TIMEOUT_S
    comm.all_reduce(arrays[0], stream=stream)  # the ranks connect
    comm.all_reduce(arrays[0], stream=stream, algorithm="ring")
    comm.synchronize(WITHIN_S)
    for i, x in enumerate(arrays):
        for algorithm in ("direct", "ring"):
            turns.call(
                comm,
                stream,
                partial(
                    comm.all_reduce,
                    x,
                    stream=stream,
                    algorithm=algorithm,
                    label=f"{i} {algorithm}",
                ),
            )
            comm.synchronize(WITHIN_S)
    return [float(x.numpy()[0]) for x in arrays]


def run_first_uses(_):
    with world(3) as w:
        return w.run(first_uses, Turns(3))


def test_first_call_of_a_kind_allocates_nothing(spawn):
    expected = [3.0**4] + [3.0**2] * 7
    assert spawn(run_first_uses) == [expected] * 3


def new_kernels(comm, turns):
    """One rank runs ahead, to calls whose kernels are not loaded yet."""
    cuda.initialize()
    stream = _native.CudaStream(0)
    types = ["float32", "float64", "int32", "int64"]
    arrays = [to_device(np.ones(10, t)) for t in types]
    comm.timeout_s = TIMEOUT_S
    comm.barrier()
    if comm.rank == 1:
        turns.launched.wait()
    comm.all_reduce(arrays[0], stream=stream)
    if comm.rank == 0:
        turns.launched.wait()
    for x in arrays[1:]:
        comm.all_reduce(x, stream=stream)
        comm.all_reduce(x, op="max", stream=stream)
    comm.synchronize(WITHIN_S)
    return [float(x.numpy()[0]) for x in arrays]


def connect(comm):
    """Connect, without the kernels of the calls below."""
    out = to_device(np.ones(comm.world_size, np.uint8))
    x = to_device(np.ones(1, np.uint8))
    comm.all_gather(x, out=out, stream=_native.CudaStream(0))
    comm.synchronize(WITHIN_S)


def frees(comm, turns):
    """Memory is dropped while a kernel waits for a call of the same process."""
    cuda.initialize()
    stream = _native.CudaStream(0)
    x = to_device(np.ones(10))
    spares = [to_device(np.ones(10)) for _ in range(5)]
    comm.timeout_s = TIMEOUT_S
    comm.all_reduce(x, stream=stream)
    comm.synchronize(WITHIN_S)
    for _ in range(5):
        if comm.rank == 0:
            comm.all_reduce(x, stream=stream)
            spares.pop()
            time.sleep(0.1)  # for the thread that frees
            turns.launched.wait()
        else:
            turns.launched.wait()
            comm.all_reduce(x, stream=stream)
        comm.synchronize(WITHIN_S)
    return float(x.numpy()[0])


def run_frees(_):
    with world(2) as w:
        return w.run(frees, Turns(2))


def test_memory_is_freed_when_no_call_waits():
    """To free memory the driver waits, and lets no thread launch meanwhile."""
    assert on_processes(run_frees, 1) == [[2.0**6] * 2]


def run_new_kernels(_):
    with world(2) as w:
        w.run(connect)
        return w.run(new_kernels, Turns(2))


def test_kernels_are_loaded_when_no_earlier_call_waits(spawn):
    assert spawn(run_new_kernels) == [[2.0] * 4] * 2


def kernel_calls(_):
    """Kernels are loaded when they are made: their first launch does not wait."""
    loads = _native.emulated_calls_of("cuFuncLoad")
    _native.CudaKernel(0, b"unisono-emulated 11 0")
    return _native.emulated_calls_of("cuFuncLoad") - loads


@pytest.mark.skipif(cuda.ON_GPU, reason="counts calls of the emulation")
def test_kernels_are_loaded_completely_when_they_are_made(spawn):
    assert spawn(kernel_calls) == 2


def many_plans(comm):
    """More tables than were allocated at first; the oldest are used again."""
    stream = _native.CudaStream(0)
    x = to_device(np.ones(4, np.int64))
    labels = [str(i) for i in range(3000)]
    for label in [*labels, labels[0], labels[-1]]:
        comm.all_reduce(x, op="max", stream=stream, label=label)
    comm.synchronize(WITHIN_S)
    return x.numpy().tolist()


@pytest.mark.sweep
def test_tables_of_many_plans_are_allocated_and_released():
    with world(2) as w:
        assert w.run(many_plans) == [[1] * 4] * 2


def captured_plan(comm):
    """A graph keeps the tables of its calls when the plans are forgotten."""
    cuda.initialize()
    stream = _native.CudaStream(0)
    x = to_device(np.full(8, comm.rank + 1, np.int64))
    comm.all_reduce(x, op="max", stream=stream)
    comm.synchronize(WITHIN_S)
    cuda.begin_capture(stream.handle, cuda.GLOBAL)
    comm.all_reduce(x, stream=stream, label="captured")  # not made before
    graph = cuda.instantiate(cuda.end_capture(stream.handle))
    comm.core.device.made.plane._plans.clear()
    comm.barrier()
    for i in range(300):  # other tables in the memory of those, if it were free
        comm.all_reduce(x, op="max", stream=stream, label=f"other {i}")
    cuda.launch_graph(graph, stream.handle)
    comm.all_reduce(x, stream=stream, label="captured")
    cuda.launch_graph(graph, stream.handle)
    cuda.synchronize(stream.handle)
    comm.synchronize(WITHIN_S)
    return x.numpy().tolist()


def test_graph_keeps_the_tables_of_its_calls():
    with world(2) as w:
        assert w.run(captured_plan) == [[2 * 2**3] * 8] * 2
