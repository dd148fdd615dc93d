"""Training between hosts, on a GPU that all ranks share: kernels loaded late or early.

CUDA waits for all streams when it loads a kernel, at its first launch or, if it is to
load all at the start (CUDA_MODULE_LOADING=EAGER), when a library is opened.
"""

import ctypes
import os

import pytest
import torch
from gpu_ranks import needs_gpu
from models import all_batches, model, train
from ranks import close
from test_torch_cuda_training import LIMIT, Plain, with_ddp, with_fsdp

pytestmark = needs_gpu
loadings = pytest.mark.parametrize("loading", ["LAZY", "EAGER"])
MODES = {"EAGER": 1, "LAZY": 2}


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
