"""Calls on CUDA arrays between hosts that fail: named errors, and life goes on."""

import gc
import os
import signal
import threading
import time
from weakref import ref

import numpy as np
import pytest

import emulated
import unisono
from device_cases import to_device
from device_rank import COUNT, DeviceRank
from forked import until_broken
from processes import our_variables
from unisono import _native
from unisono.errors import CollectiveMismatch, CollectiveTimeout, PeerLost, UsageError
from unisono.runtime.device import between_hosts
from unisono.testing import world

layouts = pytest.mark.parametrize(
    "hosts", [(0, 1, 2), (0, 0, 1, 1), (0, 0, 1)], ids=str
)


@pytest.fixture(autouse=True)
def _no_garbage():
    """Errors keep frames, and these a rank with its memory, until then."""
    yield
    gc.collect()


def absent(comm):
    me = DeviceRank(comm)
    me.first_call()
    comm.timeout_s = 1
    if comm.rank == 1:  # it never makes the call
        until_broken(comm)
        return None
    error, x = me.outcome(me.call)
    again, _ = me.outcome(me.call)
    on_host = None
    try:
        comm.all_reduce(np.ones(3))
    except unisono.UnisonoError as refused:
        on_host = refused
    usable = to_device(np.ones(3, np.float32))
    return error, again, on_host, x.numpy(), usable.numpy().tolist()


@pytest.mark.quick(hosts=[(0, 0, 1, 1)])
@layouts
def test_absent_rank_is_named_and_output_is_no_number(hosts):
    with world(len(hosts), hosts=hosts) as w:
        results = w.run(absent)
    for result in (r for r in results if r is not None):
        error, again, on_host, x, usable = result
        assert isinstance(error, CollectiveTimeout), error
        assert error.ranks == (1,), error
        assert type(again) is type(on_host) is CollectiveTimeout
        assert np.isnan(x).all()
        assert usable == [1, 1, 1]


def different(comm, odd, met):
    me = DeviceRank(comm)
    for op in ("sum", "max"):  # a kernel is loaded while no call is in flight
        me.first_call(op=op)
    met.wait(60)  # none is in the barrier, which the failure of another would end
    if comm.rank == 2:
        return me.outcome(lambda: me.call(**odd))[0]
    return me.outcome(me.call)[0]


@pytest.mark.quick(hosts=[(0, 0, 1, 1)])
@layouts
@pytest.mark.parametrize("odd", [{"op": "max"}, {"name": "broadcast"}], ids=str)
def test_different_calls_are_named_on_all_ranks(hosts, odd):
    with world(len(hosts), hosts=hosts, timeout_s=20) as w:
        errors = w.run(different, odd, threading.Barrier(len(hosts)))
    for error in errors:
        assert isinstance(error, CollectiveMismatch), error
        assert odd.get("op", "broadcast") in error.calls[2]
        others = [text for rank, text in error.calls.items() if rank != 2]
        assert f"all_reduce(float32 × {COUNT}, sum) on CUDA arrays" in others[0]


def closes(comm):
    me = DeviceRank(comm)
    me.first_call()
    if comm.rank == 0:
        comm.close()
        return None
    return me.outcome(me.call)[0]


@pytest.mark.quick(hosts=[(0, 0, 1)])
@layouts
def test_closed_rank_is_named(hosts):
    with world(len(hosts), hosts=hosts, timeout_s=30) as w:
        errors = w.run(closes)[1:]
    for error in errors:
        assert isinstance(error, PeerLost), error
        assert error.ranks == (0,), error


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
    return type(error).__name__, error.ranks, str(error), total


@pytest.mark.quick(sizes=[(2, 1)])
@pytest.mark.parametrize("sizes", [(2, 1), (2, 2), (1, 2)], ids=str)
def test_killed_rank_is_named_and_survivors_go_on(sizes, forks):
    n = sum(sizes)
    ends = forks.having(**our_variables()).run(n, killed, hosts=sizes)
    for end in ends:
        if end.rank == 1:
            assert end.status == -signal.SIGKILL
            continue
        assert end.status == 0, end
        kind, lost, text, total = end.value
        assert (kind, lost) == ("PeerLost", [1]), text
        assert total == n - 1


def late(comm, gone_on):
    """Rank 1 makes its calls when all others have gone on from theirs."""
    stream = _native.CudaStream(0)
    first = to_device(np.ones(3))
    comm.all_reduce(first, stream=stream)
    comm.synchronize(30)
    comm.barrier()
    if comm.rank == 1:
        assert gone_on.wait(30)
    x, y = to_device(np.ones(COUNT)), to_device(np.full(COUNT, 2.0))
    comm.all_reduce(x, stream=stream)
    work = comm.all_reduce(y, async_op=True, stream=stream)
    done = work.done()
    gone_on.set()
    work.wait()
    comm.synchronize(30)
    return done, x.numpy()[0], y.numpy()[0]


def test_host_does_not_wait_for_other_ranks(monkeypatch):
    monkeypatch.setenv("UNISONO_CUDA_STREAMS_WAIT", "1")
    with world(2, hosts=(0, 1)) as w:
        first, second = w.run(late, threading.Event())
    assert first == (False, 2, 4)
    assert second[1:] == (2, 4)


def becomes_idle(stream):
    """Whether a stream ends what it has, though another rank does nothing."""
    until = time.monotonic() + 10
    while emulated.query(stream) != 0 and time.monotonic() < until:
        time.sleep(0.001)
    return emulated.query(stream) == 0


def alone_at_first(comm, seen):
    """Rank 1 makes its calls when rank 0 has seen how its streams are."""
    emulated.initialize()
    stream = _native.CudaStream(0)
    x, y = to_device(np.ones(COUNT)), to_device(np.full(COUNT, 2.0))
    comm.all_reduce(x, stream=stream)  # connects
    emulated.synchronize(stream.handle)
    comm.barrier()
    if comm.rank == 1:
        assert seen.wait(30)
    work = comm.all_reduce(y, async_op=True, stream=stream)
    streams = stream.handle, comm.core.device.made.own_stream()
    idle = [becomes_idle(handle) for handle in streams]
    seen.set()
    work.wait()
    comm.all_reduce(x, stream=stream)
    comm.synchronize(30)
    return idle, x.numpy()[0], y.numpy()[0], work.done()


def test_no_stream_waits_for_ranks_if_kernels_are_loaded_lazily(monkeypatch):
    """Who launches a new kernel then waits for all streams, and the thread for him."""
    monkeypatch.setenv("CUDA_MODULE_LOADING", "LAZY")
    with world(2, hosts=(0, 1)) as w:
        found = w.run(alone_at_first, threading.Event())
    assert found[0][0] == [True, True]
    assert [rank[1:] for rank in found] == [(4, 4, True)] * 2


def on_streams(comm):
    streams = [_native.CudaStream(0) for _ in range(2)]
    arrays = [to_device(np.full(500, i + comm.rank, np.float64)) for i in range(12)]
    works = [
        comm.all_reduce(x, async_op=i % 3 == 0, stream=streams[i % 2])
        for i, x in enumerate(arrays)
    ]
    for i, work in enumerate(works):
        if i % 3 == 0:
            work.wait(30)
    small = comm.all_reduce(np.ones(2))  # on the host, meanwhile
    comm.synchronize(30)
    return [x.numpy()[0] for x in arrays], small[0]


@pytest.mark.quick(hosts=[(0, 0, 1)])
@layouts
def test_calls_on_two_streams_keep_their_order(hosts):
    n = len(hosts)
    with world(n, hosts=hosts) as w:
        for found, small in w.run(on_streams):
            assert found == [n * i + sum(range(n)) for i in range(12)]
            assert small == n


def captures(comm):
    stream = _native.CudaStream(0)
    emulated.initialize()
    x = to_device(np.ones(10))
    comm.all_reduce(x, stream=stream)
    comm.synchronize(30)
    emulated.begin_capture(stream.handle)
    with pytest.raises(UsageError, match="cannot be captured for a CUDA graph"):
        comm.all_reduce(x, stream=stream)
    emulated.end_capture(stream.handle)
    comm.all_reduce(x, stream=stream)
    comm.synchronize(30)
    return x.numpy()[0]


def test_capture_is_refused_in_words():
    with world(2, hosts=(0, 1)) as w:
        assert w.run(captures) == [4, 4]


def recorded(comm):
    before = comm.sent_bytes
    stream = _native.CudaStream(0)
    x = to_device(np.ones(3000, np.float32))
    comm.all_reduce(x, stream=stream, label="step 7")
    comm.synchronize(30)
    named = [r["profiling_name"] for r in comm.records() if "step 7" in r["label"]]
    labels = {r["label"] for r in comm.records()}
    return comm.sent_bytes - before, named, labels


@pytest.mark.parametrize("hosts", [(0, 1), (0, 0, 1, 1)], ids=str)
def test_records_and_bytes_know_the_calls(hosts):
    with world(len(hosts), hosts=hosts) as w:
        for sent, named, labels in w.run(recorded):
            assert sent >= 6_000
            assert "all_reduce" in named
            assert "all_reduce(float32 × 3000, sum) on CUDA arrays step 7" in labels


def test_default_stream_of_threads_is_refused():
    def call(comm):
        comm.all_reduce(to_device(np.ones(3)), stream=0)

    refused = pytest.raises(unisono.BadArgument, match="default stream")
    with world(2, hosts=(0, 1)) as w, refused:
        w.run(call)


def stuck(comm, until):
    """The driver does not return to the thread of rank 0."""
    me = DeviceRank(comm)
    me.first_call()
    if comm.rank == 0:
        plane = comm.core.device.made
        plane._pipeline._fetch = lambda *_: until.wait(30)
    error, _ = me.outcome(lambda: me.call(timeout_s=0.5))
    if comm.rank == 0:
        until.set()
    return error


def test_thread_that_is_stuck_in_the_driver_lets_calls_fail(monkeypatch):
    monkeypatch.setattr(between_hosts, "GRACE_S", 0.5)
    with world(2, hosts=(0, 1)) as w:
        errors = w.run(stuck, threading.Event())
    assert "did not return" in str(errors[0]) or "rank" in str(errors[0])
    assert all(isinstance(error, CollectiveTimeout) for error in errors), errors


def dropped(comm):
    x = to_device(np.ones(3000))
    comm.all_reduce(x, stream=_native.CudaStream(0))
    return  # neither waited for nor closed


def test_world_is_closed_with_calls_in_flight():
    with world(2, hosts=(0, 1)) as w:
        w.run(dropped)


def engine_after_a_call(comm):
    comm.all_reduce(to_device(np.ones(3000)), stream=_native.CudaStream(0))
    comm.synchronize(30)
    return ref(comm.core.device.made)


def test_engine_is_released_when_it_is_closed():
    """With its memory, and at once: the garbage collector may come much later."""
    gc.disable()
    try:
        with world(2, hosts=(0, 1)) as w:
            engines = w.run(engine_after_a_call)
        del w
        assert [engine() for engine in engines] == [None, None]
    finally:
        gc.enable()
