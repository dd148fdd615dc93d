"""What a constructor has made before one of its steps fails is released."""

import gc
import time

import numpy as np
import pytest

from device_cases import to_device
from emulated_world import alone
from processes import on_processes
from unisono import _native
from unisono.errors import DeviceError
from unisono.testing import world

pytestmark = pytest.mark.one_in(3)

UNKNOWN = 999
WITHIN_S = 30


def settles(before):
    """Wait until the same exists as before; a thread of its own releases."""
    begun = time.monotonic()
    _native.release_freed_memory(0)
    while (now := _native.emulated_objects()) != before:
        assert time.monotonic() - begun < WITHIN_S, f"{before} became {now}"
        gc.collect()
        time.sleep(0.005)
        _native.release_freed_memory(0)


def fail(name, number=1):
    assert _native.fail_emulated_call(name, number, UNKNOWN)


def refused():
    return pytest.raises(_native.CudaError, match="ERROR_UNKNOWN")


def makes(_, name, kind, *args):
    """In a process of its own, where nothing else comes and goes."""
    _native.cuda_device(0)
    before = _native.emulated_objects()
    fail(name)
    with refused():
        getattr(_native, kind)(*args)
    settles(before)


@pytest.mark.parametrize("name", ["cuMemsetD8Async", "cuStreamSynchronize"])
def test_memory_that_cannot_be_cleared_is_freed(name):
    on_processes(makes, 1, (name, "CudaMemory", 0, 100))


@pytest.mark.parametrize("name", ["cuModuleGetFunction", "cuFuncGetAttribute"])
def test_module_without_the_kernel_is_unloaded(name):
    on_processes(makes, 1, (name, "CudaKernel", 0, b"unisono-emulated 11 0"))


@pytest.mark.parametrize(
    "name", ["cuDeviceGetName", "cuDeviceTotalMem_v2", "cuStreamCreate"]
)
def test_device_that_cannot_be_opened_is_closed_and_can_be_opened_later(name):
    code = f"""
        from unisono import _native
        _native.fail_emulated_call("{name}", 1, 999)
        try:
            _native.cuda_device(0)
        except _native.CudaError as error:
            assert "{name}" in str(error)
            print(_native.emulated_objects()["contexts"])
        print(_native.cuda_device(0).name)
    """
    assert alone(code).split("\n") == ["0", "Emulated GPU"]


STEPS = {
    "cuMemAlloc_v2": 8,
    "cuMemsetD8Async": 8,
    "cuMemHostAlloc": 4,
    "cuMemHostGetDevicePointer_v2": 4,
    "cuEventCreate": 4,
    "cuMemcpyAsync": 2,
}
"""Calls of two ranks that make and connect their halves."""


def connects(comm, name, number):
    """A communicator that fails at one step, and connects at the next call."""
    x, stream = to_device(np.ones(3)), _native.CudaStream(0)
    comm.barrier()
    before = _native.emulated_objects()
    comm.barrier()
    if comm.rank == 0:
        fail(name, number)
    comm.barrier()
    with pytest.raises(DeviceError, match="ERROR_UNKNOWN") as raised:
        comm.all_reduce(x, stream=stream)
    assert name in str(raised.value)
    del raised
    comm.barrier()
    settles(before)
    comm.barrier()
    comm.all_reduce(x, stream=stream)
    comm.synchronize(WITHIN_S)
    return x.numpy().tolist()


def fails_at_every_step(_, name):
    _native.CudaKernel(0, b"unisono-emulated 11 0")
    settles(_native.emulated_objects() | {"modules": 0})
    empty = _native.emulated_objects()
    for number in range(1, STEPS[name] + 1):
        with world(2) as w:
            assert w.run(connects, name, number) == [[2.0] * 3] * 2
        del w
        settles(empty | {"modules": 1})  # kernels are kept


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", STEPS)
def test_communicator_that_cannot_be_made_leaves_nothing(name):
    on_processes(fails_at_every_step, 1, (name,))
