"""What torch's users see when a rank dies, or calls something else."""

import os
import signal
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from adapter_cache import CACHE
from ranks import expect, group
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from forked import attempt, error_summary
from unisono.errors import CollectiveTimeout, PeerLost, UnisonoError
from unisono.interop.torch.errors import as_both, original, text_for_future

# To compile the other takes longer than all tests of this file.
pytestmark = [pytest.mark.quick(adapter=["python"]), pytest.mark.one_in(3)]


def environment(adapter, n):
    return [{"UNISONO_TORCH_ADAPTER": adapter, "XDG_CACHE_HOME": str(CACHE)}] * n


def failure(call, *args):
    """What a call raises, and whether it is of both types."""
    try:
        call(*args)
    except BaseException as error:
        both = isinstance(error, UnisonoError) and isinstance(
            error, dist.DistBackendError
        )
        return error_summary(error) | {"both": both}
    return None


def expect_peer_lost(result):
    assert result["error"] == "PeerLost", result
    assert result["both"], result
    assert "rank 1" in result["message"]
    assert result["attributes"]["ranks"] == [1]


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
            if result := failure(lambda: ddp(torch.ones(4, 50)).sum().backward()):
                return result
        return None


@pytest.mark.parametrize("hook", [False, True])
def test_rank_killed_in_backward_is_named(forks, adapter, hook):
    ends = forks.run(3, killed_in_backward, hook, env=environment(adapter, 3))
    assert ends[1].status == -signal.SIGKILL
    for end in (ends[0], ends[2]):
        assert end.status == 0, end.stderr
        expect_peer_lost(end.value)


def killed_in(rank, what):
    with group(rank):
        early = failure(dist.barrier)  # who is slow may hear of it in here
        if rank.number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        x = torch.ones(1000)
        result = failure(CALLS[what], x)
        later = failure(dist.all_reduce, x)
        return [result, later, *([early] if early else [])]


def future_of(x):
    return dist.all_reduce(x, async_op=True).get_future()


def coalesced(x):
    with dist._coalescing_manager(async_ops=True) as all_of:
        dist.all_reduce(x)
        dist.all_reduce(x)
    all_of.wait()


def batched(x):
    for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, x, 1)]):
        work.wait()


def noted(x):
    work = dist.all_reduce(x, async_op=True)
    assert failure(work.wait)
    raise work.exception()


CALLS = {
    "all_reduce": lambda x: dist.all_reduce(x),
    "async": lambda x: dist.all_reduce(x, async_op=True).wait(),
    "exception": noted,
    "future": lambda x: future_of(x).wait(),
    "then": lambda x: future_of(x).then(lambda done: done.value()[0] * 2).wait(),
    "all futures": lambda x: torch.futures.wait_all([future_of(x)]),
    "coalesced": coalesced,
    "recv": lambda x: dist.recv(x, 1),
    "irecv": lambda x: dist.irecv(x, 1).wait(),
    "batch": batched,
    "barrier": lambda x: dist.barrier(),
    "objects": lambda x: dist.all_gather_object([None] * 3, "x"),
    "functional": lambda x: functional.all_reduce(x, "sum", dist.group.WORLD) + 1,
    "DDP": lambda x: DistributedDataParallel(model()),
}


@pytest.mark.quick(
    what=["all_reduce", "future", "then", "all futures", "coalesced", "functional"]
)
@pytest.mark.parametrize("what", CALLS)
def test_killed_rank_is_named(forks, adapter, what):
    ends = forks.run(3, killed_in, what, env=environment(adapter, 3))
    for end in (ends[0], ends[2]):
        assert end.status == 0, end.stderr
        for result in end.value:
            expect_peer_lost(result)


def test_error_in_torchs_text_is_found_without_its_frames():
    lost = as_both(PeerLost("all_reduce: rank 1 died", ranks=[1]))

    class Model:
        pass

    def call():
        model = Model()
        held.append(weakref.ref(model))
        raise lost

    held = []
    with pytest.raises(PeerLost):
        call()
    text = text_for_future(lost)
    lost.__traceback__ = None
    assert held[0]() is None
    found = original(RuntimeError(f"Got an error in a callback: {text}"))
    assert found is not lost
    assert isinstance(found, PeerLost)
    assert isinstance(found, dist.DistBackendError)
    assert found.ranks == (1,)
    other = RuntimeError("of somebody else")
    assert original(other) is other


def monitored(rank):
    with group(rank) as all_ranks:
        if rank.number == 1:
            rank.until("refused", 0)
            return None
        result = failure(all_ranks.monitored_barrier, timedelta(seconds=0.01))
        rank.tell("refused")
        return result


def test_monitored_barrier_raises_a_timeout_of_both_types(ranks):
    result, _ = ranks(2, monitored)
    assert result["error"] == CollectiveTimeout.__name__
    assert result["both"]
    assert result["attributes"]["ranks"] == [1]
    assert "Rank 1 failed to pass monitoredBarrier" in result["message"]


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
            return failure(dist.all_reduce, torch.ones(3))
        return failure(lambda: ddp(torch.ones(4, 50)).sum().backward())


def test_mismatch_in_backward_is_raised(ranks):
    for result in ranks(2, uneven_models):
        assert result["error"] == "CollectiveMismatch"
        assert result["both"]


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
