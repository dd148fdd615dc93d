"""Arrays of torch, CuPy and JAX on a GPU; `make gpu-test` runs these."""

import importlib.util
import time

import numpy as np
import pytest

import emulated
import unisono
from unisono.testing import world

LIMIT_S = 60
pytestmark = pytest.mark.skipif(not emulated.ON_GPU, reason="there is no GPU")
needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed"
)
needs_cupy = pytest.mark.skipif(
    importlib.util.find_spec("cupy") is None, reason="CuPy is not installed"
)
needs_jax = pytest.mark.skipif(
    importlib.util.find_spec("jax") is None, reason="JAX is not installed"
)


def on_own_stream(work):
    """Ranks that are threads need a stream each."""
    import torch

    def rank(comm):
        with torch.cuda.stream(torch.cuda.Stream()):
            return work(comm, torch)

    return rank


def reduced_tensor(comm, torch):
    x = torch.full((1000,), comm.rank + 1.0, device="cuda")
    x *= 2  # on the same stream: the call comes after it
    comm.all_reduce(x)
    return (x + 1).cpu().numpy()


@needs_torch
def test_tensors_are_reduced_on_the_current_stream():
    with world(3) as w:
        for found in w.run(on_own_stream(reduced_tensor)):
            assert (found == 13).all()


def asynchronous_tensors(comm, torch):
    xs = [torch.full((1 << 20,), float(i), device="cuda") for i in range(8)]
    works = [comm.all_reduce(x, async_op=True) for x in xs]
    totals = [work.wait() * 2 for work in works]
    return [t.max().item() for t in totals]


@needs_torch
def test_asynchronous_calls_order_the_current_stream():
    with world(2) as w:
        found = w.run(on_own_stream(asynchronous_tensors))
    assert found == [[4.0 * i for i in range(8)]] * 2


def temporaries(comm, torch):
    """Tensors that are freed while their calls are in flight."""
    found = []
    for i in range(50):
        x = torch.full((1 << 18,), 1.0 + i, device="cuda")
        work = comm.all_reduce(x, async_op=True)
        del x
        y = torch.full((1 << 18,), -1.0, device="cuda")  # may not get that memory
        y.add_(1)
        found.append(work.wait().sum())
    return [f.item() / (1 << 18) for f in found]


@needs_torch
def test_memory_of_calls_in_flight_is_not_reused():
    with world(2) as w:
        found = w.run(on_own_stream(temporaries))
    assert found == [[2.0 * (1 + i) for i in range(50)]] * 2


@needs_torch
@pytest.mark.parametrize("mode", ["thread_local", "relaxed"])
def test_graph_of_torch_is_replayed(mode):
    assert unisono.spawn(captured_by_torch, 2, (mode,)) == [64.0, 64.0]


def captured_by_torch(comm, mode):
    import torch

    x = torch.ones(5000, device="cuda")
    comm.all_reduce(x)  # warm
    torch.cuda.synchronize()
    x.fill_(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        y = x * 1
        comm.all_reduce(y)
        x.copy_(y)
    for _ in range(6):
        graph.replay()
    torch.cuda.synchronize()
    return x.max().item()


def of_processes(comm, count):
    import torch

    x = torch.arange(count, device="cuda", dtype=torch.float32) % 97 + comm.rank
    wanted = 2 * (torch.arange(count, device="cuda", dtype=torch.float32) % 97) + 1
    for _ in range(5):  # through windows first, then in place
        y = comm.all_reduce(x.clone())
        comm.synchronize(60)
        if not bool((y == wanted).all()):
            return False
    return True


@needs_torch
def test_tensors_of_processes():
    assert unisono.spawn(of_processes, 2, (3_000_001,)) == [True, True]


def beyond_four_gib(comm, torch):
    count = (4 << 30) + 12_345
    x = torch.full((count,), 1 + comm.rank, dtype=torch.uint8, device="cuda")
    comm.all_reduce(x)
    return x.min().item(), x.max().item()


@needs_torch
def test_more_than_four_gib():
    with world(2) as w:
        assert w.run(on_own_stream(beyond_four_gib)) == [(3, 3), (3, 3)]


@needs_torch
@pytest.mark.parametrize("name", ["bfloat16", "float16", "float8_e4m3fn", "complex64"])
def test_types_of_torch(name):
    def work(comm, torch):
        x = torch.ones(777, device="cuda").to(getattr(torch, name))
        gathered = comm.all_gather(x)
        reduced = comm.all_reduce(x.clone())
        return gathered.numel(), reduced.cpu().to(torch.complex64).numpy()

    with world(2) as w:
        for numel, found in w.run(on_own_stream(work)):
            assert numel == 2 * 777
            assert (found == 2).all()


@needs_cupy
def test_arrays_of_cupy():
    import cupy

    def work(comm):
        with cupy.cuda.Stream(non_blocking=True) as stream:
            x = cupy.arange(100, dtype=cupy.float64) * (comm.rank + 1)
            comm.all_reduce(x)
            gathered = comm.all_gather(x)
            stream.synchronize()
            return cupy.asnumpy(x), gathered.shape

    with world(2) as w:
        for found, shape in w.run(work):
            assert np.array_equal(found, np.arange(100) * 3.0)
            assert shape == (200,)


@needs_jax
def test_arrays_of_jax_are_inputs():
    assert unisono.spawn(gathered_of_jax, 2) == [[0.0, 1.0], [0.0, 1.0]]


def gathered_of_jax(comm):
    import os

    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    import jax.numpy as jnp

    x = jnp.full((10,), float(comm.rank)).block_until_ready()
    out = comm.empty((20,), device="cuda")
    comm.all_gather(x, out=out)
    comm.synchronize(60)
    return sorted(set(out.numpy().tolist()))


def expandable(comm):
    """Tensors of expandable segments, which torch makes of memory with descriptors."""
    import torch

    native = None
    found: list[object] = []
    for size in (1000, 3 << 20, 40 << 20, 3 << 20):
        x = torch.empty(size, device="cuda")
        begun, before, after = time.monotonic(), 0, 0
        while after == before:
            assert time.monotonic() - begun < LIMIT_S
            before = 0 if native is None else native.exposed()
            x.fill_(comm.rank + 1.0)
            comm.all_reduce(x)
            found.append(bool((x == 3).all().item()))
            native = comm.core.device.made.plane.native
            after = native.exposed()
            comm.barrier()
        found.append(
            comm.explain("all_reduce", x).split("this array: ")[1].split("\n")[0]
        )
        comm.barrier()
        del x
        torch.cuda.empty_cache()  # unmaps them
    return [one for one in found if one not in (True, "used in place by all ranks")]


@needs_torch
@pytest.mark.usefixtures("without_packets")
def test_expandable_segments_are_used_in_place(monkeypatch):
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):  # the new name too
        monkeypatch.setenv(name, "expandable_segments:True")
    assert unisono.spawn(expandable, 2) == [[], []]
