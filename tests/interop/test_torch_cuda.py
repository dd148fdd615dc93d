"""The torch backend on a GPU that two ranks share: calls, streams, futures, groups.

    UNISONO_GPU_TESTS=1 python -m pytest -v -p no:xdist tests/interop -k torch_cuda

What needs no GPU of it is in `test_torch_streams.py`.
"""

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from gpu_ranks import connect, gpu_group, n, needs_gpu
from ranks import bits, until
from torch.distributed.device_mesh import init_device_mesh

from forked import attempt

pytestmark = needs_gpu


def numbers(seed, count=1000, dtype=torch.float32):
    """Small whole numbers: their sums are exact in any order."""
    made = torch.Generator().manual_seed(seed)
    return torch.randint(0, 8, (count,), generator=made).to(dtype)


class Cases:
    """Every collective once, on tensors of one device; each returns its results."""

    def __init__(self, me, device, of=None, asynchronous=False):
        self.me, self.device = me, device
        self._of, self._asynchronous = of, asynchronous

    def make(self, part=0, count=1000):
        return numbers(10 * self.me + part, count).to(self.device)

    def room(self, count=1000):
        return torch.full((count,), -1.0, device=self.device)

    def done(self, call, *args, **how):
        work = call(*args, **how, group=self._of, async_op=self._asynchronous)
        if self._asynchronous:
            work.wait()

    def all_reduce(self):
        x, y = self.make(), self.make(1)
        self.done(dist.all_reduce, x)
        self.done(dist.all_reduce, y, op=dist.ReduceOp.MAX)
        return x, y

    def reduce(self):
        x = self.make()
        self.done(dist.reduce, x, 1)
        return (x,) if self.me == 1 else ()

    def broadcast(self):
        x = self.make()
        self.done(dist.broadcast, x, 1)
        return (x,)

    def all_gather(self):
        rooms = [self.room() for _ in range(n)]
        self.done(dist.all_gather, rooms, self.make())
        return rooms

    def gather(self):
        rooms = [self.room() for _ in range(n)] if self.me == 1 else None
        self.done(dist.gather, self.make(), rooms, dst=1)
        return rooms or ()

    def scatter(self):
        x = [self.make(i) for i in range(n)] if self.me == 1 else None
        room = self.room()
        self.done(dist.scatter, room, x, src=1)
        return (room,)

    # Those that gloo lacks, or lacked:

    def strided(self):
        x, wide = self.make(2), torch.zeros(1000, n, device=self.device)
        self.done(dist.all_reduce, x[::3])
        self.done(dist.all_gather, list(wide.unbind(1)), self.make())
        return x, wide

    def average(self):
        x, y = self.make(), self.make()
        self.done(dist.all_reduce, x, op=dist.ReduceOp.AVG)
        self.done(dist.all_reduce, y, op=dist._make_nccl_premul_sum(0.5))
        return x, y

    def all_gather_single(self):
        room = self.room(1000 * n)
        self.done(dist.all_gather_into_tensor, room, self.make())
        return (room,)

    def reduce_scatter(self):
        room, single = self.room(), self.room(500)
        self.done(dist.reduce_scatter, room, [self.make(i) for i in range(n)])
        self.done(dist.reduce_scatter_tensor, single, self.make())
        return room, single

    def all_to_all(self):
        room, uneven = self.room(), self.room(600 if self.me else 400)
        self.done(dist.all_to_all_single, room, self.make())
        gets = [300, 300] if self.me else [200, 200]
        self.done(
            dist.all_to_all_single, uneven, self.make(count=500), gets, [200, 300]
        )
        rooms = [self.room() for _ in range(n)]
        self.done(dist.all_to_all, rooms, [self.make(i) for i in range(n)])
        return room, uneven, *rooms


OF_GLOO = ("all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter")
OURS = ("strided", "average", "all_gather_single", "reduce_scatter", "all_to_all")


def same(found, wanted, what):
    assert len(found) == len(wanted), what
    for one, other in zip(found, wanted, strict=True):
        assert one.is_cuda, what
        assert torch.equal(bits(one.cpu()), bits(other)), what


def collectives(rank, which, asynchronous):
    with gpu_group(rank, adapter=which):
        gloo = dist.new_group(backend="gloo")
        me = rank.number
        for name in OF_GLOO + OURS:
            found = getattr(Cases(me, "cuda", asynchronous=asynchronous), name)()
            same(found, getattr(Cases(me, "cpu"), name)(), f"{name} as on the CPU")
            if name in OF_GLOO:
                same(found, getattr(Cases(me, "cpu", gloo), name)(), f"{name} of gloo")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_collectives_have_the_values_of_the_cpu(ranks, either_adapter, asynchronous):
    ranks(n, collectives, either_adapter, asynchronous)


def types(rank):
    names = ("bfloat16", "float16", "float64", "float8_e4m3fn", "complex64", "int64")
    with gpu_group(rank):
        for name in names:
            dtype = getattr(torch, name)
            x = torch.ones(777, device="cuda").to(dtype)
            dist.all_reduce(x)
            wanted = torch.full((777,), float(n)).to(dtype)
            assert torch.equal(bits(x.cpu()), bits(wanted)), name
        x = torch.tensor([rank.number == 0, False], device="cuda")
        dist.all_reduce(x, dist.ReduceOp.MAX)
        assert x.tolist() == [True, False]
        for dtype in (torch.float8_e4m3fn, torch.float8_e4m3fnuz):  # lists, joined
            x = torch.ones(9, device="cuda").to(dtype)
            rooms = [torch.zeros_like(x) for _ in range(n)]
            dist.all_gather(rooms, x)
            assert all(torch.equal(bits(r.cpu()), bits(x.cpu())) for r in rooms)


def test_types(ranks):
    ranks(n, types)


def host_goes_on(rank, which, asynchronous):
    """Rank 1 makes its call when rank 0 says so: after its own, and what follows."""
    with gpu_group(rank, adapter=which):
        connect()
        x = torch.full((1000,), 1.0, device="cuda")
        if rank.number == 1:
            rank.until("began", 0)
        x += rank.number  # before the call, on the current stream
        work = dist.all_reduce(x, async_op=asynchronous)
        if rank.number == 0:
            current = torch.cuda.current_stream()
            if asynchronous:
                until(current.query)  # the call is on another stream
                assert not work.is_completed()
                assert not work.is_success()
                work.wait()
            y = x * 2  # behind it
            assert not current.query()
            rank.tell("began")
        else:
            if asynchronous:
                work.wait()
            y = x * 2
        assert y.unique().tolist() == [6.0]
        if asynchronous:
            assert work.is_completed()
            assert work.is_success()
            if torch.__version__ >= "2.13":  # before, torch could not convert it
                assert work.exception() is None
            assert work.result()[0].data_ptr() == x.data_ptr()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_streams_are_ordered_without_the_host(ranks, either_adapter, asynchronous):
    ranks(n, host_goes_on, either_adapter, asynchronous)


def many_streams(rank):
    """Calls of one group on several streams, as FSDP makes them."""
    with gpu_group(rank):
        streams = [torch.cuda.Stream() for _ in range(3)]
        found = []
        for i in range(12):
            with torch.cuda.stream(streams[i % 3]):
                x = torch.full((5000,), float(i), device="cuda")
                dist.all_reduce(x)
                found.append(x.max())
        torch.cuda.synchronize()
        assert [x.item() for x in found] == [2.0 * i for i in range(12)]


def test_calls_on_several_streams(ranks):
    ranks(n, many_streams)


def temporaries(rank):
    """Tensors that are dropped, with their works, while calls are in flight."""
    with gpu_group(rank):
        wholes = []
        for i in range(30):
            x = torch.full((1 << 18,), 1.0 + i, device="cuda")
            whole = torch.empty(2 << 18, device="cuda")
            work = dist.all_gather_into_tensor(whole, x, async_op=True)
            del x
            torch.full((1 << 18,), -1.0, device="cuda").add_(1)  # not that memory
            wholes.append((work, whole) if i % 2 else (None, whole))
            del work
        for work, _ in wholes:
            if work is not None:
                work.wait()
        torch.cuda.synchronize()
        for i, (_, whole) in enumerate(wholes):
            assert whole.unique().tolist() == [1.0 + i]


def test_memory_of_calls_in_flight_is_not_reused(ranks):
    ranks(n, temporaries)


def futures(rank, which):
    with gpu_group(rank, adapter=which):
        connect()
        x = torch.full((1000,), 1.0 + rank.number, device="cuda")
        if rank.number == 1:
            rank.until("began", 0)
        future = dist.all_reduce(x, async_op=True).get_future()
        doubled = future.then(lambda done: done.value()[0] * 2)
        rank.tell("began")
        assert doubled.wait().unique().tolist() == [6.0]
        assert future.wait()[0].unique().tolist() == [3.0]


def test_futures_are_ordered_by_streams(ranks, either_adapter):
    ranks(n, futures, either_adapter)


def limited(rank):
    """A rank that does not come is named, and the device can be used afterwards."""
    with gpu_group(rank, timeout_s=30):
        connect()
        if rank.number == 1:
            rank.until("failed", 0)
            return None
        opts = dist.AllreduceOptions()
        opts.timeout = timedelta(seconds=1)
        work = dist.group.WORLD.allreduce([torch.ones(9, device="cuda")], opts)
        until(work.is_completed)
        until(lambda: work.exception() is not None)
        result = [attempt(work.wait)]
        result.append(attempt(dist.all_reduce, torch.ones(9, device="cuda")))
        assert torch.ones(9, device="cuda").sum().item() == 9
        rank.tell("failed")
        return result


def test_missing_rank_is_named(ranks):
    first, second = ranks(n, limited)[0]
    assert first["error"] == second["error"] == "CollectiveTimeout"
    assert first["attributes"]["ranks"] == [1]


def messages(rank, which):
    me, other = rank.number, 1 - rank.number
    with gpu_group(rank, adapter=which):
        x = torch.full((70_000,), float(me), device="cuda")
        y = torch.empty_like(x)
        ops = [dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, y, other)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert y.unique().tolist() == [other]
        if me == 0:
            dist.send(x + 7, 1, tag=3)
            dist.send((x + 9).bfloat16(), 1)
        else:
            wide = torch.zeros(70_000, 2, device="cuda")
            assert dist.recv(wide[:, 1], tag=3) == 0
            assert wide.sum(0).tolist() == [0, 490_000]
            y = y.bfloat16()
            future = dist.irecv(y, 0).get_future()
            assert future.wait()[0].unique().tolist() == [9]


def test_messages(ranks, either_adapter):
    ranks(n, messages, either_adapter)


def coalesced(rank):
    with gpu_group(rank):
        xs = [torch.full((100,), float(i), device="cuda") for i in range(4)]
        dist.all_reduce_coalesced(xs)
        with dist._coalescing_manager(async_ops=True) as several:
            for x in xs:
                dist.all_reduce(x)
        several.wait()
        assert [x[0].item() for x in xs] == [0, 4, 8, 12]
        rooms = [torch.zeros(200, device="cuda") for _ in range(2)]
        with dist._coalescing_manager(async_ops=True) as several:
            for room, x in zip(rooms, xs[1:], strict=False):
                dist.all_gather_into_tensor(room, x + rank.number)
        several.wait()
        assert [room[::100].tolist() for room in rooms] == [[4, 5], [8, 9]]
        small = [torch.zeros(50, device="cuda") for _ in range(2)]
        with dist._coalescing_manager(async_ops=True) as several:
            for room, x in zip(small, xs[1:], strict=False):
                dist.reduce_scatter_tensor(room, x)
        several.wait()
        assert [room[0].item() for room in small] == [8, 16]
        with dist._coalescing_manager(device=xs[0].device, async_ops=True) as several:
            for x in xs:
                dist.broadcast(x, 0, async_op=True)
        several.wait()


def test_coalesced_calls(ranks):
    ranks(n, coalesced)


def barriers(rank, which):
    """What was queued before a barrier has ended after it, on all ranks."""
    with gpu_group(rank, adapter=which):
        connect()
        for how in ({"device_ids": [0]}, {}):
            torch.cuda._sleep(10**8)
            dist.barrier(**how)
            assert torch.cuda.current_stream().query()
        work = dist.barrier(async_op=True, device_ids=[0])
        work.wait()
        assert work.is_completed()


def test_barrier(ranks, either_adapter):
    ranks(n, barriers, either_adapter)


def groups(rank):
    with gpu_group(rank):
        x = torch.ones(10, device="cuda")
        alone = [dist.new_group([r]) for r in range(n)]
        dist.all_reduce(x, group=alone[rank.number])
        both = dist.new_group([0, 1])
        dist.all_reduce(x, group=both)
        mesh = init_device_mesh("cuda", (n,), mesh_dim_names=("data",))
        dist.all_reduce(x, group=mesh.get_group("data"))
        assert x.unique().tolist() == [4.0]
        found = [None] * n
        dist.all_gather_object(found, {"rank": rank.number})
        assert found == [{"rank": 0}, {"rank": 1}]


def test_groups_and_meshes(ranks):
    ranks(n, groups)


def of_cuda_alone(rank, which):
    with gpu_group(rank, "cuda:unisono", which):
        x = torch.ones(10, device="cuda")
        dist.all_reduce(x)
        assert x.unique().tolist() == [2.0]
        found = [None] * n
        dist.all_gather_object(found, "x" * (1 + rank.number))  # as CUDA tensors
        assert found == ["x", "xx"]
        some = [None]
        dist.broadcast_object_list(some if rank.number else [5], 0)
        dist.barrier()


def test_group_of_cuda_alone(ranks, either_adapter):
    ranks(n, of_cuda_alone, either_adapter)


def mixed(rank, backend, device):
    with gpu_group(rank, backend, "auto"):
        x = torch.ones(10, device=device)
        dist.all_reduce(x)
        assert x.unique().tolist() == [2.0]


@pytest.mark.parametrize(
    ("backend", "device"),
    [
        ("cpu:unisono,cuda:nccl", "cpu"),
        ("cpu:gloo,cuda:unisono", "cuda"),
        ("cpu:gloo,cuda:unisono", "cpu"),
        ("cpu:unisono,cuda:unisono", "cuda"),
    ],
)
def test_groups_of_two_backends(ranks, backend, device):
    ranks(n, mixed, backend, device)


def captured(rank, asynchronous):
    with gpu_group(rank):
        x = torch.ones(5000, device="cuda")
        for _ in range(2):
            dist.all_reduce(x.clone(), async_op=asynchronous)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x * 1
            work = dist.all_reduce(y, async_op=asynchronous)
            if asynchronous:
                work.wait()
            x.copy_(y)
        for _ in range(5):
            graph.replay()
        torch.cuda.synchronize()
        assert x.unique().tolist() == [32.0]
        dist.all_reduce(x)
        assert x.unique().tolist() == [64.0]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_graph_of_an_all_reduce_is_replayed(ranks, asynchronous):
    ranks(n, captured, asynchronous)


def in_functions(rank, which, compiles):
    with gpu_group(rank, adapter=which) as all_ranks:
        mesh = init_device_mesh("cuda", (n,))

        def sums(x):
            y = functional.all_reduce(x * 2, "sum", mesh)
            z = functional.all_gather_tensor(y, 0, mesh)
            return functional.reduce_scatter_tensor(z, "sum", 0, mesh) + 1

        call = torch.compile(sums) if compiles else sums
        x = torch.full((100,), 1.0 + rank.number, device="cuda")
        for _ in range(2):
            assert call(x).unique().tolist() == [13.0]
        assert all_ranks.size() == n


@pytest.mark.parametrize("compiles", [False, True])
def test_functional_collectives(ranks, either_adapter, compiles):
    if compiles and os.environ.get("UNISONO_GPU_COMPILE") != "1":
        pytest.skip("UNISONO_GPU_COMPILE=1 runs it; it needs Triton and its compiler")
    ranks(n, in_functions, either_adapter, compiles)


def profiled(rank):
    from torch.profiler import ProfilerActivity, profile

    with gpu_group(rank):
        connect()
        with profile(activities=[ProfilerActivity.CPU]) as found:
            dist.all_reduce(torch.ones(10, device="cuda"))
        names = [event.key for event in found.key_averages()]
        assert "unisono:all_reduce" in names, names


def test_calls_are_in_profiles(ranks):
    ranks(n, profiled)
