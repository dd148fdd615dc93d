"""Collectives by NCCL, of which a fake one runs on the emulated driver."""

import numpy as np
import pytest

import emulated
from device_cases import to_device
from fake_nccl import FakeNccl, compile_into
from processes import on_processes

pytestmark = pytest.mark.skipif(emulated.ON_GPU, reason="for the emulated driver")


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    return compile_into(tmp_path_factory.mktemp("nccl"))


@pytest.fixture(autouse=True)
def engine(library, monkeypatch):
    """NCCL is the engine, and each of four ranks can have a GPU."""
    monkeypatch.setenv("UNISONO_NCCL", library)
    monkeypatch.setenv("UNISONO_CUDA_ENGINE", "nccl")
    monkeypatch.setenv("UNISONO_EMULATED_GPUS", "4")


def sums(comm):
    FakeNccl()
    x = to_device(np.arange(5, dtype=np.float32) + comm.rank, comm.rank)
    comm.all_reduce(x)
    comm.synchronize(30)
    return x.numpy().tolist(), comm.engine


def test_all_reduce_between_processes():
    assert on_processes(sums, 3) == [([3, 6, 9, 12, 15], "nccl")] * 3
