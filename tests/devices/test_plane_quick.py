"""Calls on a device that were made before: found by their arguments, and started."""

import sys
import threading
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest

import emulated as cuda
from device_cases import to_device
from processes import on_processes
from unisono import _native
from unisono.errors import BadArgument, DeviceError, PeerLost, UsageError
from unisono.testing import world

WITHIN_S = 30
on_emulation = pytest.mark.skipif(cuda.ON_GPU, reason="uses the emulation alone")


class Rank:
    """A rank with a stream of its own, whose calls must be quick at times."""

    def __init__(self, comm):
        self.comm = comm
        self.stream = _native.CudaStream(0)

    @property
    def plane(self):
        return self.comm.core.device.made.plane

    def only_quick(self):
        """From now on a call that is not found fails."""

        def run(call, reduction, how):
            raise AssertionError(f"{call.collective} was not found")

        self.plane.run = run

    def ones(self, *shape, times=1, dtype=np.float32):
        return to_device(np.full(shape, times * (self.comm.rank + 1), dtype))

    def ended(self, *arrays):
        """What the arrays are when all calls have ended."""
        self.comm.synchronize(WITHIN_S)
        return [array.numpy().tolist() for array in arrays]


def every_collective(me, times):
    """One call of each kind; the arrays are new."""
    comm, how = me.comm, {"stream": me.stream}
    n, root = comm.world_size, 1
    x, whole = me.ones(2, times=times), me.ones(2 * n, times=times)
    out = [me.ones(size, times=0) for size in (2, 2, 2 * n, 2, 2 * n, 2)]
    comm.all_reduce(x, out=out[0], **how)
    reduced = comm.reduce(x, root=root, out=out[1], op="max", **how)
    assert reduced is (out[1] if comm.rank == root else None)
    assert comm.all_gather(x, out=out[2], **how) is out[2]
    assert comm.reduce_scatter(whole, out=out[3], **how) is out[3]
    assert comm.all_to_all(whole, out=out[4], **how) is out[4]
    comm.scatter(whole, root=root, out=out[5], **how)
    comm.broadcast(x, root=root, **how)
    gathered = me.ones(2 * n, times=0)
    comm.gather(x, root=root, out=gathered, **how)
    return me.ended(*out, x, gathered)


def repeated(comm):
    me = Rank(comm)
    first = every_collective(me, 1)
    me.only_quick()
    return first, every_collective(me, 1), every_collective(me, 3)


def test_calls_that_were_made_before_give_the_same_results():
    with world(3) as w:
        for rank, (first, again, thrice) in enumerate(w.run(repeated)):
            assert again == first
            assert thrice == [[3 * value for value in array] for array in first]
            assert first[0] == [6, 6]
            assert first[1] == ([3, 3] if rank == 1 else [0, 0])
            assert first[2] == [1, 1, 2, 2, 3, 3]


def other_kinds(comm):
    """Whatever a call depends on is told apart."""
    me = Rank(comm)
    how = {"stream": me.stream}
    results = []
    for _ in range(3):
        for dtype, op, shape in [
            (np.float32, "sum", (4,)),
            (np.float32, "max", (4,)),
            (np.int32, "sum", (4,)),
            (np.float32, "sum", (2, 2)),
            (np.float32, "mean", (4,)),
        ]:
            x = me.ones(*shape, dtype=dtype)
            comm.all_reduce(x, op=op, **how)
            results += me.ended(x)
        for root in (0, 1):
            x = me.ones(4)
            comm.broadcast(x, root=root, **how)
            results += me.ended(x)
    return results


def test_calls_that_differ_are_told_apart():
    one = [[3] * 4, [2] * 4, [3] * 4, [[3, 3], [3, 3]], [1.5] * 4, [1] * 4, [2] * 4]
    with world(2) as w:
        assert w.run(other_kinds) == [3 * one] * 2


def overlapping(comm):
    me = Rank(comm)
    how = {"stream": me.stream}
    memory = me.ones(12)
    for _ in range(2):
        comm.all_reduce(memory[:4], out=memory[4:8], **how)
        with pytest.raises(BadArgument, match="overlap partly"):
            comm.all_reduce(memory[:4], out=memory[2:6], **how)
        mine = memory[4 * comm.rank : 4 * comm.rank + 4]
        comm.all_gather(mine, out=memory[:8], **how)  # its own rows
        with pytest.raises(BadArgument, match="own rows"):
            comm.all_gather(memory[2:6], out=memory[:8], **how)
        comm.all_gather(mine, out=me.ones(8), **how)
    comm.synchronize(WITHIN_S)


def test_arrays_that_overlap_are_refused_as_at_first():
    with world(2) as w:
        w.run(overlapping)


def odd_arguments(comm):
    me = Rank(comm)
    x, how = me.ones(4), {"stream": me.stream}
    for _ in range(2):
        comm.broadcast(x, root=1, **how)
        comm.all_reduce(x, op="max", **how)
    with pytest.raises(BadArgument):
        comm.broadcast(x, root=True, **how)
    with pytest.raises(BadArgument):
        comm.all_reduce(x, op=[], **how)
    with pytest.raises(BadArgument, match="got a str"):
        comm.all_reduce(x, op="max", stream="no stream")
    with pytest.raises(BadArgument, match="on the default"):
        comm.all_reduce(x, op="max")
    return me.ended(x)[0]


def test_arguments_are_refused_as_at_first():
    with world(2) as w:
        assert w.run(odd_arguments) == [[2] * 4] * 2


def asynchronous(comm):
    me = Rank(comm)
    how = {"stream": me.stream, "async_op": True}
    found = []
    for i in range(4):
        x, out = me.ones(4, times=i), me.ones(4, times=0)
        if i == 1:
            me.only_quick()
        work = comm.all_reduce(x, out=out, **how)
        assert work.wait(WITHIN_S) is out
        assert repr(work) == "<DeviceWork: all_reduce, done>"
        found += me.ended(out)
        other = comm.all_reduce(x, out=out, stream=me.stream)
        assert other is out
    return found


def test_works_of_calls_that_were_made_before():
    with world(2) as w:
        assert w.run(asynchronous) == [[[3 * i] * 4 for i in range(4)]] * 2


def captured(comm):
    """Calls that were made before, in a graph: each replay adds once more."""
    cuda.initialize()
    me = Rank(comm)
    x = me.ones(4)
    comm.all_reduce(x, stream=me.stream)
    comm.all_reduce(x, stream=me.stream, async_op=True).wait()
    me.ended()
    me.only_quick()
    comm.barrier()
    cuda.begin_capture(me.stream.handle, cuda.GLOBAL)
    comm.all_reduce(x, stream=me.stream)
    comm.all_reduce(x, stream=me.stream, async_op=True).wait()
    graph = cuda.instantiate(cuda.end_capture(me.stream.handle))
    comm.barrier()  # nobody captures any more: this test may wait for its stream
    for _ in range(3):
        cuda.launch_graph(graph, me.stream.handle)
    cuda.synchronize(me.stream.handle)
    comm.all_reduce(x, stream=me.stream)
    return me.ended(x)[0]


def test_calls_that_were_made_before_are_captured():
    with world(2) as w:
        assert w.run(captured) == [[3 * 2**8] * 4] * 2


def fails(comm):
    me = Rank(comm)
    x = me.ones(4)
    for _ in range(3):
        comm.all_reduce(x, stream=me.stream)
    me.ended()
    comm.barrier()
    if comm.rank == 1:
        comm.close()
        with pytest.raises(UsageError, match="is closed"):
            comm.all_reduce(x, stream=me.stream)
        return
    with pytest.raises(PeerLost, match="rank 1") as caught:
        call_until_refused(me, x)
    assert caught.value.ranks == (1,)


def call_until_refused(me, x):
    for _ in range(1000):
        me.comm.all_reduce(x, stream=me.stream)
        me.comm.synchronize(WITHIN_S)


def test_communicator_that_is_closed_or_broken_refuses_them():
    with world(2) as w:
        w.run(fails)


def driver_fails(comm):
    me = Rank(comm)
    x = me.ones(4)
    comm.all_reduce(x, stream=me.stream)
    me.only_quick()
    comm.all_reduce(x, stream=me.stream)
    assert _native.fail_emulated_call("cuLaunchKernel", 1, 999)
    with pytest.raises(DeviceError) as caught:
        comm.all_reduce(x, stream=me.stream)
    comm.all_reduce(x, stream=me.stream)
    assert me.ended(x) == [[1] * 4]
    return str(caught.value)


@on_emulation
def test_failure_of_the_driver_is_a_device_error():
    assert "all_reduce: CUDA's driver failed" in on_processes(driver_fails, 1)[0]


def calls_of_the_driver(comm):
    me = Rank(comm)
    x = me.ones(4)
    for _ in range(3):
        comm.all_reduce(x, stream=me.stream)
    names = (
        "cuLaunchKernel",
        "cuEventCreate",
        "cuEventDestroy_v2",
        "cuStreamWaitEvent",
    )
    before = [_native.emulated_calls_of(name) for name in names]
    for _ in range(64):
        comm.all_reduce(x, stream=me.stream)
    return [
        _native.emulated_calls_of(n) - b for n, b in zip(names, before, strict=True)
    ]


@on_emulation
def test_call_makes_no_event():
    assert on_processes(calls_of_the_driver, 1) == [[64, 0, 0, 64]]


def kept(comm):
    """New arrays for each call, which nobody else keeps."""
    me = Rank(comm)
    most = 0
    for _ in range(200):
        comm.all_reduce(me.ones(4), stream=me.stream)
        most = max(most, len(me.plane.kept))
    comm.synchronize(WITHIN_S)
    return most, len(me.plane.kept)


def test_arrays_are_kept_until_their_calls_have_ended():
    with world(2) as w:
        for most, left in w.run(kept):
            assert most >= 1
            assert left == 0


class Device(NamedTuple):
    """As torch's."""

    type: str
    index: int


class Tensor:
    """As torch's on a GPU: what unisono uses of it."""

    is_cuda = True
    layout = "torch.strided"
    device = Device("cuda", 0)

    def __init__(self, array):
        self.array, self.dtype, self.shape = array, array.dtype, array.shape
        self.nbytes = array.nbytes
        self.conjugated = False

    def data_ptr(self):
        return self.array.address

    def is_contiguous(self):
        return True

    def is_conj(self):
        return self.conjugated

    def is_neg(self):
        return False

    def detach(self):
        return self

    contiguous = detach


@pytest.fixture
def torch(monkeypatch):
    """A torch with CUDA; each thread has a current stream."""
    mine = threading.local()
    made = SimpleNamespace(
        Tensor=Tensor,
        nn=SimpleNamespace(Parameter=type("Parameter", (Tensor,), {})),
        strided=Tensor.layout,
        _C=SimpleNamespace(_cuda_getCurrentRawStream=lambda _: mine.stream.handle),
        current=mine,
    )
    monkeypatch.setitem(sys.modules, "torch", made)
    return made


@on_emulation
def test_tensors_are_found_and_ordered_between_streams(torch):
    def rank(comm):
        cuda.initialize()
        me = Rank(comm)
        torch.current.stream = _native.CudaStream(0)
        x = Tensor(me.ones(1 << 16, times=0, dtype=np.uint8))
        found = []
        for i in range(4):
            if i == 2:
                me.only_quick()
            cuda.fill(x.data_ptr(), i + 1, x.nbytes, torch.current.stream.handle)
            comm.all_reduce(x, stream=me.stream)  # after that of the current one
            comm.synchronize(WITHIN_S)
            cuda.fill(x.data_ptr(), i + 1, x.nbytes, torch.current.stream.handle)
            comm.all_reduce(x)
            comm.synchronize(WITHIN_S)
            found.append(set(x.array.numpy().tolist()))
            if i == 0:
                assert not me.plane.kept
        return found

    with world(2) as w:
        assert w.run(rank) == [[{2}, {4}, {6}, {8}]] * 2
