"""Memory of every strategy against its formula, in bytes that live tensors occupy."""

import ctypes
import gc
import mmap

import pytest
import torch
import torch._dynamo  # optimizers import it; here, once for all ranks
from torch import nn

from unisono.parallel import DDP, FSDP, ZeRO

N, LAYERS, WIDTH = 2, 12, 128
LAYER = 4 * WIDTH * WIDTH
P = LAYERS * LAYER
IN_FLIGHT = 2 * LAYER
"""A layer is a bucket, or a unit; two of them may be under way at a time."""
FORMULAS = {
    "ddp": P + P + 2 * P,
    "zero1": P + (P + P / N) + 2 * P / N,
    "zero2": P + P / N + 2 * P / N + IN_FLIGHT,
    "zero3": 4 * P / N + IN_FLIGHT,
    "fsdp": 4 * P / N + IN_FLIGHT,
}
"""Parameters, gradients, Adam's two moments, and what they travel in."""


class Net(nn.Module):
    """Layers of one size; `marks` are called as backward passes each of them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)
        )
        self.marks = []

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            x.register_hook(self._passed)
        return x

    def _passed(self, _):
        for mark in self.marks:
            mark()


def resident(storage):
    """Bytes of a storage that are in memory: what was given back does not count."""
    page = mmap.PAGESIZE
    begin = storage.data_ptr() // page * page
    size = storage.data_ptr() + storage.nbytes() - begin
    pages = (ctypes.c_ubyte * -(-size // page))()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mincore(ctypes.c_void_p(begin), ctypes.c_size_t(size), pages):
        raise OSError(ctypes.get_errno(), "mincore")
    return min(storage.nbytes(), page * sum(1 for there in pages if there & 1))


def held():
    """Bytes behind all tensors that Python has made since gc.freeze()."""
    tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
    tensors += [x.grad for x in tensors if x.is_leaf and x.grad is not None]
    found = [x.untyped_storage() for x in tensors if x.layout is torch.strided]
    storages = {s.data_ptr(): s for s in found if s.nbytes()}
    return sum(resident(storage) for storage in storages.values())


def strategy(name, net, comm):
    """What is called for forward, and the optimizer."""
    adam, cap = torch.optim.AdamW, LAYER / (1 << 20)
    if name == "ddp":
        model = DDP(net, comm, bucket_cap_mb=cap)
        return model, adam(model.parameters())
    if name == "fsdp":
        model = FSDP(net, comm)
        return model, adam(model.parameters())
    stage = int(name[-1])
    return net, ZeRO(net, comm, adam, stage=stage, bucket_cap_mb=cap)


def measured(rank, name):
    """Bytes after a step, and the most that there were as backward passed a layer."""
    gc.freeze()  # what is there already is left out
    with rank.init() as comm:
        net = Net()
        model, opt = strategy(name, net, comm)
        peaks = []
        for step in range(3):
            if step == 2:
                net.marks.append(lambda: peaks.append(held()))
            opt.zero_grad()
            model(torch.ones(1, WIDTH)).sum().backward()
            opt.step()
        return held(), max(peaks)


@pytest.mark.parametrize("name", FORMULAS)
def test_live_tensors_have_the_memory_of_the_formula(processes, name):
    gathered = 2 * LAYER if name in ("zero3", "fsdp") else 0
    for after, peak in processes(N, measured, name):
        assert after == pytest.approx(FORMULAS[name], rel=0.05)
        # As backward goes on, shards of gradients come to replace those of before;
        # sharded parameters are whole in the unit at work and the next.
        assert peak <= 1.05 * (FORMULAS[name] + gathered)
