"""What torch's users see when a rank dies, or calls something else."""

import os
import signal

import pytest
import torch
import torch.distributed as dist
from ranks import expect, group
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from forked import attempt
from unisono.errors import PeerLost


class Dies(torch.autograd.Function):
    """A rank that is killed in the middle of its backward pass."""

    @staticmethod
    def forward(ctx, x, armed):
        ctx.armed = armed
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.armed[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return grad, None


def model(armed=None):
    first, last = nn.Linear(50, 400), nn.Linear(400, 50)

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = first, last

        def forward(self, x):
            x = self.first(x)
            return self.last(x if armed is None else Dies.apply(x, armed))

    torch.manual_seed(1)
    return Two()


def killed_in_backward(rank, hook):
    armed = [False]
    with group(rank):
        ddp = DistributedDataParallel(model(armed), bucket_cap_mb=0.05)
        if hook:
            from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

            ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
        for step in range(3):
            armed[0] = rank.number == 1 and step == 2
            # who is slow hears of it while it is still in the step before
            if result := attempt(lambda: ddp(torch.ones(4, 50)).sum().backward()):
                return result
        return None


@pytest.mark.parametrize("hook", [False, True])
def test_rank_killed_in_backward_is_named(forks, hook):
    ends = forks.run(3, killed_in_backward, hook)
    assert ends[1].status == -signal.SIGKILL
    for end in (ends[0], ends[2]):
        assert end.status == 0, end.stderr
        result = end.value
        assert "PeerLost" in result["message"] + result["error"], result
        assert "rank 1" in result["message"]


def killed_in(rank, what):
    with group(rank):
        early = attempt(dist.barrier)  # who is slow may hear of it in here
        if rank.number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        x = torch.ones(1000)
        result = attempt(CALLS[what], x)
        later = attempt(dist.all_reduce, x)
        return [result, later, *([early] if early else [])]


CALLS = {
    "all_reduce": lambda x: dist.all_reduce(x),
    "async": lambda x: dist.all_reduce(x, async_op=True).wait(),
    "future": lambda x: dist.all_reduce(x, async_op=True).get_future().wait(),
    "recv": lambda x: dist.recv(x, 1),
    "barrier": lambda x: dist.barrier(),
    "objects": lambda x: dist.all_gather_object([None] * 3, "x"),
}


@pytest.mark.parametrize("what", CALLS)
def test_killed_rank_is_named(forks, what):
    ends = forks.run(3, killed_in, what)
    for end in (ends[0], ends[2]):
        assert end.status == 0, end.stderr
        for result in end.value:
            assert "PeerLost" in result["message"] + result["error"], result
            assert "rank 1" in result["message"]


def errors_have_both_types(rank):
    with group(rank):
        dist.barrier()
        if rank.number == 1:
            os._exit(0)
        with pytest.raises(dist.DistBackendError) as result:
            dist.all_reduce(torch.ones(3))
        assert isinstance(result.value, PeerLost)
        assert result.value.ranks == (1,)
        return True


def test_errors_are_of_torch_and_unisono_types(forks):
    assert forks.run(2, errors_have_both_types)[0].value is True


def mismatched(rank, what):
    """The error of every rank when rank 1 calls something else."""
    with group(rank):
        odd = rank.number == 1
        x = torch.ones(5)
        if what == "size":
            return attempt(dist.all_reduce, torch.ones(6 if odd else 5))
        if what == "type":
            return attempt(dist.all_reduce, x.double() if odd else x)
        if what == "operation":
            op = dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM
            return attempt(dist.all_reduce, x, op)
        if what == "root":
            return attempt(dist.broadcast, x, 1 if odd else 0)
        assert what == "collective"
        return attempt(dist.broadcast if odd else dist.reduce, x, 0)


@pytest.mark.parametrize("what", ["size", "type", "operation", "root", "collective"])
def test_different_calls_raise_mismatch(ranks, what):
    for result in ranks(3, mismatched, what):
        assert result["error"] == "CollectiveMismatch"
        assert "rank 1" in result["message"]


def uneven_models(rank):
    with group(rank):
        ddp = DistributedDataParallel(model())
        ddp(torch.ones(4, 50)).sum().backward()
        # One rank's gradients are all-reduced, the other calls something of its own.
        if rank.number == 1:
            return attempt(dist.all_reduce, torch.ones(3))
        return attempt(lambda: ddp(torch.ones(4, 50)).sum().backward())


def test_mismatch_in_backward_is_raised(ranks):
    for result in ranks(2, uneven_models):
        assert "CollectiveMismatch" in result["message"] + result["error"]


def in_detail(rank):
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    dist.set_debug_level_from_env()
    with group(rank):
        ddp = DistributedDataParallel(model())
        ddp(torch.full((4, 50), float(rank.number))).sum().backward()
        first = [p.grad.clone() for p in ddp.parameters()]
        for mine in first:
            other = mine.clone()
            dist.broadcast(other, 0)
            expect(mine, other)
        outs = [torch.empty(3) for _ in range(rank.n)]
        dist.all_gather(outs, torch.ones(3))


def test_debug_level_detail_works(ranks):
    ranks(2, in_detail)
