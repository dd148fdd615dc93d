"""The torch backend on one GPU where NCCL is the engine, so with one rank."""

import os

import pytest
import torch
import torch.distributed as dist
from gpu_ranks import gpu_group, n, needs_gpu

pytestmark = needs_gpu


def whole(count=1000):
    return torch.arange(count, dtype=torch.float32, device="cuda")


def called(rank, which):
    os.environ["UNISONO_CUDA_ENGINE"] = "nccl"
    with gpu_group(rank, adapter=which):
        x, out = whole(), torch.zeros(1000, device="cuda")
        dist.all_reduce(x)
        dist.all_reduce(x, op=dist.ReduceOp.MAX, async_op=True).wait()
        dist.broadcast(x, 0)
        dist.all_gather_into_tensor(out, x)
        dist.reduce_scatter_tensor(x, out)
        dist.all_to_all_single(out, x, async_op=True).wait()
        assert torch.equal(out, whole())
        for dtype in (torch.bfloat16, torch.int16, torch.bool, torch.complex64):
            y = torch.ones(33, dtype=dtype, device="cuda")
            dist.all_reduce(y)
            dist.broadcast(y, 0)
            assert bool((y == 1).all())
        bits = torch.full((33,), 5, dtype=torch.int32, device="cuda")
        dist.all_reduce(bits, op=dist.ReduceOp.BAND)  # by the kernel
        assert bool((bits == 5).all())


@pytest.mark.parametrize("which", ["python", "compiled"])
def test_calls_of_one_rank(ranks, which):
    if which == "compiled":
        from unisono.interop.torch import compiled

        compiled.build()
    ranks(1, called, which)


def told(rank):
    os.environ["UNISONO_CUDA_ENGINE"] = "nccl"
    with gpu_group(rank) as world:
        x = whole()
        dist.all_reduce(x)
        comm = world._calls.rendezvous.communicator()
        comm.synchronize(60)
        return comm.engine, comm.explain("all_reduce", x), comm.records()[-1]


def test_engine_is_nccl(ranks):
    ((engine, text, record),) = ranks(1, told)
    assert engine == "nccl"
    assert "engine     NCCL 2." in text
    assert record["algorithm"] == "nccl"


def graphed(rank):
    os.environ["UNISONO_CUDA_ENGINE"] = "nccl"
    with gpu_group(rank):
        x, out = whole(), torch.zeros(1000, device="cuda")
        dist.all_gather_into_tensor(out, x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            dist.all_gather_into_tensor(out, x)
            out += 1
        for step in range(3):
            x.fill_(step)
            graph.replay()
            assert bool((out == step + 1).all())


def test_call_in_a_graph(ranks):
    ranks(1, graphed)


def refused(rank):
    os.environ["UNISONO_CUDA_ENGINE"] = "nccl"
    with gpu_group(rank):
        try:
            dist.all_reduce(whole())
        except RuntimeError as error:
            return str(error)
    return ""


def test_ranks_that_share_the_gpu_are_refused_in_words(ranks):
    for text in ranks(n, refused):
        assert "ranks 0 and 1 use the same GPU" in text
        assert "engine='unisono'" in text
