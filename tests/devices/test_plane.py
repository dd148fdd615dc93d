"""Collectives on CUDA arrays, by an emulated driver: ranks as threads and as processes."""

import numpy as np
import pytest

import unisono
from conformance import Case, check, every_algorithm, every_reduction, every_type
from device_cases import perform_on_device, to_device, to_host
from unisono.testing import world


def sums(comm):
    x = to_device(np.arange(5, dtype=np.float32) + comm.rank)
    comm.all_reduce(x)
    comm.synchronize(30)
    return to_host(x).tolist()


def test_all_reduce_between_threads():
    with world(3) as w:
        assert w.run(sums) == [[3, 6, 9, 12, 15]] * 3


def test_all_reduce_between_processes():
    assert unisono.spawn(sums, 3) == [[3, 6, 9, 12, 15]] * 3
