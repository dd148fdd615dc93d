"""Collectives by NCCL, of which a fake one runs on the emulated driver."""

import ctypes
import gc
from weakref import ref

import numpy as np
import pytest

import emulated
from device_cases import to_device
from emulated_world import alone
from fake_nccl import ON_DEVICE, FakeNccl
from processes import on_processes
from unisono import _native
from unisono.devices import nccl
from unisono.errors import UnisonoError, UsageError
from unisono.testing import world
from unisono.testing.engines import cases, check_engine

pytestmark = [
    pytest.mark.skipif(emulated.ON_GPU, reason="for the emulated driver"),
    pytest.mark.usefixtures("with_nccl"),
]


def conforms(comm, chosen):
    fake = FakeNccl()
    return check_engine(comm, "nccl", comm.rank, chosen), fake.calls("ncclAllReduce")


def test_calls_have_the_right_results():
    """One of every kind, and some others."""
    every = list(cases(3))
    kinds = {(c.what, c.even, c.in_place, c.way): c for c in every if c.op == "sum"}
    chosen = [*kinds.values(), *every[::9]]
    for wrong, calls in on_processes(conforms, 3, (chosen,)):
        assert wrong == []
        assert calls > 5


@pytest.mark.sweep
@pytest.mark.parametrize("n", [1, 2, 4])
def test_every_call_has_the_right_result(n):
    for wrong, calls in on_processes(conforms, n, (list(cases(n)),)):
        assert wrong == []
        assert calls > 50


def test_ranks_that_are_threads_also_on_several_hosts(with_nccl):
    code = """
        import numpy as np
        import unisono
        from device_cases import to_device
        from fake_nccl import FakeNccl
        from unisono.testing import world

        def sums(comm):
            x = to_device(np.arange(3, dtype=np.int64) + comm.rank, comm.rank)
            comm.all_reduce(x)
            comm.synchronize(30)
            if any(comm.hosts):
                try:
                    comm.all_reduce(x, op="bxor")
                except unisono.UnsupportedWorld as why:
                    assert "NCCL has no bxor of int64" in str(why)
                else:
                    raise AssertionError("the kernel is for one host")
            return x.numpy().tolist()

        fake = FakeNccl()
        for hosts in ([0, 0, 0], [0, 0, 1]):
            with world(3, hosts=hosts) as w:
                print(w.run(sums))
        print([fake.calls(f"nccl{name}") for name in ("AllReduce", "CommAbort")])
    """
    found = alone(code, UNISONO_CUDA_DRIVER="emulated", UNISONO_NCCL=with_nccl)
    assert found.splitlines() == [*["[[3, 6, 9], [3, 6, 9], [3, 6, 9]]"] * 2, "[6, 0]"]


def one_rank(function):
    """Run it on a world of one rank, with the fake; what it returns."""
    fake = FakeNccl()
    with world(1) as w:
        return w.run(function, fake)[0]


def explained(comm, fake):
    x = to_device(np.ones(1 << 16, np.float32))
    before = comm.explain("all_reduce", x)
    comm.all_reduce(x)
    comm.synchronize(30)
    short = to_device(np.ones(4, np.int16))
    return [
        before,
        comm.explain("all_reduce", x),
        comm.explain("all_reduce", x, reproducible=True),
        comm.explain("all_reduce", short, op="bxor"),
        comm.explain("broadcast", short),
    ]


def test_explain_tells_the_engine_and_why(with_nccl):
    before, after, ordered, bitwise, copied = one_rank(explained)
    assert "all_reduce of 256 KiB on 1 ranks by nccl" in before
    assert "engine     NCCL: UNISONO_CUDA_ENGINE=nccl" in before
    assert f"engine     NCCL 2.27.5 ({with_nccl}): UNISONO_CUDA_ENGINE=nccl" in after
    assert "engine     unisono: reproducible=True" in ordered
    assert "engine     unisono: NCCL has no bxor of int16" in bitwise
    assert "broadcast of 8 B on 1 ranks by nccl" in copied


def test_explain_tells_the_own_engine(monkeypatch):
    monkeypatch.delenv("UNISONO_CUDA_ENGINE")
    with world(1) as w:
        told = w.comms[0].explain("all_reduce", to_device(np.ones(3, np.float32)))
        assert w.comms[0].engine == "unisono"
    assert "engine     unisono: the default" in told


def mixed(comm, fake):
    """Calls of both engines, on several streams."""
    streams = [_native.CudaStream(0) for _ in range(3)]
    x = to_device(np.full(20_000, 3, np.int32))
    y = to_device(np.zeros(20_000, np.int32))
    for i in range(6):
        comm.all_gather(x, out=y, stream=streams[i % 3])
        comm.all_reduce(y, op="bxor", stream=streams[(i + 1) % 3])
        comm.all_gather(y, out=x, stream=streams[(i + 2) % 3], async_op=True).wait()
    comm.synchronize(30)
    assert fake.calls("ncclAllGather") >= 12
    return x.numpy()


def test_calls_of_both_engines_run_in_order():
    assert (one_rank(mixed) == 3).all()


def recorded(comm, fake):
    comm.all_reduce(to_device(np.ones(7, np.float32)), op="max", label="norms")
    comm.synchronize(30)
    return comm.records()[-1]


def test_calls_are_in_the_flight_record():
    record = one_rank(recorded)
    assert record["profiling_name"] == "all_reduce"
    assert record["algorithm"] == "nccl"
    assert (record["op"], record["label"]) == ("max", "norms")
    assert record["input_sizes"] == [[7]]
    assert record["state"] == "completed"


def captured(comm, fake):
    emulated.initialize()
    stream = emulated.stream(emulated.NON_BLOCKING)
    x = to_device(np.arange(5, dtype=np.float32))
    y = to_device(np.zeros(5, np.float32))
    comm.all_gather(x, out=y, stream=stream)
    comm.synchronize(30)
    y.copy_from(np.zeros(5, np.float32))
    emulated.begin_capture(stream)
    comm.all_gather(x, out=y, stream=stream)
    graph = emulated.instantiate(emulated.end_capture(stream))
    before = y.numpy().tolist()
    emulated.launch_graph(graph, stream)
    emulated.synchronize(stream)
    emulated.release()
    return before, y.numpy().tolist()


def test_call_in_a_graph():
    assert one_rank(captured) == ([0] * 5, [0, 1, 2, 3, 4])


def kept(comm, fake):
    fake.fault(0, "ncclAllReduce", ON_DEVICE)
    x = to_device(np.ones(1000))
    alive = ref(x)
    work = comm.all_reduce(x, async_op=True)
    del x
    started = work.done(), alive() is not None
    fake.open_gates()
    fake.fault(0, "ncclAllReduce", 0)
    work.wait(30)
    comm.synchronize(30)
    ended = work.done()
    del work
    gc.collect()
    return started, ended, alive() is not None


def test_arrays_are_kept_until_the_call_has_ended():
    assert one_rank(kept) == ((False, True), True, False)


def changed(comm, fake):
    comm.all_reduce(to_device(np.ones(3, np.float32)))
    comm.synchronize(30)
    comm.engine = "nccl"  # as it is
    with pytest.raises(UsageError, match="made by 'nccl' already") as error:
        comm.engine = "unisono"
    with comm.duplicate() as other:
        other.engine = "unisono"
        other.all_reduce(to_device(np.ones(3, np.float32)))
        other.synchronize(30)
        with other.duplicate() as third:
            return str(error.value), other.engine, third.engine


def test_engine_is_chosen_before_the_first_call_and_inherited():
    text, other, third = one_rank(changed)
    assert "comm.duplicate()" in text
    assert (other, third) == ("unisono", "unisono")


def test_unknown_engines_are_refused(monkeypatch):
    with world(1) as w:
        with pytest.raises(UnisonoError, match="expected 'unisono' or 'nccl'"):
            w.comms[0].engine = "gloo"
        monkeypatch.setenv("UNISONO_CUDA_ENGINE", "mpi")
        x = to_device(np.ones(3, np.float32))
        with pytest.raises(UnisonoError, match=r"UNISONO_CUDA_ENGINE=mpi \(rank 0\)"):
            w.comms[0].all_reduce(x)


def test_settings_have_the_layout_of_nccl_h():
    """ncclConfig_t of 2.18: an older form would be refused, a larger one misread."""
    made = nccl.settings()
    assert ctypes.sizeof(made) == made.size == 48
    assert nccl.Settings.blocking.offset == 16
    assert nccl.Settings.net_name.offset == 32
    assert nccl.Settings.split_share.offset == 40
    assert (made.magic, made.version, made.blocking) == (0xCAFEBEEF, 21800, 0)
    assert ctypes.sizeof(nccl.UniqueId) == 128
