"""Sharded models on our ranks: FSDP, tensor and sequence parallelism, checkpoints."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from models import Mlp, all_batches, alone, model, share, train
from ranks import close, group
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

pytestmark = pytest.mark.one_in(3)

LAYERS = ("a", "b", "c")


class Plain(Mlp):
    def __init__(self):
        super().__init__()
        del self.spare


def sharded(net, **options):
    for name in LAYERS:
        fully_shard(getattr(net, name), **options)
    return fully_shard(net, **options)


def full(net):
    return [p.full_tensor() if isinstance(p, DTensor) else p for p in net.parameters()]


def plain_fsdp(rank, how):
    with group(rank):
        net = model(Plain)
        options = {}
        if how == "hybrid":
            names = ("copies", "shards")
            options["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        if how == "mixed":
            options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        sharded(net, **options)
        if how == "prefetch":
            net.a.set_modules_to_forward_prefetch([net.b, net.c])
            net.c.set_modules_to_backward_prefetch([net.b, net.a])
        if how == "factor":
            for module in (net, net.a, net.b, net.c):
                module.set_gradient_divide_factor(float(rank.n))
        train(net, share(rank.number))
        limit = 2e-2 if how == "mixed" else 1e-6
        close(full(net), alone(rank.n, Plain).parameters(), limit)


@pytest.mark.quick(n=[2])
@pytest.mark.parametrize(
    ("how", "n"),
    [("plain", 2), ("plain", 3), ("mixed", 2), ("prefetch", 2), ("factor", 2)],
)
def test_fully_shard_equals_one_process(ranks, how, n):
    ranks(n, plain_fsdp, how)


def test_hybrid_sharding_equals_one_process(ranks):
    ranks(4, plain_fsdp, "hybrid")


def first_fsdp(rank, strategy):
    from torch.distributed.fsdp import ShardingStrategy

    with group(rank):
        net = Fsdp(
            model(Plain),
            device_id=torch.device("cpu"),
            sharding_strategy=ShardingStrategy[strategy],
            use_orig_params=True,
        )
        train(net, share(rank.number))
        with Fsdp.summon_full_params(net):
            close(net.parameters(), alone(rank.n, Plain).parameters())


@pytest.mark.quick(strategy=["FULL_SHARD"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_fsdp_1_equals_one_process(ranks, strategy):
    ranks(2, first_fsdp, strategy)


def redistributed(rank):
    with group(rank):
        mesh = init_device_mesh("cpu", (rank.n,))
        torch.manual_seed(0)
        x = torch.arange(6.0 * rank.n * rank.n).view(2 * rank.n, 3 * rank.n)
        rows = distribute_tensor(x, mesh, [Shard(0)])
        columns = rows.redistribute(mesh, [Shard(1)])
        close([columns.full_tensor(), rows.full_tensor()], [x, x])
        close([columns.redistribute(mesh, [Replicate()]).to_local()], [x])
        product = rows @ columns.redistribute(mesh, [Replicate()]).t()
        close([product.full_tensor()], [x @ x.t()])
        partial = columns @ rows.redistribute(mesh, [Shard(1)]).t()
        close([partial.full_tensor()], [x @ x.t()])
        odd = distribute_tensor(torch.arange(7.0), mesh, [Shard(0)])
        close([odd.full_tensor()], [torch.arange(7.0)])


@pytest.mark.quick(n=[3])
@pytest.mark.parametrize("n", [2, 3])
def test_dtensor_redistribution_is_correct(ranks, n):
    ranks(n, redistributed)


def tensor_parallel(rank):
    with group(rank):
        net, right = model(Plain), model(Plain)
        mesh = init_device_mesh("cpu", (rank.n,))
        plan = {"a": ColwiseParallel(), "b": RowwiseParallel()}
        parallelize_module(net, mesh, plan)
        shares = [all_batches(step, 1) for step in range(3)]  # the same on all ranks
        train(net, shares)
        train(right, shares)
        close(full(net), right.parameters())


def test_tensor_parallel_equals_one_process(ranks):
    ranks(2, tensor_parallel)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(torch.relu(self.up(self.norm(x))))


def sequence_parallel(rank):
    with group(rank):
        net, right = model(Normed), model(Normed)
        mesh = init_device_mesh("cpu", (rank.n,))
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        }
        parallelize_module(net, mesh, plan)
        x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(3))
        mine = x.chunk(rank.n, 1)[rank.number]
        close([net(mine).full_tensor()], [right(x)])
        net(mine).full_tensor().sum().backward()
        right(x).sum().backward()
        close([net.up.weight.grad.full_tensor()], [right.up.weight.grad], 1e-5)


def test_sequence_parallel_equals_one_process(ranks):
    ranks(2, sequence_parallel)


def two_dimensions(rank):
    """Tensor parallel within rows of the mesh, sharded across them."""
    with group(rank):
        net = model(Plain)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        plan = {"a": ColwiseParallel(), "b": RowwiseParallel()}
        parallelize_module(net, mesh["tensor"], plan)
        sharded(net, mesh=mesh["data"])
        train(net, share(mesh["data"].get_local_rank()))
        close(full(net), alone(2, Plain).parameters())


def test_tensor_parallel_and_fsdp_on_a_mesh_equal_one_process(ranks):
    ranks(4, two_dimensions)


def saved(rank, asynchronous):
    where = os.path.join(os.environ["UNISONO_TEST_STORES"], f"{rank.job}-checkpoint")
    with group(rank):
        net = sharded(model(Plain))
        train(net, share(rank.number))
        state = {"model": get_model_state_dict(net)}
        if asynchronous:
            aside = dist.new_group(backend="unisono")
            options = {"checkpoint_id": where, "process_group": aside}
            checkpoint.async_save(state, **options).result()
        else:
            checkpoint.save(state, checkpoint_id=where)
        dist.barrier()
        fresh = sharded(model(Plain))
        target = {"model": get_model_state_dict(fresh)}
        checkpoint.load(target, checkpoint_id=where)
        close(full(fresh), full(net), 0)


@pytest.mark.quick(asynchronous=[False])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_distributed_checkpoints_save_and_load(ranks, asynchronous):
    ranks(2, saved, asynchronous)
