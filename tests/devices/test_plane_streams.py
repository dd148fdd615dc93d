"""Streams, asynchronous calls and graphs on the device half of a communicator."""

import numpy as np
import pytest

import emulated
from device_cases import to_device
from unisono import _native
from unisono.errors import BadArgument, UsageError
from unisono.testing import world

REPLAYS = 200


def replays(comm):
    stream = _native.CudaStream(0)
    emulated.initialize()
    x = to_device(np.full(100, comm.rank + 1, np.int64))
    comm.all_reduce(x, stream=stream)  # plans and kernels are made before the capture
    comm.synchronize(30)
    emulated.begin_capture(stream.handle)
    comm.all_reduce(x, stream=stream)
    comm.all_reduce(x, op="max", stream=stream)
    graph = emulated.instantiate(emulated.end_capture(stream.handle))
    for _ in range(REPLAYS):
        emulated.launch_graph(graph, stream.handle)
    y = to_device(np.full(7, 2.0**comm.rank))
    emulated.synchronize(stream.handle)
    comm.all_reduce(y, stream=stream)
    comm.synchronize(30)
    return x.numpy(), y.numpy()


def test_graph_with_two_calls_is_replayed_many_times():
    with world(3) as w:
        results = w.run(replays)
    total = 6 * pow(3, REPLAYS, 1 << 64) % (1 << 64)
    for x, y in results:
        assert (x.view(np.uint64) == np.uint64(total)).all()
        assert (y == 7).all()


def several_streams(comm):
    """Calls of one communicator on three streams in turn, without waiting between."""
    streams = [_native.CudaStream(0) for _ in range(3)]
    arrays = [to_device(np.full(500, i + comm.rank, np.float64)) for i in range(30)]
    for i, x in enumerate(arrays):
        comm.all_reduce(x, stream=streams[i % 3])
    comm.synchronize(30)
    return [x.numpy()[0] for x in arrays]


def test_calls_on_several_streams_keep_their_order():
    with world(3) as w:
        for found in w.run(several_streams):
            assert found == [3 * i + 3 for i in range(30)]


def counted(comm):
    x, stream = np.ones(3000, np.float32), _native.CudaStream(0)
    comm.all_reduce(to_device(x), stream=stream)  # the ranks connect
    counts = [comm.sent_bytes]
    for some in (x, to_device(x)):
        how = {} if some is x else {"stream": stream}
        comm.all_reduce(some, algorithm="ring", **how)
        counts.append(comm.sent_bytes)
    comm.synchronize(30)
    return np.diff(counts).tolist()


def test_bytes_are_counted_as_on_the_host():
    with world(3) as w:
        assert w.run(counted) == [[16_000, 16_000]] * 3


def asynchronous(comm):
    stream = _native.CudaStream(0)
    arrays = [to_device(np.full(500, comm.rank + 1.0)) for _ in range(10)]
    works = [comm.all_reduce(x, async_op=True, stream=stream) for x in arrays]
    results = [work.wait() for work in works]
    assert all(r is x for r, x in zip(results, arrays, strict=True))
    works[-1].synchronize(30)
    assert all(work.done() and work.exception() is None for work in works)
    return [x.numpy()[0] for x in arrays]


def test_asynchronous_calls_return_handles():
    with world(3) as w:
        assert w.run(asynchronous) == [[6.0] * 10] * 3


def captured_asynchronously(comm):
    """An asynchronous call, one that the user does not order, and what needs both."""
    stream = _native.CudaStream(0)
    emulated.initialize()
    x = to_device(np.full(100, comm.rank + 1, np.int64))
    y, z = to_device(np.ones(100, np.int64)), to_device(np.zeros(100, np.int64))
    for a in (x, y):  # plans and kernels are made before the capture
        comm.all_reduce(a, op="max", async_op=True, stream=stream).wait()
        comm.all_reduce(a, op="max", stream=stream)
    comm.synchronize(30)
    emulated.begin_capture(stream.handle)
    work = comm.all_reduce(x, async_op=True, stream=stream)
    comm.all_reduce(y, stream=stream)
    states = repr(work), work.done(), work.exception()
    with pytest.raises(UsageError, match="the host cannot wait"):
        work.wait(timeout_s=1)
    assert work.wait() is x
    emulated.copy(z.view.address, x.view.address, z.nbytes, stream.handle)
    graph = emulated.instantiate(emulated.end_capture(stream.handle))
    with pytest.raises(UsageError, match="inside that capture"):
        work.wait()
    for _ in range(REPLAYS):
        emulated.launch_graph(graph, stream.handle)
    emulated.synchronize(stream.handle)
    return states, [a.numpy() for a in (x, y, z)]


def test_asynchronous_call_in_a_graph_returns_a_handle():
    with world(3) as w:
        results = w.run(captured_asynchronously)
    for states, (x, y, z) in results:
        assert states == ("<DeviceWork: all_reduce, captured>", False, None)
        total = pow(3, REPLAYS, 1 << 64)
        assert (x.view(np.uint64) == np.uint64(3 * total % (1 << 64))).all()
        assert (y.view(np.uint64) == np.uint64(total)).all()
        assert (z == x).all()


def never_joined(comm):
    stream = _native.CudaStream(0)
    emulated.initialize()
    x = to_device(np.ones(100))
    comm.all_reduce(x, stream=stream)
    comm.synchronize(30)
    emulated.begin_capture(stream.handle)
    comm.all_reduce(x, async_op=True, stream=stream)
    with pytest.raises(emulated.CudaError, match="UNJOINED"):
        emulated.end_capture(stream.handle)


def test_asynchronous_call_in_a_graph_must_be_waited_for():
    with world(1) as w:
        w.run(never_joined)


def two_communicators(comm):
    """Two groups of the same ranks, called in opposite orders on two streams."""
    groups = [comm.split(0), comm.split(0)]
    streams = [_native.CudaStream(0) for _ in groups]
    arrays = [to_device(np.ones(1000, np.float32)) for _ in groups]
    for group, stream, x in zip(groups, streams, arrays, strict=True):
        group.all_reduce(x, stream=stream)
    order = (0, 1) if comm.rank % 2 else (1, 0)
    for _ in range(10):
        for i in order:
            groups[i].all_reduce(arrays[i], op="max", stream=streams[i])
    for group in groups:
        group.synchronize(30)
    return [float(x.numpy()[0]) for x in arrays]


def test_two_communicators_in_opposite_orders_do_not_lock_up():
    with world(3) as w:
        assert w.run(two_communicators) == [[3.0, 3.0]] * 3


def test_threads_on_the_default_stream_are_refused():
    with world(2) as w, pytest.raises(BadArgument, match="stream of its own"):
        w.run(lambda comm: comm.all_reduce(to_device(np.ones(3))))


def test_default_stream_serves_one_rank_per_process():
    with world(1) as w:
        found = w.run(lambda comm: comm.all_reduce(to_device(np.ones(3))))
    assert found[0].numpy().tolist() == [1, 1, 1]


@pytest.mark.parametrize("stream", ["x", 1.5, object()])
def test_stream_of_another_kind_is_refused(stream):
    with world(1) as w, pytest.raises(BadArgument, match="stream: got a"):
        w.run(lambda comm: comm.all_reduce(to_device(np.ones(3)), stream=stream))


def test_stream_for_an_array_of_the_host_is_refused():
    with world(1) as w, pytest.raises(BadArgument, match="CUDA arrays only"):
        w.run(lambda comm: comm.all_reduce(np.ones(3), stream=0))


def test_the_host_waits_for_an_event():
    called = []

    def rank(comm):
        stream, event = _native.CudaStream(0), _native.CudaEvent(0)
        x = to_device(np.ones(4))
        comm.all_reduce(x, stream=stream)
        comm.synchronize(60)
        if comm.rank == 1:
            comm.barrier()
            called.append(comm.rank)
        comm.all_reduce(x, stream=stream)
        event.record(stream.handle)
        if comm.rank == 0:
            comm.barrier()
        event.synchronize()
        return event.query(), list(called), x.numpy().tolist()

    with world(2) as w:
        assert w.run(rank) == [(True, [1], [4.0] * 4)] * 2
