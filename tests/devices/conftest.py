"""The device plane is tested on an emulated driver, whose kernels are CPU threads."""

import pytest


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    monkeypatch.setenv("UNISONO_CUDA_DRIVER", "emulated")
    monkeypatch.setenv("UNISONO_CUDA_BLOCKS", "2")
