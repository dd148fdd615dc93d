"""Training between hosts, on a GPU that all ranks share: kernels loaded late or early.

CUDA waits for all streams when it loads a kernel at its first launch. So with lazy
loading a caller waits until nothing is left to do for its call on the host; with all
kernels loaded at the start (CUDA_MODULE_LOADING=EAGER) streams wait, and nobody else.
"""

import ctypes
import os

import pytest
import torch
import torch.distributed as dist
from gpu_ranks import gpu_group, needs_gpu
from models import all_batches, model, train
from ranks import close
from test_torch_cuda_training import LIMIT, Plain, with_ddp, with_fsdp

pytestmark = needs_gpu
loadings = pytest.mark.parametrize("loading", ["LAZY", "EAGER"])
MODES = {"EAGER": 1, "LAZY": 2}
COUNT = 1 << 20


@pytest.fixture
def across(forks):
    """across(sizes, function, *args): what ranks on hosts of these sizes returned."""

    def run(sizes, function, *args):
        ends = forks.run(sum(sizes), function, *args, hosts=sizes)
        bad = [end for end in ends if end.status != 0]
        assert not bad, "\n".join(
            f"rank {end.rank} ended with {end.status}:\n{end.stderr}" for end in bad
        )
        return [end.value for end in ends]

    return run


def load_kernels(how):
    """Before CUDA is first used."""
    assert not torch.cuda.is_initialized()
    os.environ["CUDA_MODULE_LOADING"] = how


def check_loading(how):
    """The driver does what it was told."""
    mode = ctypes.c_int()
    driver = ctypes.CDLL("libcuda.so.1")
    assert driver.cuModuleGetLoadingMode(ctypes.byref(mode)) == 0
    assert mode.value == MODES[how]


def loaded_ddp(rank, loading):
    load_kernels(loading)
    losses = with_ddp(rank, "python", "")
    check_loading(loading)
    return losses


@loadings
@pytest.mark.parametrize("sizes", [(1, 1), (2, 1)], ids=str)
def test_ddp(across, sizes, loading):
    losses = across(sizes, loaded_ddp, loading)
    n = sum(sizes)
    one = train(model(Plain), [all_batches(step, n) for step in range(3)])
    close([torch.tensor(losses).mean(0)], [torch.tensor(one)], LIMIT)


def loaded_fsdp(rank, loading):
    load_kernels(loading)
    with_fsdp(rank, "python", "prefetch")
    check_loading(loading)


@loadings
def test_fully_shard(across, loading):
    across((1, 1), loaded_fsdp, loading)


def sums(x):
    return x.cumsum(0)


def other_kernels_behind_calls(rank, loading):
    """In each step a rank goes on to a new kernel before another makes its call."""
    load_kernels(loading)
    with gpu_group(rank):
        x = torch.full((COUNT,), rank.number + 1.0, device="cuda")
        dist.all_reduce(x.clone())  # the ranks connect
        kernels = [torch.sin, sums, torch.erf, torch.sort, torch.logit]
        for number, kernel in enumerate(kernels):
            y, first, beside = x.clone(), number % rank.n, number % 2 == 1
            if rank.number != first:
                rank.until(f"call {number}", first)
            work = dist.all_reduce(y, async_op=beside)
            if beside:
                work.wait()
            kernel(y)
            rank.tell(f"call {number}")
            assert y.unique().tolist() == [3]
    check_loading(loading)


def test_kernels_that_were_never_launched(across):
    across((1, 1), other_kernels_behind_calls, "EAGER")


def late(rank, loading):
    """Rank 1 makes its call when rank 0 has gone on from its own."""
    load_kernels(loading)
    with gpu_group(rank):
        x = torch.ones(COUNT, device="cuda")
        dist.all_reduce(x)
        torch.cuda.synchronize()
        if rank.number == 1:
            rank.until("gone on", 0)
        dist.all_reduce(x)
        y = torch.tanh(x)
        busy = not torch.cuda.current_stream().query()
        rank.tell("gone on")
        assert rank.number == 1 or busy
        assert x.unique().tolist() == [4]
        close([y], [torch.tanh(torch.full_like(x, 4))])


def test_host_does_not_wait_if_kernels_are_loaded(across):
    across((1, 1), late, "EAGER")
