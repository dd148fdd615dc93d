"""Calls on CUDA arrays that fail: named errors, and the device stays usable."""

import os
import signal
import time

import numpy as np
import pytest

import emulated
import unisono
from device_cases import to_device
from device_rank import COUNT, DeviceRank
from forked import until_broken
from processes import on_processes, our_variables
from unisono.errors import CollectiveMismatch, CollectiveTimeout, PeerLost
from unisono.testing import world


@pytest.fixture(params=["device", "host"])
def windows(request, monkeypatch):
    """In device memory and in host memory."""
    monkeypatch.setenv("UNISONO_CUDA_WINDOWS", request.param)
    return request.param


def absent(comm):
    me = DeviceRank(comm)
    me.first_call()
    comm.timeout_s = 1
    if comm.rank == 1:
        # It never makes the call.
        until_broken(comm)
        return None
    error, x = me.outcome(me.call)
    usable = to_device(np.ones(3, np.float32))
    return error, x.numpy(), usable.numpy().tolist()


@pytest.mark.cases(1)
def test_absent_rank_is_named_and_output_is_no_number(windows):
    with world(3) as w:
        results = w.run(absent)
    for rank in (0, 2):
        error, x, usable = results[rank]
        assert isinstance(error, CollectiveTimeout), error
        assert error.ranks == (1,)
        assert "rank 1" in str(error)
        assert np.isnan(x).all()
        assert usable == [1, 1, 1]


def different(comm):
    me = DeviceRank(comm)
    for op in ("sum", "max"):  # a kernel is loaded while no call is in flight
        me.first_call(op=op)
    if comm.rank == 2:
        return me.outcome(lambda: me.call(op="max"))[0]
    return me.outcome(me.call)[0]


def test_different_calls_are_named_on_all_ranks(windows):
    with world(3) as w:
        errors = w.run(different)
    described = f"all_reduce(float32 × {COUNT}, sum)"
    for error in errors:
        assert isinstance(error, CollectiveMismatch), error
        assert "max" in error.calls[2]
        other = next(rank for rank in error.calls if rank != 2)
        # A rank adds the algorithm itself, and an error does not wait long for that.
        algorithm = "direct" if windows == "host" else "naive"  # with packets
        assert error.calls[other] in (described, f"{described} by {algorithm}")


def closes(comm):
    me = DeviceRank(comm)
    me.call()
    comm.synchronize(30)
    if comm.rank == 0:
        comm.close()
        return None
    return me.outcome(me.call)[0]


def test_closed_rank_is_named(windows):
    with world(2) as w:
        error = w.run(closes)[1]
    assert isinstance(error, PeerLost), error
    assert error.ranks == (0,)
    assert "closed" in str(error)


def killed(rank):
    comm = rank.init()
    me = DeviceRank(comm)
    me.first_call()
    if comm.rank == 1:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    error, _ = me.outcome(me.call)
    survivors = comm.shrink()
    y = DeviceRank(survivors).call()
    survivors.synchronize(30)
    total = float(y.numpy()[0])
    survivors.close()
    return error.ranks, str(error), total


@pytest.mark.cases(1)
def test_killed_rank_is_named_and_survivors_go_on(windows, forks):
    ends = forks.having(**our_variables()).run(3, killed)
    assert [end.status for end in ends] == [0, -signal.SIGKILL, 0], ends
    for end in (ends[0], ends[2]):
        lost, text, total = end.value
        assert lost == [1], text
        assert "died" in text
        assert total == 2


def starved(comm):
    if comm.rank == 1:  # its device is too small for the windows
        os.environ["UNISONO_EMULATED_MEMORY"] = str(1 << 20)
    found = []
    for _ in range(2):
        try:
            comm.all_reduce(to_device(np.ones(3, np.float32)))
        except unisono.DeviceError as error:
            found.append(str(error))
    return found


@pytest.mark.skipif(emulated.ON_GPU, reason="a GPU has enough memory")
def test_device_that_cannot_be_connected_is_named_on_all_ranks():
    for texts in on_processes(starved, 2):
        for text in texts:
            assert "could not be connected; rank 1: " in text
            assert "OUT_OF_MEMORY" in text
        assert len(texts) == 2
