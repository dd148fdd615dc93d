"""Training on a GPU that two ranks share: what one process gets on the CPU."""

import os

import pytest
import torch
import torch.distributed.checkpoint as checkpoint
from gpu_ranks import gpu_group, n, needs_gpu
from models import Mlp, all_batches, alone, model, share, train
from ranks import close
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel as Ddp

pytestmark = needs_gpu
LIMIT = 1e-5  # the GPU's products are rounded in another order


class Plain(Mlp):
    def __init__(self):
        super().__init__()
        del self.spare


def on_gpu(shares):
    return [(x.cuda(), y.cuda()) for x, y in shares]


def mine(rank):
    return on_gpu(share(rank.number))


def full(net):
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in net.parameters()]
    return [p.detach().cpu() for p in whole]


def check(rank, net, limit=LIMIT):
    close(full(net), alone(rank.n, Plain).parameters(), limit)


def losses_of_one():
    return train(model(Plain), [all_batches(step, n) for step in range(3)])


def with_ddp(rank, which, hook):
    with gpu_group(rank, adapter=which):
        net = model(Plain).cuda()
        ddp = Ddp(net, device_ids=[0], bucket_cap_mb=0.0005)
        if hook:
            ddp.register_comm_hook(None, getattr(default_hooks, hook))
        losses = train(ddp, mine(rank))
        check(rank, net, 2e-3 if hook else LIMIT)
        return losses


@pytest.mark.parametrize("hook", ["", "fp16_compress_hook"])
def test_ddp(ranks, either_adapter, hook):
    first, second = ranks(n, with_ddp, either_adapter, hook)
    means = torch.tensor([first, second]).mean(0)
    wanted = torch.tensor(losses_of_one())
    close([means], [wanted], 2e-3 if hook else LIMIT)


def sharded(net, **options):
    for name in ("a", "b", "c"):
        fully_shard(getattr(net, name), **options)
    return fully_shard(net, **options)


def with_fsdp(rank, which, how):
    with gpu_group(rank, adapter=which):
        options = {}
        if how == "mixed":
            options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        if how == "offload":
            options["offload_policy"] = CPUOffloadPolicy()
        net = model(Plain)
        net = sharded(net if how == "offload" else net.cuda(), **options)
        if how == "prefetch":
            net.a.set_modules_to_forward_prefetch([net.b, net.c])
            net.c.set_modules_to_backward_prefetch([net.b, net.a])
        if how == "memory":
            for module in (net, net.a, net.b, net.c):
                module.set_allocate_memory_from_process_group_for_comm(True)
        if how == "factor":
            for module in (net, net.a, net.b, net.c):
                module.set_gradient_divide_factor(float(n))
        train(net, mine(rank))
        if how == "offload":
            kept = [p.to_local().detach() for p in net.parameters()]
            assert all(p.is_cpu for p in kept)
            right = alone(n, Plain).parameters()
            close(kept, [p.detach().chunk(n)[rank.number] for p in right], LIMIT)
            return
        check(rank, net, 2e-2 if how == "mixed" else LIMIT)


@pytest.mark.parametrize(
    "how", ["plain", "mixed", "prefetch", "factor", "offload", "memory"]
)
def test_fully_shard(ranks, either_adapter, how):
    ranks(n, with_fsdp, either_adapter, how)


def first_fsdp(rank):
    with gpu_group(rank):
        net = Fsdp(model(Plain).cuda(), device_id=0, use_orig_params=True)
        train(net, mine(rank))
        with Fsdp.summon_full_params(net):
            check(rank, net)


def test_fsdp_1(ranks):
    ranks(n, first_fsdp)


def with_zero(rank):
    with gpu_group(rank):
        net = model(Plain).cuda()
        ddp = Ddp(net, device_ids=[0])
        optimizer = ZeroRedundancyOptimizer(
            ddp.parameters(), optimizer_class=torch.optim.SGD, lr=0.1
        )
        train(ddp, mine(rank), optimizer)
        check(rank, net)


def test_zero_redundancy_optimizer(ranks):
    ranks(n, with_zero)


def redistributed(rank, which):
    with gpu_group(rank, adapter=which):
        mesh = init_device_mesh("cuda", (n,))
        x = torch.arange(24.0, device="cuda").view(4, 6)
        rows = distribute_tensor(x, mesh, [Shard(0)])
        columns = rows.redistribute(mesh, [Shard(1)])
        close([columns.full_tensor(), rows.full_tensor()], [x, x])
        product = rows @ columns.redistribute(mesh, [Replicate()]).t()
        close([product.full_tensor()], [x @ x.t()], 1e-4)
        net, right = model(Plain).cuda(), model(Plain).cuda()
        plan = {"a": ColwiseParallel(), "b": RowwiseParallel()}
        parallelize_module(net, mesh, plan)
        shares = on_gpu([all_batches(step, 1) for step in range(3)])
        for some in (net, right):  # some of its parameters are DTensors, others not
            one_by_one = torch.optim.SGD(some.parameters(), lr=0.1, foreach=False)
            train(some, shares, one_by_one)
        close(full(net), full(right), LIMIT)


def test_dtensor_and_tensor_parallel(ranks, either_adapter):
    ranks(n, redistributed, either_adapter)


def saved(rank):
    where = os.path.join(os.environ["UNISONO_TEST_STORES"], f"{rank.job}-checkpoint")
    with gpu_group(rank):
        net = sharded(model(Plain).cuda())
        train(net, mine(rank))
        checkpoint.save({"model": get_model_state_dict(net)}, checkpoint_id=where)
        fresh = sharded(model(Plain).cuda())
        target = {"model": get_model_state_dict(fresh)}
        checkpoint.load(target, checkpoint_id=where)
        close(full(fresh), full(net), 0)


def test_distributed_checkpoint(ranks):
    ranks(n, saved)


def captured_step(rank):
    """A whole step in a CUDA graph, with the sums of its gradients by hand."""
    import torch.distributed as dist

    with gpu_group(rank):
        net, right = model(Plain).cuda(), model(Plain).cuda()
        x, wanted = mine(rank)[0]

        def step(some):
            loss = ((some(x) - wanted) ** 2).mean()
            grads = torch.autograd.grad(loss, list(some.parameters()))
            works = [
                dist.all_reduce(grad, dist.ReduceOp.AVG, async_op=True)
                for grad in grads
            ]
            with torch.no_grad():
                for p, grad, work in zip(some.parameters(), grads, works, strict=True):
                    work.wait()
                    p.sub_(grad, alpha=0.1)

        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            step(model(Plain).cuda())  # ranks connect, and libraries begin
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step(net)
        for _ in range(3):
            graph.replay()
            step(right)
        torch.cuda.synchronize()
        close(full(net), full(right), 1e-6)


def test_graph_of_a_training_step(ranks):
    ranks(n, captured_step)
