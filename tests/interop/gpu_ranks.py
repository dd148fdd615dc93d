"""What the tests of torch on a GPU have in common: two ranks that share it."""

import contextlib
import os

import pytest
import torch
import torch.distributed as dist
from ranks import group

ON_GPU = os.environ.get("UNISONO_GPU_TESTS") == "1"
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="there is no GPU")
n = 2


@contextlib.contextmanager
def gpu_group(rank, backend="unisono", adapter="python", **options):
    """The group of all ranks, on one GPU."""
    os.environ["UNISONO_TORCH_ADAPTER"] = adapter
    torch.cuda.set_device(0)
    with group(rank, backend, **options) as made:
        yield made


def connect():
    """What hosts wait for happens now, and not when a test has a call in flight.

    The first call on a device connects all ranks. To load one of torch's own kernels,
    CUDA waits for those that run, so those that tests use are loaded.
    """
    x = torch.ones(1000, device="cuda")
    dist.all_reduce(x)
    x += 1
    assert (x * 2).unique().tolist() == [2 * (n + 1)]
    torch.cuda.synchronize()
