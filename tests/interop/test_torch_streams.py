"""Calls on CUDA tensors: which stream they run on, and who waits for whom.

Here with the emulated driver and tensors that seem to be on a device (`fake_cuda.py`);
`test_torch_cuda.py` has what needs a GPU.
"""

from datetime import timedelta
from types import SimpleNamespace

import fake_cuda
import pytest
import torch
import torch.distributed as dist
from ranks import expect, group, until

import emulated
from forked import attempt
from unisono.interop.torch import adapters
from unisono.interop.torch.streams import barrier_device

pytestmark = [
    pytest.mark.skipif(emulated.ON_GPU, reason="the emulated driver"),
    pytest.mark.one_in(2),
]
n = 2
GPU = torch.device("cuda", 0)


def on_gpu(*values, dtype=torch.float32):
    return fake_cuda.tensor(torch.tensor(values, dtype=dtype))


def caller(asynchronous):
    """Call something of torch's, and wait for it if that is to be done."""

    def done(call, *args, **how):
        work = call(*args, **how, async_op=asynchronous)
        assert (work is None) != asynchronous
        if work is not None:
            work.wait()

    return done


def check(found, *wanted):
    found = fake_cuda.host(found).tolist()
    assert found == list(wanted), f"{found} where {list(wanted)} was expected"


def reducing(me, done):
    x = on_gpu(me + 1, 2)
    done(dist.all_reduce, x)
    check(x, 3, 4)
    x = on_gpu(me + 1, 4)
    done(dist.all_reduce, x, op=dist.ReduceOp.AVG)
    check(x, 1.5, 4)
    x = on_gpu(me + 1, 2)
    done(dist.all_reduce, x, op=dist._make_nccl_premul_sum(0.5))
    check(x, 1.5, 2)
    x = on_gpu(me + 1, 2)
    done(dist.reduce, x, 1)
    check(x, *((3, 4) if me == 1 else (1, 2)))
    out = on_gpu(0)
    done(dist.reduce_scatter, out, [on_gpu(me), on_gpu(10 + me)])
    check(out, 1 + 20 * me)
    out = on_gpu(0)
    done(dist.reduce_scatter_tensor, out, on_gpu(me, 10 + me))
    check(out, 1 + 20 * me)
    done(dist.all_reduce, on_gpu())


def gathering(me, done):
    x = on_gpu(me + 1, 2)
    done(dist.broadcast, x, 1)
    check(x, 2, 2)
    outs = [on_gpu(0, 0), on_gpu(0, 0)]
    done(dist.all_gather, outs, on_gpu(me, 7))
    check(outs[0], 0, 7)
    check(outs[1], 1, 7)
    out = on_gpu(0, 0, 0, 0)
    done(dist.all_gather_into_tensor, out, on_gpu(me, 7))
    check(out, 0, 7, 1, 7)
    outs = [on_gpu(0), on_gpu(0)] if me == 1 else None
    done(dist.gather, on_gpu(me + 5), outs, dst=1)
    if me == 1:
        check(outs[0], 5)
        check(outs[1], 6)
    out = on_gpu(0)
    done(dist.scatter, out, [on_gpu(3), on_gpu(4)] if me == 0 else None, src=0)
    check(out, 3 + me)


def exchanging(me, done):
    out = on_gpu(0, 0)
    done(dist.all_to_all_single, out, on_gpu(me, 10 + me))
    check(out, 10 * me, 10 * me + 1)
    out = on_gpu(*[0] * (2 if me else 4))
    splits = [1, 1] if me else [2, 2], [2, 1]
    done(dist.all_to_all_single, out, on_gpu(me, me, 5 + me), *splits)
    check(out, *((5, 6) if me else (0, 0, 1, 1)))
    outs = [on_gpu(0), on_gpu(0)]
    done(dist.all_to_all, outs, [on_gpu(me), on_gpu(10 + me)])
    check(outs[0], 10 * me)
    check(outs[1], 10 * me + 1)


def collectives(rank, asynchronous):
    fake_cuda.begin()
    with group(rank):
        for some in (reducing, gathering, exchanging):
            some(rank.number, caller(asynchronous))
        assert (fake_cuda.Stream.made > 0) == asynchronous


@pytest.mark.parametrize("asynchronous", [False, True])
def test_every_collective_runs_on_cuda_tensors(ranks, asynchronous):
    ranks(n, collectives, asynchronous)


def types(rank):
    fake_cuda.begin()
    names = ("bfloat16", "float16", "float8_e4m3fn", "complex64", "int8", "uint64")
    with group(rank):
        for name in names:
            dtype = getattr(torch, name)
            x = fake_cuda.tensor(torch.ones(9).to(dtype))
            dist.all_reduce(x)
            expect(fake_cuda.host(x), (torch.ones(9) * 2).to(dtype), name)
        x = fake_cuda.tensor(torch.ones(9).to(torch.float8_e4m3fnuz))  # only copied
        out = fake_cuda.tensor(torch.zeros(18).to(torch.float8_e4m3fnuz))
        dist.all_gather_into_tensor(out, x)
        expect(fake_cuda.host(out), torch.ones(18).to(torch.float8_e4m3fnuz))


def test_types(ranks):
    ranks(n, types)


def views(rank):
    """Tensors that do not lie in one piece, read and written."""
    fake_cuda.begin()
    with group(rank):
        whole = fake_cuda.tensor(torch.arange(12.0).reshape(3, 4))
        dist.all_reduce(whole[:, 1])
        wanted = torch.arange(12.0).reshape(3, 4)
        wanted[:, 1] *= n
        expect(fake_cuda.host(whole), wanted)
        work = dist.all_reduce(whole[:, 2], async_op=True)
        work.wait()
        wanted[:, 2] *= n
        expect(fake_cuda.host(whole), wanted)
        out = fake_cuda.tensor(torch.zeros(4, 2))
        parts = [out[:, 0], out[:, 1]]
        work = dist.all_gather(parts, whole.t()[:, 0], async_op=True)
        work.wait()
        expect(fake_cuda.host(out), torch.stack([wanted[0], wanted[0]], 1))


def test_views_are_copied_on_the_stream_of_the_call(ranks):
    ranks(n, views)


def in_flight(rank, asynchronous):
    """Rank 0 makes its call long before rank 1: nothing of it blocks the host."""
    fake_cuda.begin()
    with group(rank):
        dist.all_reduce(on_gpu(1))  # the ranks connect
        x = on_gpu(1 + rank.number)
        if rank.number == 1:
            rank.until("began", 0)
        stream = fake_cuda.Stream()
        with torch.cuda.stream(stream):
            work = dist.all_reduce(x, async_op=asynchronous)
            seen = [work.is_completed(), work.is_success()] if asynchronous else []
            if asynchronous:
                until(stream.query)  # the call is on another stream
                work.wait()
            busy = not stream.query()
        if rank.number == 0:
            assert busy, "the current stream does not wait"
            if asynchronous:
                assert seen == [False, False]
                assert work.exception() is None
                late = attempt(work.wait, timedelta(seconds=0.05))
                assert late["error"] == "CollectiveTimeout", late
                assert "Timed out" in late["message"]
            rank.tell("began")
        with torch.cuda.stream(stream):
            assert fake_cuda.host(x).tolist() == [3]
        if asynchronous:
            until(work.is_completed)
            assert work.is_success()
            assert work.result()[0] is x
            assert work.exception() is None


@pytest.mark.parametrize("asynchronous", [False, True])
def test_host_is_not_blocked(ranks, asynchronous):
    ranks(n, in_flight, asynchronous)


def kept(rank):
    """What an asynchronous call uses lives until it is done, or was waited for."""
    import gc
    import weakref

    fake_cuda.begin()
    with group(rank) as all_ranks:
        streams = all_ranks._calls._streams
        dist.all_reduce(on_gpu(1))
        if rank.number == 1:
            rank.until("dropped", 0)
            dist.all_reduce(fake_cuda.tensor(torch.ones(100)))
            dist.all_reduce(fake_cuda.tensor(torch.ones(100)))
            dist.all_reduce(fake_cuda.tensor(torch.ones(100)))
            return
        x = fake_cuda.tensor(torch.ones(100))
        gone = weakref.ref(x)
        work = dist.all_reduce(x, async_op=True)
        del x, work
        gc.collect()
        assert gone() is not None, "a tensor in flight was freed"
        rank.tell("dropped")
        streams[0].own.synchronize()
        y = fake_cuda.tensor(torch.ones(100))
        work = dist.all_reduce(y, async_op=True)
        gc.collect()
        assert gone() is None, "what has ended is still kept"
        gone = weakref.ref(y)
        work.wait()
        del y
        work._outputs = None
        gc.collect()
        assert gone() is None, "what was waited for is still kept"
        z = fake_cuda.tensor(torch.ones(100))
        dist.all_reduce(z)
        assert len(streams[0]._in_flight) == 1


def test_tensors_live_as_long_as_their_call(ranks):
    ranks(n, kept)


def futures(rank):
    fake_cuda.begin()
    with group(rank) as all_ranks:
        x = on_gpu(1 + rank.number)
        work = dist.all_reduce(x, async_op=True)
        future = work.get_future()
        own = all_ranks._calls._streams[0].own
        assert [own] == fake_cuda.FUTURES
        assert future.done()
        assert future.value()[0] is x
        assert work.get_future() is future
        work.wait()
        assert fake_cuda.host(x).tolist() == [3]


def test_future_is_completed_on_the_stream_of_the_call(ranks):
    ranks(n, futures)


def messages(rank):
    fake_cuda.begin()
    me, other = rank.number, 1 - rank.number
    with group(rank) as all_ranks:
        x, y = on_gpu(me, 5), on_gpu(0, 0)
        ops = [dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, y, other)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert fake_cuda.host(y).tolist() == [other, 5]
        if me == 0:
            dist.send(on_gpu(8, 9), 1, tag=3)
            dist.send(on_gpu(6, 7), 1)
        else:
            wide = fake_cuda.tensor(torch.zeros(2, 2))
            assert dist.recv(wide[:, 1], tag=3) == 0
            assert fake_cuda.host(wide).tolist() == [[0, 8], [0, 9]]
            work = dist.irecv(y, 0)
            until(work.is_completed)
            future = work.get_future()
            assert future.wait()[0] is y
            assert fake_cuda.FUTURES[-1] == all_ranks._calls._streams[0].own
            work.wait()
            assert work._source_rank() == 0
            assert fake_cuda.host(y).tolist() == [6, 7]


def test_messages_are_staged_through_the_host(ranks):
    ranks(n, messages)


def coalesced(rank):
    fake_cuda.begin()
    with group(rank):
        xs = [on_gpu(i + rank.number) for i in range(3)]
        dist.all_reduce_coalesced(xs)
        assert [fake_cuda.host(x).item() for x in xs] == [1, 3, 5]
        with dist._coalescing_manager(async_ops=True) as several:
            for x in xs:
                dist.all_reduce(x)
        several.wait()
        assert [fake_cuda.host(x).item() for x in xs] == [2, 6, 10]
        with dist._coalescing_manager(device=GPU, async_ops=True) as several:
            for x in xs:
                dist.broadcast(x, 0, async_op=True)
        assert len(several.works) == 1
        several.wait()
        until(several.works[0].is_completed)
        assert several.works[0].exception() is None
        out = on_gpu(0, 0, 0, 0)
        with dist._coalescing_manager(async_ops=True) as several:
            dist.all_gather_into_tensor(out[:2], on_gpu(rank.number))
            dist.all_gather_into_tensor(out[2:], on_gpu(rank.number + 5))
        several.wait()
        assert fake_cuda.host(out).tolist() == [0, 1, 5, 6]


def test_coalesced_calls(ranks):
    ranks(n, coalesced)


def barriers(rank):
    """A barrier that names a device waits for its stream."""
    fake_cuda.begin()
    with group(rank):
        dist.all_reduce(on_gpu(1))  # the ranks connect
        if rank.number == 1:
            rank.until("began", 0)
        elif rank.number == 0:
            opts = dist.BarrierOptions()
            opts.device_ids = [0]
            work = dist.group.WORLD.barrier(opts)
            assert not work.is_completed()
            rank.tell("began")
            work.wait()
            assert work.is_completed()
            return
        opts = dist.BarrierOptions()
        opts.device_ids = [0]
        opts.asyncOp = False
        dist.group.WORLD.barrier(opts).wait()


def test_barrier_of_a_device_blocks_the_host(ranks):
    ranks(n, barriers)


def wrong(rank):
    fake_cuda.begin()
    result = {}
    with group(rank):
        result["devices"] = attempt(
            dist.all_gather_into_tensor, on_gpu(0, 0), torch.ones(1)
        )
        result["other way"] = attempt(
            dist.all_gather_into_tensor, torch.ones(2), on_gpu(0)
        )
        result["bits"] = attempt(dist.all_reduce, on_gpu(0), dist.ReduceOp.BAND)
        x = on_gpu(1)
        dist.all_reduce(x)
        assert fake_cuda.host(x).tolist() == [n]
    return result


def test_wrong_arguments_are_refused(ranks):
    for result in ranks(n, wrong):
        for name in ("devices", "other way"):
            assert "expected one device" in result[name]["message"]
        assert "band has no meaning" in result["bits"]["message"]


def only_cpu(rank):
    fake_cuda.begin()
    with group(rank, "cpu:unisono") as all_ranks:
        assert all_ranks._device_types == [torch.device("cpu")]
        result = attempt(dist.all_reduce, on_gpu(1))
        x = torch.ones(1)
        dist.all_reduce(x)
        assert x.item() == n
        return result


def test_group_of_the_cpu_refuses_cuda_tensors(ranks):
    for result in ranks(n, only_cpu):
        assert "serves the CPU alone" in result["message"]


def only_cuda(rank):
    fake_cuda.begin()
    with group(rank, "cuda:unisono") as all_ranks:
        assert all_ranks._device_types == [GPU.__class__("cuda")]
        assert all_ranks._get_backend(GPU) is all_ranks
        x = on_gpu(1)
        dist.all_reduce(x)
        assert fake_cuda.host(x).item() == n


def test_group_of_cuda_alone(ranks):
    ranks(n, only_cuda)


def failed(rank):
    """A rank that does not come: named by the wait on the host and the next call."""
    fake_cuda.begin()
    with group(rank, timeout_s=20):
        dist.all_reduce(on_gpu(1))
        if rank.number == 1:
            rank.until("failed", 0)
            return None
        opts = dist.AllreduceOptions()
        opts.timeout = timedelta(seconds=0.3)
        work = dist.group.WORLD.allreduce([on_gpu(1)], opts)
        until(work.is_completed)
        until(lambda: work.exception() is not None)
        assert not work.is_success()
        result = [attempt(work.wait), attempt(dist.all_reduce, on_gpu(1))]
        rank.tell("failed")
        return result


def test_failure_is_raised_by_wait_and_by_the_next_call(ranks):
    first, second = ranks(n, failed)[0]
    assert first["error"] == "CollectiveTimeout"
    assert first["attributes"]["ranks"] == [1]
    assert second["error"] in ("CollectiveTimeout", "UsageError")


def groups(rank):
    fake_cuda.begin()
    me = rank.number
    with group(rank):
        pair = dist.new_group([1, 2])
        x, y = on_gpu(me), on_gpu(me)
        if me in (1, 2):
            dist.all_reduce(y, group=pair)
        dist.all_reduce(x)
        assert fake_cuda.host(x).item() == 3
        assert fake_cuda.host(y).item() == (3 if me else 0)


def test_groups(ranks):
    ranks(3, groups)


def options(ids=(), device=None):
    return SimpleNamespace(device_ids=list(ids), device=device)


def test_device_of_a_barrier(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    both, cpu, second = ("cpu", "cuda"), torch.device("cpu"), torch.device("cuda", 1)
    assert barrier_device(options([1]), ("cpu",), None) is None
    assert barrier_device(options([1]), both, None) == second
    assert barrier_device(options(device=cpu), both, None) is None
    assert barrier_device(options(device=cpu), both, second) == second
    assert barrier_device(options(device=second), both, None) == second
    assert barrier_device(options(), ("cuda",), None) == torch.device("cuda", 3)
    unnumbered = options(device=torch.device("cuda"))
    assert barrier_device(unnumbered, both, None) == torch.device("cuda", 3)
    assert barrier_device(unnumbered, both, second) == second


def test_devices_that_a_group_serves(monkeypatch):
    for there in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        both = ("cpu", "cuda") if there else ("cpu",)
        assert adapters.served({"cpu": "unisono", "cuda": "unisono"}) == both
        assert adapters.served(None) == both
        assert adapters.served({"cpu": "unisono", "cuda": "nccl"}) == ("cpu",)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert adapters.served({"cpu": "gloo", "cuda": "unisono"}) == ("cuda",)


def without_a_device(rank):
    """Groups of a machine without CUDA are as ever."""
    with group(rank) as made:
        assert made._device_types == [torch.device("cpu")]
        x = torch.ones(3)
        dist.all_reduce(x)
        dist.barrier(device_ids=[0])
        return x.tolist()


def test_without_cuda_the_group_serves_the_cpu(ranks):
    assert ranks(n, without_a_device) == [[2.0] * 3] * n
