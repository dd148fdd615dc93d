"""The device plane is tested on an emulated driver, whose kernels are CPU threads.

`make gpu-test` runs the same tests of the plane on the GPU of the machine.
"""

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import product

import pytest

import emulated as cuda
import fake_nccl
from unisono import _native, cuda_queues
from unisono.devices import nccl, rtc
from unisono.dtypes import DTYPES, REDUCTIONS
from unisono.errors import BadArgument


@pytest.fixture(scope="session", autouse=True)
def compiled():
    """On a GPU all kernels are needed: they are compiled side by side."""
    if not cuda.ON_GPU:
        return
    cuda_queues.request_all()  # for ranks that are threads; before the GPU is used
    capability = divmod(_native.cuda_device(0).capability, 10)

    def compile_one(what):
        with suppress(BadArgument):  # no such operation on the type
            rtc.compile_kernel(capability, *what, one_device=True)

    with ThreadPoolExecutor() as threads:
        list(threads.map(compile_one, product(DTYPES, REDUCTIONS)))


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    if not cuda.ON_GPU:
        monkeypatch.setenv("UNISONO_CUDA_DRIVER", "emulated")
        monkeypatch.setenv("UNISONO_CUDA_BLOCKS", "2")


@pytest.fixture
def without_packets(monkeypatch):
    """Small buffers are used in place, too."""
    monkeypatch.setenv("UNISONO_CUDA_PACKETS", "0")


@pytest.fixture
def with_nccl(monkeypatch):
    """NCCL, a fake one, is the engine, and each of four ranks can have a GPU."""
    library = fake_nccl.compiled()
    monkeypatch.setenv(nccl.VARIABLE, library)
    monkeypatch.setenv("UNISONO_CUDA_ENGINE", "nccl")
    monkeypatch.setenv("UNISONO_EMULATED_GPUS", "4")
    nccl.find.cache_clear()
    yield library
    nccl.find.cache_clear()


@pytest.fixture
def driver():
    """A context of device 0, destroyed after the test if nobody else has it."""
    context = cuda.initialize()
    yield context
    cuda.release()
