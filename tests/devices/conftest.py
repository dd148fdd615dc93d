"""The device plane is tested on an emulated driver, whose kernels are CPU threads.

`make gpu-test` runs the same tests of the plane on the GPU of the machine.
"""

import pytest

import emulated as cuda


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    if not cuda.ON_GPU:
        monkeypatch.setenv("UNISONO_CUDA_DRIVER", "emulated")
        monkeypatch.setenv("UNISONO_CUDA_BLOCKS", "2")


@pytest.fixture
def driver():
    """A context of device 0, destroyed after the test if nobody else has it."""
    context = cuda.initialize()
    yield context
    cuda.release()
