"""Calls by NCCL that fail: the errors are those of other calls, and nothing hangs."""

import os
import signal
import time
from typing import NamedTuple

import numpy as np
import pytest

import emulated
import unisono
from device_cases import to_device
from fake_nccl import LATER, NEVER, ON_DEVICE, FakeNccl
from forked import until_broken
from processes import on_processes
from unisono.errors import (
    BadArgument,
    CollectiveMismatch,
    CollectiveTimeout,
    DeviceError,
    PeerLost,
    UnsupportedWorld,
)
from unisono.testing import world_across

pytestmark = [
    pytest.mark.skipif(emulated.ON_GPU, reason="for the emulated driver"),
    pytest.mark.usefixtures("with_nccl"),
]


class Raised(NamedTuple):
    """An error, as another process can read it."""

    type: type
    text: str
    ranks: tuple[int, ...]
    calls: dict[int, str]

    @classmethod
    def by(cls, error):
        ranks, calls = getattr(error, "ranks", ()), getattr(error, "calls", {})
        return cls(type(error), str(error), ranks, calls)


class Rank:
    """A rank with a GPU of its own, whose first call has succeeded."""

    def __init__(self, comm):
        self.fake = FakeNccl()
        self.comm = comm
        self.all_reduce()
        comm.synchronize(30)
        comm.barrier()

    def all_reduce(self, **how):
        x = to_device(np.ones(100, np.float32), self.comm.rank)
        self.comm.all_reduce(x, **how)
        return x

    def outcome(self, **how):
        """The error of a call, and how often NCCL was aborted."""
        try:
            self.all_reduce(**how)
            self.comm.synchronize(30)
        except unisono.UnisonoError as error:
            self.comm.close()
            return Raised.by(error), self.fake.calls("ncclCommAbort")
        return None, 0


def absent(comm):
    me = Rank(comm)
    comm.timeout_s = 1
    if comm.rank == 1:  # it never makes the call
        until_broken(comm)
        return None
    return me.outcome()


def test_absent_rank_is_named():
    results = on_processes(absent, 3)
    for rank in (0, 2):
        error, aborted = results[rank]
        assert error.type is CollectiveTimeout, error
        assert error.ranks == (1,)
        assert aborted == 1
    # A rank that makes its call after that has failed is told at once, in fewer words.
    texts = [results[rank][0].text for rank in (0, 2)]
    assert any("all_reduce(float32 × 100, sum) by nccl" in text for text in texts)


def different(comm):
    me = Rank(comm)
    return me.outcome(op="max" if comm.rank == 2 else "sum")


def test_different_calls_are_named_on_all_ranks():
    for error, aborted in on_processes(different, 3):
        assert error.type is CollectiveMismatch, error
        assert "max" in error.calls[2]
        assert aborted == 1


def closes(comm):
    me = Rank(comm)
    if comm.rank == 0:
        comm.close()
        return me.fake.calls("ncclCommDestroy"), me.fake.calls("ncclCommAbort")
    return me.outcome()


def test_closed_rank_is_named():
    closed, (error, aborted) = on_processes(closes, 2)
    assert closed == (1, 0)
    assert error.type is PeerLost, error
    assert error.ranks == (0,)
    assert aborted == 1


def fails(comm, function, what):
    me = Rank(comm)
    if comm.rank == 1:
        me.fake.fault(1, function, what)
        comm.timeout_s = 1
    return me.outcome()


def test_error_of_nccl_is_a_device_error_and_others_learn_of_it():
    here, there = on_processes(fails, 2, ("ncclAllReduce", 1))[::-1]
    error, aborted = here
    assert error.type is DeviceError, error
    assert "ncclAllReduce of NCCL 2.27.5" in error.text
    assert "unhandled cuda error (1)" in error.text
    assert aborted == 1
    error, aborted = there
    assert error.type is PeerLost, error
    assert error.ranks == (1,)
    assert aborted == 1


@pytest.mark.sweep
def test_error_that_nccl_reports_later():
    error, aborted = on_processes(fails, 2, ("ncclAllReduce", LATER))[1]
    assert error.type is DeviceError, error
    assert "remote process exited (6)" in error.text
    assert aborted == 1


@pytest.mark.quick(what=[ON_DEVICE])
@pytest.mark.parametrize("what", [NEVER, ON_DEVICE])
def test_call_that_nccl_never_ends(what):
    error, aborted = on_processes(fails, 2, ("ncclAllReduce", what))[1]
    assert error.type is CollectiveTimeout, error
    assert "not done after 1 s" in error.text
    assert aborted == 1


def killed(comm):
    me = Rank(comm)
    if comm.rank == 1:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    error = None
    try:
        me.all_reduce()
        comm.synchronize(30)
    except unisono.UnisonoError as raised:
        error = raised
    survivors = comm.shrink()
    y = to_device(np.ones(3, np.float32), comm.rank)
    survivors.all_reduce(y)
    survivors.synchronize(30)
    return error.ranks, str(error), float(y.numpy()[0]), survivors.engine


@pytest.mark.sweep
def test_killed_rank_is_named_and_survivors_go_on():
    near = {"UNISONO_ADDRESS": ""}
    with world_across([3], env=near, grace_s=40).start(killed) as running:
        ends = running.wait()
    assert [end.status for end in ends] == [0, -signal.SIGKILL, 0], ends
    for end in (ends[0], ends[2]):
        lost, text, total, engine = end.result
        assert lost == (1,), text
        assert "died" in text
        assert total == 2
        assert engine == "nccl"


def refused(comm, ordinal, **variables):
    """What the first call raises, and whether NCCL was asked for anything."""
    os.environ.update(variables)
    fake = FakeNccl()
    if comm.rank == 1:
        os.environ.update({"UNISONO_CUDA_ENGINE": "nccl"} | variables)
    x = to_device(np.ones(3, np.float32), comm.rank if ordinal is None else ordinal)
    try:
        comm.all_reduce(x)
    except unisono.UnisonoError as error:
        return Raised.by(error), fake.calls("ncclCommInitRankConfig")
    return None


def test_ranks_on_one_gpu_are_refused_in_words():
    for error, calls in on_processes(refused, 2, (0,)):
        assert error.type is UnsupportedWorld, error
        assert "ranks 0 and 1 use the same GPU" in error.text
        assert "engine='unisono'" in error.text
        assert calls == 0


def another(comm, variable, value):
    if comm.rank == 1:
        os.environ[variable] = value
    return refused(comm, None) if variable != "UNISONO_NCCL" else without(comm)


def without(comm):
    x = to_device(np.ones(3, np.float32), comm.rank)
    try:
        comm.all_reduce(x)
    except unisono.UnisonoError as error:
        return Raised.by(error), 0
    return None


def test_rank_without_nccl_is_named():
    for error, _ in on_processes(another, 2, ("UNISONO_NCCL", "/no/libnccl.so")):
        assert error.type is DeviceError, error
        assert "rank 1: UNISONO_NCCL=/no/libnccl.so cannot be used" in error.text


@pytest.mark.sweep
def test_versions_that_differ_are_refused():
    for error, calls in on_processes(another, 2, ("FAKE_NCCL_VERSION", "22601")):
        assert error.type is DeviceError, error
        assert "version 22705 of NCCL, rank 1 has 22601" in error.text
        assert calls == 0


def unlike(comm):
    comm.engine = "unisono" if comm.rank == 1 else "nccl"
    return without(comm)


def test_ranks_that_want_different_engines_are_refused():
    for error, _ in on_processes(unlike, 2):
        assert error.type is BadArgument, error
        assert "'nccl' on rank 0 and 'unisono' on rank 1" in error.text


def unconnected(comm):
    fake = FakeNccl()
    comm.timeout_s = 5
    if comm.rank == 1:
        fake.fault(1, "ncclCommInitRankConfig", 2)
    return (*without(comm), fake.calls("ncclCommAbort"))


def test_rank_that_cannot_join_nccl_is_named():
    for error, *_ in on_processes(unconnected, 2):
        assert error.type is DeviceError, error
        assert "could not be connected; rank 1: ncclCommInitRankConfig" in error.text
