"""Tensors that are registered: kept, released, and used by DDP."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from models import Mlp, alone, model, share, train
from ranks import close, group
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as Ddp

from unisono.errors import BadArgument
from unisono.interop.torch import register_buckets, register_gradients
from unisono.interop.torch.registering import communicator_of
from unisono.runtime.call.registered import MemoryHome

COUNT = 20_000


def home(comm, x):
    return comm.core.session.engine.memory_home(x.data_ptr(), x.nbytes)


def is_shared(at, nbytes):
    """Whether any of this memory is shared with other processes."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, access, *_ = line.split()
        begin, end = (int(limit, 16) for limit in place.split("-"))
        if access[3] == "s" and begin < at + nbytes and at < end:
            return True
    return False


def kept_and_released(rank):
    """What only its registration holds ends with the next."""
    comm = rank.init()
    engine = comm.core.session.engine
    x = torch.arange(COUNT, dtype=torch.float32)
    assert comm.register(x).in_place
    place = x.data_ptr(), x.nbytes
    comm.all_reduce(x)
    assert torch.equal(x, rank.n * torch.arange(COUNT, dtype=torch.float32))
    part = x[7:].detach()
    del x
    comm.register(np.ones(COUNT))
    assert engine.memory_home(*place) == MemoryHome.REGISTERED
    del part
    comm.register(np.ones(COUNT))
    assert engine.memory_home(*place) == MemoryHome.PRIVATE
    y = torch.ones(COUNT)
    comm.register(y)
    place = y.data_ptr(), y.nbytes
    y.untyped_storage().resize_(64 * COUNT)  # its memory is another now
    assert y.data_ptr() != place[0]
    comm.register(np.ones(COUNT))
    assert engine.memory_home(*place) == MemoryHome.PRIVATE
    assert not is_shared(*place)
    z = torch.ones(COUNT)
    assert comm.register(z.numpy()).in_place
    comm.all_reduce(z)
    assert (z == rank.n).all()
    comm.barrier()
    comm.close()
    assert (z == rank.n).all()


def test_tensor_is_kept_until_nobody_else_holds_it(ranks):
    ranks(2, kept_and_released)


def gradients(rank):
    with group(rank) as own:
        net = torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.Linear(200, 1))
        net[1].bias.requires_grad_(False)
        found = register_gradients(net)
        assert list(found) == ["0.weight", "0.bias", "1.weight"]
        assert [one.in_place for one in found.values()] == [True, False, False]
        assert "are staged" in found["0.bias"].why
        weight = net[0].weight
        net(torch.ones(2, 300)).sum().backward()
        assert home(communicator_of(), weight.grad) == MemoryHome.REGISTERED
        mine = weight.grad.clone()
        dist.all_reduce(weight.grad, group=own)
        others = [torch.empty_like(mine) for _ in range(rank.n)]
        dist.all_gather(others, mine)
        close([weight.grad], [sum(others)])
        torch.optim.SGD(net.parameters(), 0.1).zero_grad(set_to_none=False)
        assert home(communicator_of(), weight.grad) == MemoryHome.REGISTERED


def test_gradients_of_a_model_are_registered_by_one_call(ranks):
    ranks(2, gradients)


def wide():
    """Large enough that its bucket is used in place."""
    return Mlp(128)


def buckets(rank, name):
    with group(rank):
        seen = []
        net = model(wide)
        del net.spare
        ddp = Ddp(net, gradient_as_bucket_view=name == "views")

        def hook(state, bucket):
            seen.append(home(communicator_of(), bucket.buffer()))
            return default_hooks.allreduce_hook(state, bucket)

        register_buckets(ddp, hook if name == "hook" else None)
        train(ddp, share(rank.number))
        right = alone(rank.n, wide)
        del right.spare
        close(net.parameters(), right.parameters())
        if name == "views":
            comm = communicator_of()
            seen = [home(comm, parameter.grad) for parameter in net.parameters()]
        return seen


@pytest.mark.parametrize("name", ["plain", "hook", "views"])
def test_buckets_of_ddp_are_registered(ranks, name):
    for seen in ranks(2, buckets, name):
        assert bool(seen) == (name != "plain")
        assert set(seen) <= {MemoryHome.REGISTERED}


def not_ours(rank):
    with group(rank, "gloo"), pytest.raises(BadArgument, match="not a group of the"):
        register_gradients(torch.nn.Linear(2, 2))


def test_group_of_another_backend_is_refused(ranks):
    ranks(1, not_ours)
