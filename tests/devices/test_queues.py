"""The queues of a GPU that streams share, and that ranks as threads need one each."""

import os

import numpy as np
import pytest

import unisono
from device_cases import to_device
from emulated_world import alone
from unisono import _native, cuda_queues
from unisono.errors import CollectiveTimeout, DeviceError
from unisono.testing import world

RANKS = 12
REQUESTED_BY = "UNISONO_CUDA_QUEUES_OF"


@pytest.fixture(autouse=True)
def _queues(monkeypatch):
    monkeypatch.setenv("UNISONO_EMULATED_QUEUES", "1")
    monkeypatch.setenv("UNISONO_CUDA_BLOCKS", "1")
    monkeypatch.setenv("UNISONO_EMULATED_THREADS", "1")
    # An earlier world of threads may have set them in this process.
    for name in (cuda_queues.VARIABLE, REQUESTED_BY):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/nonexistent")


def makes_calls(comm):
    """The first rank makes all its calls before the others make their first."""
    stream = _native.CudaStream(0)
    arrays = [to_device(np.ones(10)) for _ in range(4)]
    comm.timeout_s = 3 if cuda_queues.count() == 1 else 60  # with one it cannot end
    comm.all_reduce(arrays[0], stream=stream)
    comm.synchronize(60)
    comm.barrier()
    if comm.rank > 0:
        comm.barrier()
    for x in arrays:
        comm.all_reduce(x, stream=stream)
    if comm.rank == 0:
        comm.barrier()
    comm.synchronize(60)
    return arrays[1].numpy().tolist(), comm.explain("all_reduce", arrays[0])


def in_threads(_, ranks):
    with world(ranks) as w:
        return os.environ[cuda_queues.VARIABLE], w.run(makes_calls)[0]


def test_ranks_that_are_threads_get_a_queue_each():
    variable, (result, explained) = unisono.spawn(in_threads, 1, (RANKS,))[0]
    assert variable == "32"
    assert result == [float(RANKS)] * 10
    said = "32 (CUDA_DEVICE_MAX_CONNECTIONS=32) for 12 ranks of this process"
    assert said in explained
    assert "too few" not in explained


@pytest.mark.sweep
def test_kernels_are_queued_behind_those_that_wait_for_them(monkeypatch):
    """What happens with the number of queues that a user has chosen."""
    monkeypatch.setenv(cuda_queues.VARIABLE, "1")
    with pytest.raises(CollectiveTimeout):
        unisono.spawn(in_threads, 1, (4,))


def explains(comm):
    x = to_device(np.ones(10))
    comm.all_reduce(x, stream=_native.CudaStream(0))
    comm.synchronize(60)
    comm.barrier()
    os.environ[cuda_queues.VARIABLE] = "2"
    return comm.explain("all_reduce", x)


def explains_in_threads(_):
    with world(3) as w:
        return w.run(explains)[0]


def test_explain_tells_of_too_few_queues():
    said = unisono.spawn(explains_in_threads, 1)[0]
    assert "2 (CUDA_DEVICE_MAX_CONNECTIONS=2) for 3 ranks of this process" in said
    assert "set\n             CUDA_DEVICE_MAX_CONNECTIONS=32 before" in said


def variable_after(code, **environment):
    """What the variable is after some code, in a process of its own."""
    end = "import os; print(os.environ.get('CUDA_DEVICE_MAX_CONNECTIONS'))"
    return alone(f"{code}\n{end}", **environment)


WORLD = "from unisono.testing import world; world({}).close()"


@pytest.mark.sweep
def test_variable_is_set_only_for_threads_that_may_use_cuda_and_before_they_do():
    assert variable_after(WORLD.format(2)) == "32"
    assert variable_after(WORLD.format(1)) == "None"
    given = {"CUDA_DEVICE_MAX_CONNECTIONS": "4"}
    assert variable_after(WORLD.format(2), **given) == "4"
    first = "from unisono import _native; _native.cuda_device_count()"
    assert variable_after(f"{first}; {WORLD.format(2)}") == "None"


def queues_of_a_rank(comm):
    return os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")


@pytest.mark.sweep
def test_processes_do_not_inherit_what_was_set_for_threads(monkeypatch):
    monkeypatch.setenv(cuda_queues.VARIABLE, "32")
    monkeypatch.setenv(REQUESTED_BY, str(os.getpid()))
    assert unisono.spawn(queues_of_a_rank, 2) == [None, None]
    monkeypatch.setenv(cuda_queues.VARIABLE, "4")  # by the user, later
    assert unisono.spawn(queues_of_a_rank, 2) == ["4", "4"]
    monkeypatch.setenv(cuda_queues.VARIABLE, "32")
    monkeypatch.delenv(REQUESTED_BY)
    assert unisono.spawn(queues_of_a_rank, 2) == ["32", "32"]


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="there is a GPU")
def test_variable_is_not_set_without_a_driver():
    assert variable_after(WORLD.format(2), UNISONO_CUDA_DRIVER="") == "None"


@pytest.mark.parametrize(
    ("text", "count"), [("", 8), ("x", 8), ("0", 1), ("12", 12), ("100", 32)]
)
def test_number_of_queues(monkeypatch, text, count):
    monkeypatch.setenv(cuda_queues.VARIABLE, text)
    assert cuda_queues.count() == count


@pytest.fixture
def mps(monkeypatch, tmp_path):
    """The pipe of its daemon is what tells that MPS runs."""
    (tmp_path / "control").touch()
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))


@pytest.mark.usefixtures("mps")
def test_without_the_variable_a_process_has_two_queues_under_mps():
    assert cuda_queues.count() == 2
    assert cuda_queues.words() == (
        "2 (CUDA_DEVICE_MAX_CONNECTIONS is not set, under MPS)"
    )


def streams_wait(comm, queues):
    x, stream = to_device(np.ones(10)), _native.CudaStream(0)
    os.environ[cuda_queues.VARIABLE] = queues
    os.environ["UNISONO_CUDA_STREAMS_WAIT"] = "1"
    comm.all_reduce(x, stream=stream)
    comm.synchronize(60)
    return x.numpy()[0]


def between_hosts(_, queues):
    with world(2, hosts=(0, 1)) as w:
        return w.run(streams_wait, queues)


def test_streams_that_wait_between_hosts_need_queues():
    assert unisono.spawn(between_hosts, 1, ("4",))[0] == [2, 2]
    said = r"have 3 \(CUDA_DEVICE_MAX_CONNECTIONS=3\) queues.*set .*=8 before"
    with pytest.raises(DeviceError, match=said):
        unisono.spawn(between_hosts, 1, ("3",))


def explained(comm):
    x = to_device(np.ones(10))
    comm.all_reduce(x, stream=_native.CudaStream(0))
    comm.synchronize(60)
    few = comm.explain("all_reduce", x)
    os.environ[cuda_queues.VARIABLE] = "4"
    return few, comm.explain("all_reduce", x)


def test_explain_tells_a_process_of_too_few_queues(monkeypatch):
    monkeypatch.setenv(cuda_queues.VARIABLE, "2")
    few, enough = unisono.spawn(explained, 2)[0]
    assert "2 (CUDA_DEVICE_MAX_CONNECTIONS=2) for the rank of this process" in few
    assert "CUDA_DEVICE_MAX_CONNECTIONS=8 before" in few
    assert "queues" not in enough
