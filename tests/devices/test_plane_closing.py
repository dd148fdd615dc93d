"""Ranks that leave: their memory stays until no kernel of another process reads it."""

import os
import secrets
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

import emulated as cuda
from device_cases import to_device
from emulated_world import SUPPORT
from process_state import state_of
from processes import on_processes
from unisono import _native
from unisono.errors import PeerLost

WITHIN_S = 60
COUNT = 100_000
pytestmark = pytest.mark.skipif(cuda.ON_GPU, reason="stops a kernel of the emulation")


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch):
    monkeypatch.setenv("UNISONO_CUDA_BLOCKS", "1")
    monkeypatch.setenv("UNISONO_EMULATED_THREADS", "1")


class Reader:
    """Rank 1 stops in the middle of a call, until rank 0 lets it go on."""

    def __init__(self, comm):
        self.comm = comm
        self.pid = int(comm.all_gather(np.array([os.getpid()]))[1])
        self.continued_at = float("inf")
        self.thread = threading.Thread(target=self._continue)

    def _continue(self):
        while state_of(self.pid) != "T":
            time.sleep(0.01)
        time.sleep(0.5)  # rank 0 closes meanwhile, and must wait
        self.continued_at = time.monotonic()
        os.kill(self.pid, signal.SIGCONT)

    def stop_at_next(self, place):
        if self.comm.rank == 1:
            _native.arm_failpoints(f"{place}:1:stop")
        self.comm.barrier()
        if self.comm.rank == 0:
            self.thread.start()

    def waited(self):
        """Whether the reader went on before now."""
        now = time.monotonic()
        self.thread.join()
        return self.continued_at <= now


def connected(comm, stream):
    """Connect the ranks, by another collective than that of the test."""
    comm.all_reduce(to_device(np.ones(3)), stream=stream)
    comm.synchronize(WITHIN_S)


def broadcasts(comm, windows, captured, count=COUNT, place="device.move"):
    """The root ends its call when its data is in its window; the other still reads."""
    os.environ["UNISONO_CUDA_WINDOWS"] = windows
    stream = _native.CudaStream(0)
    cuda.initialize()
    connected(comm, stream)
    reader = Reader(comm)
    x = to_device(np.full(count, 7.0 if comm.rank == 0 else 0.0))
    if captured:
        cuda.begin_capture(stream.handle)
        comm.broadcast(x, root=0, stream=stream)
        graph = cuda.instantiate(cuda.end_capture(stream.handle))
    reader.stop_at_next(place)
    if captured:
        cuda.launch_graph(graph, stream.handle)
        cuda.synchronize(stream.handle)
    else:
        comm.broadcast(x, root=0, stream=stream)
        comm.synchronize(WITHIN_S)
    if comm.rank == 0:
        comm.close()
        return reader.waited()
    return float(x.numpy().min())


@pytest.mark.cases(1)
@pytest.mark.parametrize("windows", ["device", "host"])
@pytest.mark.parametrize("captured", [False, True])
def test_close_waits_for_kernels_that_read_windows(windows, captured):
    assert on_processes(broadcasts, 2, (windows, captured)) == [True, 7.0]


@pytest.mark.cases(1)
@pytest.mark.parametrize("captured", [True, False])
def test_close_waits_for_kernels_that_read_packets(captured):
    args = "device", captured, 1000, "device.exchange"
    assert on_processes(broadcasts, 2, args) == [True, 7.0]


def limited(comm):
    stream = _native.CudaStream(0)
    connected(comm, stream)
    reader = Reader(comm)
    x = to_device(np.full(COUNT, 7.0 if comm.rank == 0 else 0.0))
    if comm.rank == 1:
        _native.arm_failpoints("device.move:1:stop")
    comm.barrier()
    comm.broadcast(x, root=0, stream=stream)
    comm.synchronize(WITHIN_S)
    if comm.rank == 1:
        return None
    while state_of(reader.pid) != "T":
        time.sleep(0.01)
    comm.timeout_s = 0.3
    comm.close()
    still = state_of(reader.pid) == "T"
    os.kill(reader.pid, signal.SIGCONT)
    return still


def test_close_waits_no_longer_than_the_timeout():
    assert on_processes(limited, 2) == [True, None]


def calls_later(comm):
    stream = _native.CudaStream(0)
    connected(comm, stream)
    launches = _native.emulated_calls_of("cuLaunchKernel")
    if comm.rank == 0:
        comm.close()  # returns when the other rank knows it
        return None
    time.sleep(0.5)
    with pytest.raises(PeerLost, match="closed") as raised:
        comm.all_reduce(to_device(np.ones(3)), stream=stream)
    assert raised.value.ranks == (0,)
    return _native.emulated_calls_of("cuLaunchKernel") - launches


def test_calls_after_a_rank_has_closed_launch_nothing():
    assert on_processes(calls_later, 2) == [None, 0]


ENDS = """
    import gc, os, sys
    import numpy as np
    import unisono
    from device_cases import to_device
    from unisono import _native
    from unisono.transports import session

    session._LONGEST_END_S = 3600  # so long is never waited
    rank, job, drops = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "drops"
    comm = unisono.init(rank, 2, job=job)
    stream = _native.CudaStream(0)
    comm.all_reduce(to_device(np.ones(3)), stream=stream)
    comm.synchronize(60)
    x = to_device(np.full(100_000, 7.0 if rank == 0 else 0.0))
    group = comm.split(0) if drops else comm
    group.all_reduce(to_device(np.ones(3)), stream=stream)
    group.synchronize(60)
    if rank == 1:
        _native.arm_failpoints("device.move:1:stop")
    comm.barrier()
    group.broadcast(x, root=0, stream=stream)
    group.synchronize(60)
    print(x.numpy().min(), flush=True)
    if rank == 0:
        del group
        gc.collect()
"""


@pytest.mark.sweep
@pytest.mark.parametrize("how", ["exits", "drops"])
def test_process_that_ends_waits_for_kernels_that_read_windows(how):
    """Without close(): at exit, or for a communicator that was dropped before."""
    job = secrets.token_hex(8)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(ENDS), str(rank), job, how],
            env={**os.environ, "PYTHONPATH": str(SUPPORT)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        assert ranks[0].stdout.readline().strip() == "7.0"
        while state_of(ranks[1].pid) != "T":
            time.sleep(0.01)
        time.sleep(0.5)  # rank 0 ends meanwhile, and must wait
        assert ranks[0].poll() is None
        os.kill(ranks[1].pid, signal.SIGCONT)
        assert ranks[1].stdout.readline().strip() == "7.0"
        assert [rank.wait(WITHIN_S) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
            rank.stdout.close()
