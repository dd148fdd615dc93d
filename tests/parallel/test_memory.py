"""Memory of every strategy against its formula: of live tensors, and of all pages."""

import ctypes
import gc
import mmap
from pathlib import Path

import pytest
import torch
import torch._dynamo  # optimizers import it; here, once for all ranks
from torch import nn

from unisono.parallel import DDP, FSDP, ParameterServer, PlainDDP, ZeRO

N, LAYERS, WIDTH = 2, 12, 128
P = LAYERS
IN_FLIGHT = 2
"""In layers. One is a bucket, or a unit; two of them may be under way at a time."""
FORMULAS = {
    "plain": P + P + 2 * P,
    "ddp": P + P + 2 * P,
    "zero1": P + (P + P / N) + 2 * P / N,
    "zero2": P + P / N + 2 * P / N + IN_FLIGHT,
    "zero3": 4 * P / N + IN_FLIGHT,
    "fsdp": 4 * P / N + IN_FLIGHT,
    "server": P + P + 2 * P,
    "2 servers": P + P + 2 * P / N,
}
"""Parameters, gradients, Adam's two moments, and what they travel in."""


def formula(name, rank):
    """Layers that a rank keeps after a step; one that does not serve has no moments."""
    return FORMULAS[name] - (2 * P if name == "server" and rank else 0)


class Net(nn.Module):
    """Layers of one size; `marks` are called as backward passes each of them."""

    def __init__(self, width):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(width, width, bias=False) for _ in range(LAYERS)
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


class Synced:
    """A PlainDDP's optimizer: averages, then steps."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.zero_grad = optimizer.zero_grad

    def step(self):
        self.model.sync()
        self.optimizer.step()


def strategy(name, net, comm, layer):
    """What is called for forward, and the optimizer."""
    adam, cap = torch.optim.AdamW, layer / (1 << 20)
    if name.endswith(("server", "servers")):
        return net, ParameterServer(net, comm, adam, servers=int(name[0] == "2") + 1)
    if name.startswith("zero"):
        stage = int(name[-1])
        return net, ZeRO(net, comm, adam, stage=stage, bucket_cap_mb=cap)
    if name == "plain":
        model = PlainDDP(net, comm)
        return model, Synced(model, adam(model.parameters()))
    model = DDP(net, comm, bucket_cap_mb=cap) if name == "ddp" else FSDP(net, comm)
    return model, adam(model.parameters())


def measured(rank, name):
    """Bytes after a step, and the most that there were as backward passed a layer."""
    gc.freeze()  # what is there already is left out
    with rank.init() as comm:
        net = Net(WIDTH)
        model, opt = strategy(name, net, comm, 4 * WIDTH * WIDTH)
        peaks = []
        for step in range(3):
            if step == 2:
                net.marks.append(lambda: peaks.append(held()))
            opt.zero_grad()
            model(torch.ones(1, WIDTH)).sum().backward()
            opt.step()
        return held(), max(peaks)


@pytest.mark.sweep
@pytest.mark.parametrize("name", FORMULAS)
def test_live_tensors_have_the_memory_of_the_formula(processes, name):
    layer = 4 * WIDTH * WIDTH
    gathered = 2 if name in ("zero3", "fsdp") else 0
    for rank, (after, peak) in enumerate(processes(N, measured, name)):
        right = formula(name, rank)
        assert after == pytest.approx(right * layer, rel=0.05)
        # As backward goes on, shards of gradients come to replace those of before;
        # sharded parameters are whole in the unit at work and the next.
        assert peak <= 1.05 * (right + gathered) * layer


def mapped():
    """Bytes of this process that are no file's: shared ones divided by who has them.

    Not counted is what malloc keeps of memory that was freed.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    sizes = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    return 1024 * (sizes["Pss_Anon"] + sizes["Pss_Shmem"])


def pages(rank, name, width):
    """What the process has more after three steps than before it made the module."""
    torch.set_num_threads(1)
    with rank.init() as comm:
        small = Net(8)  # torch's own memory, and the communicator's
        model, opt = strategy(name, small, comm, 4 * 8 * 8)
        model(torch.ones(1, 8)).sum().backward()
        opt.step()
        comm.barrier()
        before = mapped()
        comm.barrier()
        net = Net(width)
        model, opt = strategy(name, net, comm, 4 * width * width)
        for _ in range(3):
            opt.zero_grad()
            model(torch.ones(1, width)).sum().backward()
            opt.step()
        comm.barrier()
        after = mapped()
        comm.barrier()
        return after - before


@pytest.mark.sweep
@pytest.mark.parametrize("name", FORMULAS)
def test_pages_of_all_ranks_have_the_memory_of_the_formula(processes, name):
    """Buffers of collectives, and copies that no tensor shows, count here too."""
    width = 1024
    right = sum(formula(name, rank) for rank in range(N)) * 4 * width * width
    assert sum(processes(N, pages, name, width)) == pytest.approx(right, rel=0.05)
