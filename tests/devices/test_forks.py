"""Forked children of a process that uses CUDA: they call no driver, and do not wait."""

import gc
import os
import signal
import threading
import time
import traceback

import numpy as np
import pytest

import unisono
from device_cases import to_device
from unisono import _native
from unisono.errors import UsageError
from unisono.testing import world

WITHIN_S = 30


def in_child(function, *args):
    """Run a function in a forked child, which must end by itself."""
    child = os.fork()
    if child == 0:
        signal.alarm(WITHIN_S)
        status = 1
        try:
            function(*args)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def threads():
    return len(os.listdir("/proc/self/task"))


class Objects:
    """One of each kind, and a communicator with a device half."""

    def __init__(self, comm):
        self.comm = comm
        self.array = to_device(np.ones(5))
        self.stream = _native.CudaStream(0)
        self.event = _native.CudaEvent(0)
        self.kernel = _native.CudaKernel(0, b"unisono-emulated 11 0")
        self.all_reduce()

    def all_reduce(self):
        self.comm.all_reduce(self.array, stream=self.stream)
        self.comm.synchronize(WITHIN_S)


def drops_all(every):
    calls = _native.emulated_calls()
    every.clear()
    gc.collect()
    assert _native.emulated_calls() == calls
    assert threads() == 1


def uses(every):
    calls = _native.emulated_calls()
    mine = every[0]
    for use in (
        mine.array.numpy,
        mine.event.query,
        lambda: _native.CudaMemory(0, 8),
        lambda: _native.CudaStream(0),
        lambda: _native.cuda_device(0),
        _native.cuda_device_count,
        mine.comm.core.in_flight.device.is_idle,
    ):
        with pytest.raises(_native.CudaError, match="fork of one that has used CUDA"):
            use()
    with pytest.raises(UsageError, match="fork of rank 0"):
        mine.all_reduce()
    mine.comm.core.in_flight.device.close()
    assert mine.comm.records()
    assert _native.emulated_calls() == calls
    assert threads() == 1


def forks(_, *, releases):
    every = []
    with world(1) as w:
        w.run(lambda comm: every.append(Objects(comm)))
        if releases:  # a thread for it is started
            before = _native.emulated_objects()["memory"]
            to_device(np.ones(5))
            while _native.emulated_objects()["memory"] > before:
                _native.release_freed_memory(0)
                time.sleep(0.005)
        in_child(uses, every)
        in_child(drops_all, every)
        every[0].all_reduce()
        return every[0].array.numpy().tolist()


def forks_before_anything_is_released(comm):
    return forks(comm, releases=False)


def forks_after_a_release(comm):
    return forks(comm, releases=True)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "program", [forks_before_anything_is_released, forks_after_a_release]
)
def test_child_neither_calls_the_driver_nor_waits(program):
    assert unisono.spawn(program, 1) == [[1.0] * 5]


def reads(array):
    with pytest.raises(_native.CudaError, match="fork"):
        array.numpy()


def forks_during_a_copy(_):
    """The copying thread holds a lock, which nobody releases in the child."""
    large, small = np.ones(1 << 24), to_device(np.ones(3))
    array = to_device(large)
    for _ in range(3):
        copies = _native.emulated_calls_of("cuMemcpyAsync")
        thread = threading.Thread(target=array.copy_from, args=(large,))
        thread.start()
        while _native.emulated_calls_of("cuMemcpyAsync") == copies:
            time.sleep(0)
        in_child(reads, small)
        thread.join()
    return small.numpy().tolist()


@pytest.mark.sweep
def test_child_does_not_wait_for_a_copy_of_the_parent():
    assert unisono.spawn(forks_during_a_copy, 1) == [[1.0] * 3]


def test_child_may_use_cuda_if_the_parent_has_not():
    assert unisono.spawn(uses_first, 1) == [None]


def uses_first(_):
    in_child(lambda: _native.CudaMemory(0, 8))
    _native.CudaMemory(0, 8)
