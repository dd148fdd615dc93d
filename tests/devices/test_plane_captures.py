"""Captures in the global mode, torch's default: unisono never breaks them."""

import gc
import threading
import time

import numpy as np

import emulated as cuda
from device_cases import to_device
from processes import on_processes
from unisono import _native
from unisono.testing import world

WITHIN_S = 30


def until(is_true):
    """Wait for another thread; a limit only for what would never come."""
    begun = time.monotonic()
    while not is_true():
        assert time.monotonic() - begun < WITHIN_S
        time.sleep(0.005)


def is_freed(address):
    """Whether the driver knows no memory there; no capture forbids to ask."""
    _native.release_freed_memory(0)
    found = [cuda.c_address(), cuda.c_size_t(), cuda.c_address(address)]
    arguments = cuda.byref(found[0]), cuda.byref(found[1]), found[2]
    return cuda.code_of("cuMemGetAddressRange_v2", *arguments) != 0


def first_call_in_capture(comm):
    """Plans and kernels are made, and memory is freed, while this thread captures."""
    stream = _native.CudaStream(0)
    cuda.initialize()
    x = to_device(np.full(40, comm.rank + 1, np.int64))
    comm.all_reduce(x, stream=stream)  # the ranks connect
    comm.synchronize(WITHIN_S)
    cuda.begin_capture(stream.handle, cuda.GLOBAL)
    comm.all_reduce(x, op="max", stream=stream)
    comm.all_reduce(x, op="sum", algorithm="ring", stream=stream)
    comm.synchronize(WITHIN_S)
    spare = to_device(np.ones(7))
    address = spare.view.address
    assert spare.numpy().tolist() == [1.0] * 7
    del spare
    gc.collect()
    until(lambda: is_freed(address))
    assert cuda.capturing(stream.handle) == 1
    graph = cuda.instantiate(cuda.end_capture(stream.handle))
    comm.barrier()
    for _ in range(3):
        cuda.launch_graph(graph, stream.handle)
    cuda.synchronize(stream.handle)
    return x.numpy().tolist()


def test_first_call_of_a_kind_can_be_captured():
    with world(2) as w:
        assert w.run(first_call_in_capture) == [[3 * 2**3] * 40] * 2


def other_calls(comm):
    """One rank captures; calls on another communicator go on beside it."""
    group = comm.split(0)
    mine, beside = _native.CudaStream(0), _native.CudaStream(0)
    cuda.initialize()
    x, y = (to_device(np.full(40, comm.rank + 1, np.int64)) for _ in range(2))
    comm.all_reduce(x, stream=mine)
    group.all_reduce(y, stream=beside)
    comm.synchronize(WITHIN_S)
    group.synchronize(WITHIN_S)
    if comm.rank == 0:
        cuda.begin_capture(mine.handle, cuda.GLOBAL)
    comm.barrier()

    def call_often():
        for i in range(10):
            z = to_device(np.ones(100 + i))  # another one, which others map
            group.all_reduce(z, stream=beside, async_op=i % 2 == 1)
            group.synchronize(WITHIN_S)

    other = threading.Thread(target=call_often)
    other.start()
    other.join()
    comm.barrier()
    if comm.rank == 0:
        assert cuda.capturing(mine.handle) == 1
        comm.all_reduce(x, stream=mine)
        graph = cuda.instantiate(cuda.end_capture(mine.handle))
        cuda.launch_graph(graph, mine.handle)
    else:
        comm.all_reduce(x, stream=mine)
    comm.barrier()  # nobody captures any more: this test may wait for its stream
    cuda.synchronize(mine.handle)
    return x.numpy().tolist()


def test_other_threads_of_the_process_do_not_break_a_capture():
    with world(2) as w:
        assert w.run(other_calls) == [[6] * 40] * 2


def test_other_processes_do_not_break_a_capture():
    """They share memory, which the rank that captures maps meanwhile."""
    assert on_processes(other_calls, 2) == [[6] * 40] * 2


def asynchronous(comm):
    stream = _native.CudaStream(0)
    cuda.initialize()
    x = to_device(np.full(40, comm.rank + 1, np.int64))
    comm.all_reduce(x, stream=stream)
    comm.synchronize(WITHIN_S)
    cuda.begin_capture(stream.handle, cuda.GLOBAL)
    works = [comm.all_reduce(x, stream=stream, async_op=True) for _ in range(2)]
    assert all(work.wait() is x for work in works)
    graph = cuda.instantiate(cuda.end_capture(stream.handle))
    comm.barrier()
    cuda.launch_graph(graph, stream.handle)
    cuda.synchronize(stream.handle)
    return x.numpy().tolist()


def test_asynchronous_calls_are_captured_when_they_are_waited_for():
    with world(2) as w:
        assert w.run(asynchronous) == [[12] * 40] * 2
