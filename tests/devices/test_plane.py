"""Collectives on CUDA arrays, by an emulated driver: threads and processes."""

import numpy as np
import pytest

from conformance import check, every_algorithm, every_reduction, every_type
from device_cases import perform_on_device, to_device
from processes import on_processes
from unisono import _native
from unisono.runtime.plan import plans
from unisono.testing import world


def sums(comm):
    x = to_device(np.arange(5, dtype=np.float32) + comm.rank)
    stream = _native.CudaStream(0)
    comm.all_reduce(x, stream=stream)
    comm.synchronize(30)
    return x.numpy().tolist()


def test_all_reduce_between_threads():
    with world(3) as w:
        assert w.run(sums) == [[3, 6, 9, 12, 15]] * 3


def test_all_reduce_between_processes():
    assert on_processes(sums, 3) == [[3, 6, 9, 12, 15]] * 3


def with_arrays(cases):
    return [case for case in cases if case.what != "barrier"]


@pytest.mark.quick(n=[3])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 8, 13])
def test_every_algorithm_between_threads(n):
    cases = with_arrays(every_algorithm(n, [1, n, 2777]))
    with world(n) as w:
        check(cases, w.run(perform_on_device, cases))


@pytest.mark.sweep
@pytest.mark.quick(n=[3])
@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_every_type_and_operation_between_threads(n):
    cases = [*every_reduction(n), *every_type(n)]
    with world(n) as w:
        check(cases, w.run(perform_on_device, cases))


def test_every_algorithm_between_processes():
    cases = with_arrays(every_algorithm(3, [4, 2777]))
    check(cases, on_processes(perform_on_device, 3, (cases,)))


def explained(comm):
    x = comm.empty((1 << 16,), device="cuda")
    before = comm.explain("all_reduce", x)
    stream = _native.CudaStream(0)
    comm.all_reduce(x, stream=stream)
    comm.synchronize(30)
    return before, comm.explain("all_reduce", x, algorithm="ring")


def test_explain_lowers_no_programs_of_other_ranks(monkeypatch):
    plans._lowered.cache_clear()
    monkeypatch.setattr(plans, "lower", lambda *_, **__: pytest.fail("all are lowered"))
    with world(2) as w:
        before, _ = w.run(explained)[0]
    assert "through windows of" in before


def test_explain_names_device_algorithm_and_blocks():
    with world(2) as w:
        before, after = w.run(explained)[0]
    assert "all_reduce of 256 KiB on 2 ranks by direct" in before
    assert "cuda:0" in before
    assert "connect at their first call" in before
    assert "on 2 ranks by ring" in after
    assert "blocks of 512 threads; 2 ranks share a device" in after
