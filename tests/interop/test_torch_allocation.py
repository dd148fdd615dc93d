"""Tensors that torch asks the backend for: shared by ranks, and given back."""

import gc
import os
from weakref import ref

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch._dynamo")  # which DDP imports when it is first called

import torch.distributed as dist  # noqa: E402
from adapter_cache import CACHE  # noqa: E402
from models import Mlp, alone, model, share, train  # noqa: E402
from ranks import close, group  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

from unisono.interop.torch.allocation import SharedBlocks  # noqa: E402

PAGE = 4096


class Plain(Mlp):
    def __init__(self):
        super().__init__()
        del self.spare


def sharded(*, shared):
    net = model(Plain)
    for part in (net.a, net.b, net.c, net):
        fully_shard(part)
        part.set_allocate_memory_from_process_group_for_comm(shared)
    return net


def trained(rank, adapter):
    """FSDP2 with torch's own buffers and with ours."""
    with group(rank) as world:
        backend = world._get_backend(torch.device("cpu"))
        assert backend.supports_tensor_alloc(torch.device("cpu"))
        before = train(sharded(shared=False), share(rank.number))
        made = []
        if adapter == "python":  # else there is no method of Python's to look into
            tensors = world._calls.tensors
            original = tensors.make
            tensors.make = lambda *what: made.append(what) or original(*what)
        net = sharded(shared=True)
        losses = train(net, share(rank.number))
        close(
            [p.full_tensor() for p in net.parameters()],
            alone(rank.n, Plain).parameters(),
        )
        return before == losses, len(made)


@pytest.mark.parametrize("n", [2, 3])
def test_fsdp2_with_memory_of_the_group_has_the_same_losses(ranks, n):
    for same, made in ranks(n, trained, "python"):
        assert same
        assert made > 10


def with_compiled(rank, cache):
    """The same by the other adapter."""
    os.environ.update(XDG_CACHE_HOME=cache, UNISONO_TORCH_ADAPTER="compiled")
    allocated(rank)
    return trained(rank, "compiled")[0]


@pytest.mark.sweep
def test_memory_by_the_compiled_adapter(ranks, built):
    assert ranks(2, with_compiled, str(CACHE)) == [True, True]


def allocated(rank):
    with group(rank) as world:
        cpu = torch.device("cpu")
        backend = world._get_backend(cpu)
        for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.complex64):
            x = backend.allocate_tensor(1000, dtype=dtype, device=cpu)
            assert (x.dtype, tuple(x.shape)) == (dtype, (1000,))
            x.fill_(rank.number)
            dist.broadcast(x, 1)
            assert bool((x == 1).all())
        empty = backend.allocate_tensor(0, dtype=torch.float32, device=cpu)
        assert empty.numel() == 0
        part = x[10:20]
        del x
        gc.collect()
        assert bool((part == 1).all())  # a part keeps the memory
        assert not backend.supports_tensor_alloc(torch.device("cuda", 0))
        with pytest.raises(RuntimeError, match="not cuda:0"):
            backend.allocate_tensor(
                1, dtype=torch.float32, device=torch.device("cuda", 0)
            )
        with pytest.raises(RuntimeError, match=r"torch.cuda.MemPool\(\) without one"):
            _ = backend.mem_allocator


def test_tensors_of_every_kind_are_shared(ranks):
    ranks(2, allocated)


def returned(rank):
    with group(rank) as world:
        tensors = world._calls.tensors
        blocks = tensors._blocks
        cpu = torch.device("cpu")
        x = world.allocate_tensor(5 * PAGE, dtype=torch.uint8, device=cpu)
        address, used = x.data_ptr(), blocks.used
        y = x.view(torch.float32)
        del x
        held = blocks.used
        del y
        gc.collect()
        left, kept = blocks.used, blocks.kept
        again = world.allocate_tensor(5 * PAGE, dtype=torch.uint8, device=cpu)
        same = again.data_ptr() == address
    after = blocks.kept
    del again
    gc.collect()
    return used, held, left, kept, same, after, blocks.kept


def test_memory_comes_back_with_the_last_tensor_and_is_used_again(ranks):
    size = 5 * PAGE
    for found in ranks(2, returned):
        assert found == [size, size, 0, size, True, 0, 0]


def test_no_more_is_kept_than_was_in_use():
    made = []

    def make(size):
        block = np.empty(size, np.uint8)
        made.append(ref(block))
        return block

    blocks = SharedBlocks(make)
    one, two = blocks.take(PAGE), blocks.take(1)
    assert (one.nbytes, two.nbytes) == (PAGE, 1)
    assert (blocks.used, blocks.most_used) == (2 * PAGE, 2 * PAGE)
    del one, two
    assert (blocks.used, blocks.kept) == (0, 2 * PAGE)
    three = blocks.take(2 * PAGE)  # no block is so large: those are dropped
    assert [block() is None for block in made] == [True, True, False]
    assert (blocks.used, blocks.kept) == (2 * PAGE, 0)
    del three
    blocks.clear()
    assert made[2]() is None
