"""Windows in host memory, where devices cannot access each other's memory."""

import numpy as np
import pytest

import emulated
import unisono
from conformance import check, every_algorithm, every_type
from device_cases import perform_on_device, perform_on_own_device, to_device
from processes import on_processes
from unisono import _native
from unisono.devices import found
from unisono.errors import BadArgument, DeviceError
from unisono.testing import world

WINDOWS = "UNISONO_CUDA_WINDOWS"
needs_emulation = pytest.mark.skipif(
    emulated.ON_GPU, reason="two GPUs without access to each other are emulated"
)


@pytest.fixture
def on_host(monkeypatch):
    monkeypatch.setenv(WINDOWS, "host")


@pytest.fixture
def apart(monkeypatch):
    """Two devices that are no peers, in processes that start from now on."""
    monkeypatch.setenv("UNISONO_EMULATED_GPUS", "2")
    monkeypatch.setenv("UNISONO_EMULATED_PEERS", "0")


def cases(n, sizes=(4, 2777)):
    every = [*every_algorithm(n, sizes), *every_type(n)]
    return [case for case in every if case.what != "barrier"]


def test_every_algorithm_between_threads(on_host):
    with world(3) as w:
        check(cases(3), w.run(perform_on_device, cases(3)))


@pytest.mark.sweep
def test_every_algorithm_between_processes(on_host):
    check(cases(3), on_processes(perform_on_device, 3, (cases(3),)))


@pytest.mark.sweep
@needs_emulation
def test_every_algorithm_between_devices_of_two_processes(apart):
    check(cases(2), on_processes(perform_on_own_device, 2, (cases(2),)))


def two_threads(comm, wanted):
    with world(2) as w:
        return w.run(perform_on_own_device, wanted)


@pytest.mark.sweep
@needs_emulation
def test_every_algorithm_between_devices_of_one_process(apart):
    check(cases(2), on_processes(two_threads, 1, (cases(2),))[0])


def pieces(comm):
    """Several pieces: the windows of one rank are smaller than the buffers."""
    x = to_device(np.full(6 << 20, 1.5 + comm.rank, np.float32))
    stream = _native.CudaStream(0)
    comm.all_reduce(x, stream=stream, algorithm="ring")
    comm.synchronize(60)
    return bool((x.numpy() == 4).all())


def test_buffers_larger_than_the_windows(on_host):
    assert on_processes(pieces, 2) == [True, True]


def replays(comm):
    stream = _native.CudaStream(0)
    emulated.initialize()
    x = to_device(np.full(100, comm.rank + 1, np.int64))
    comm.all_reduce(x, stream=stream)
    comm.synchronize(30)
    emulated.begin_capture(stream.handle)
    comm.all_reduce(x, stream=stream)
    graph = emulated.instantiate(emulated.end_capture(stream.handle))
    for _ in range(20):
        emulated.launch_graph(graph, stream.handle)
    emulated.synchronize(stream.handle)
    return x.numpy().tolist()


def test_graphs_are_replayed(on_host):
    with world(2) as w:
        assert w.run(replays) == [[3 << 20] * 100] * 2


def explained(comm):
    x = comm.empty((1 << 10,), device="cuda")
    stream = _native.CudaStream(0)
    for _ in range(3):
        comm.all_reduce(x, stream=stream)
        comm.synchronize(30)
        comm.barrier()
    exposed = comm.core.device.made.plane.native.exposed()
    return comm.explain("all_reduce", x), exposed


def test_explain_says_why_and_nothing_is_exposed(on_host):
    for text, exposed in on_processes(explained, 2):
        assert "through windows of 8 MiB in host memory" in text
        assert "because UNISONO_CUDA_WINDOWS=host on rank 0" in text
        assert exposed == 0


@pytest.mark.usefixtures("without_packets")
def test_in_device_memory_buffers_are_exposed(monkeypatch):
    monkeypatch.setenv(WINDOWS, "device")
    for text, exposed in on_processes(explained, 2):
        assert "host memory" not in text
        assert exposed > 0


def explained_apart(comm):
    x = to_device(np.ones(10, np.float32), comm.rank)
    stream = _native.CudaStream(comm.rank)
    comm.all_reduce(x, stream=stream)
    comm.synchronize(30)
    return comm.explain("all_reduce", x), x.numpy().tolist()


@needs_emulation
def test_explain_names_the_devices_that_are_apart(apart):
    for text, x in on_processes(explained_apart, 2):
        assert "because rank 0: cuda:0 cannot access the memory of rank 1" in text
        assert x == [2.0] * 10


def refusal(comm, own_device=False):
    ordinal = comm.rank if own_device else 0
    with pytest.raises(unisono.UnisonoError) as raised:
        comm.all_reduce(to_device(np.ones(3, np.float32), ordinal))
    return type(raised.value), str(raised.value)


@needs_emulation
def test_device_memory_that_is_demanded_is_refused(apart, monkeypatch):
    monkeypatch.setenv(WINDOWS, "device")
    for kind, text in on_processes(refusal, 2, (True,)):
        assert kind is DeviceError
        assert "UNISONO_CUDA_WINDOWS=device, but" in text
        assert "cuda:0 cannot access the memory of rank 1" in text


def test_unknown_place_is_refused_on_all_ranks(monkeypatch):
    monkeypatch.setenv(WINDOWS, "disk")
    for kind, text in on_processes(refusal, 2):
        assert kind is BadArgument
        assert text == (
            "UNISONO_CUDA_WINDOWS=disk (rank 0): expected 'host' or 'device'"
        )


def differing(comm):
    import os

    os.environ[WINDOWS] = "host" if comm.rank else "device"
    return refusal(comm)


def test_ranks_must_agree_on_the_place():
    for kind, text in on_processes(differing, 2):
        assert kind is BadArgument
        assert "'host' on rank 1 and 'device' on rank 0" in text


class TestFound:
    """What `unisono env` and `unisono doctor` say."""

    def test_variable(self, monkeypatch):
        monkeypatch.setenv(WINDOWS, "host")
        assert found.windows().words == f"in host memory ({WINDOWS}=host)"
        monkeypatch.setenv(WINDOWS, "disk")
        assert found.windows().fix == "unset UNISONO_CUDA_WINDOWS"

    @needs_emulation
    @pytest.mark.parametrize("gpus", [2, 4])
    def test_devices_that_are_apart(self, monkeypatch, gpus):
        access = [[a == b for a in range(gpus)] for b in range(gpus)]
        monkeypatch.setattr(_native, "cuda_access", lambda: access)
        told = found.windows()
        assert told.usable
        assert "in host memory where ranks use such GPUs: cuda:0 and cuda:1" in told[1]
        assert ("and 3 other pairs" in told.words) == (gpus == 4)
        monkeypatch.setenv(WINDOWS, "device")
        assert not found.windows().usable

    @needs_emulation
    def test_devices_that_are_peers(self):
        assert found.windows().words == "in device memory"
