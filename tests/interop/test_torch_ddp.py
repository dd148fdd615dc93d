"""DistributedDataParallel on our ranks: the weights that one process would get."""

import copy

import pytest
import torch
import torch.distributed as dist
from models import Mlp, all_batches, alone, batch, loss, model, share, train
from ranks import close, group
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as Ddp

pytestmark = pytest.mark.one_in(3)

OPTIONS = {
    "plain": {},
    "small buckets": {"bucket_cap_mb": 0.0005},
    "static graph": {"static_graph": True},
    "unused parameters": {"find_unused_parameters": True},
    "views": {"gradient_as_bucket_view": True},
}


def used(kind=Mlp):
    """A model all of whose parameters are used."""
    net = model(kind)
    del net.spare
    return net


def trained(rank, name):
    with group(rank):
        net = model() if name == "unused parameters" else used()
        ddp = Ddp(net, **OPTIONS[name])
        train(ddp, share(rank.number))
        right = alone(rank.n)
        if name != "unused parameters":
            del right.spare
        close(net.parameters(), right.parameters())


@pytest.mark.cases(1)
@pytest.mark.quick(n=[2])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("n", [2, 3])
def test_ddp_weights_equal_one_process(ranks, n, name):
    ranks(n, trained, name)


def with_hook(rank, name):
    with group(rank):
        net = used()
        ddp = Ddp(net, bucket_cap_mb=0.0005)
        ddp.register_comm_hook(None, getattr(default_hooks, f"{name}_hook"))
        train(ddp, share(rank.number, 5))
        right = alone(rank.n, steps=5)
        del right.spare
        close(net.parameters(), right.parameters(), 2e-3 if "16" in name else 1e-6)


@pytest.mark.parametrize("name", ["allreduce", "fp16_compress"])
def test_comm_hooks_of_torch_work(ranks, name):
    ranks(2, with_hook, name)


def with_power(rank):
    """All ranks have the same data, so that one alone gets the same."""
    with group(rank):
        net = used()
        # One bucket: calls that a hook makes would race with those of the next one.
        ddp = Ddp(net)
        state = power.PowerSGDState(None, 1, start_powerSGD_iter=2)
        ddp.register_comm_hook(state, power.powerSGD_hook)
        train(ddp, share(0, 6))
        return [p.tolist() for p in net.parameters()]


def test_power_sgd_hook_equals_one_process(ranks):
    first, second = ranks(2, with_power)
    assert first == second
    (single,) = ranks(1, with_power)
    close(map(torch.tensor, first), map(torch.tensor, single), 1e-5)


def bf16_hook(rank):
    """torch offers its own only on NCCL; this does the same."""

    def hook(_, bucket):
        small = bucket.buffer().to(torch.bfloat16).div_(rank.n)
        future = dist.all_reduce(small, async_op=True).get_future()
        return future.then(lambda f: bucket.buffer().copy_(f.value()[0]))

    with group(rank):
        net = used()
        ddp = Ddp(net)
        ddp.register_comm_hook(None, hook)
        train(ddp, share(rank.number))
        right = alone(rank.n)
        del right.spare
        close(net.parameters(), right.parameters(), 1e-2)


def test_custom_comm_hook_works(ranks):
    ranks(2, bf16_hook)


def accumulated(rank):
    with group(rank):
        net = used()
        ddp = Ddp(net)
        with ddp.no_sync():
            loss(ddp(batch(0, rank.number)[0]), batch(0, rank.number)[1]).backward()
        loss(ddp(batch(1, rank.number)[0]), batch(1, rank.number)[1]).backward()
        right = used()
        for step in (0, 1):
            x, wanted = all_batches(step, rank.n)
            loss(right(x), wanted).backward()
        close([p.grad for p in net.parameters()], [p.grad for p in right.parameters()])


def test_no_sync_accumulates_gradients(ranks):
    ranks(2, accumulated)


def joined(rank):
    """Rank r has r + 2 batches."""
    with group(rank):
        net = used()
        ddp = Ddp(net, bucket_cap_mb=0.0005)
        with Join([ddp]):
            train(ddp, share(rank.number, rank.number + 2))
        return [p.tolist() for p in net.parameters()]


def test_join_with_uneven_inputs_gives_equal_weights(ranks):
    weights = ranks(3, joined)
    assert weights[0] == weights[1] == weights[2]


def zero(rank):
    with group(rank):
        net, right = used(), used()
        ddp = Ddp(net)
        optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.Adam, lr=0.01)
        train(ddp, share(rank.number), optimizer)
        shares = [all_batches(step, rank.n) for step in range(3)]
        train(right, shares, torch.optim.Adam(right.parameters(), lr=0.01))
        close(net.parameters(), right.parameters(), 1e-5)
        optimizer.consolidate_state_dict(0)


@pytest.mark.quick(n=[3])
@pytest.mark.parametrize("n", [2, 3])
def test_zero_redundancy_optimizer_equals_one_process(ranks, n):
    ranks(n, zero)


def buffers(rank):
    """Buffers follow rank 0, and the logger knows us."""
    with group(rank):
        net = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4))
        ddp = Ddp(net)
        train(ddp, share(rank.number))
        ddp(batch(0, rank.number)[0])
        mean = net[1].running_mean.clone()
        net.eval()
        dist.broadcast(mean, 0)
        assert ddp._get_ddp_logging_data()["backend_name"] == "unisono"


def test_buffers_follow_rank_0(ranks):
    ranks(2, buffers)


def compiled(rank):
    with group(rank):
        net = used()
        ddp = torch.compile(Ddp(copy.deepcopy(net)), backend="aot_eager")
        train(ddp, share(rank.number))
        right = alone(rank.n)
        del right.spare
        close(ddp.parameters(), right.parameters())


@pytest.mark.sweep
def test_compiled_ddp_equals_plain_ddp(ranks):
    ranks(2, compiled)
