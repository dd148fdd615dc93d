"""torch's calls on CUDA tensors of ranks on several hosts, by the emulated driver."""

import os

import fake_cuda
import pytest
import torch
import torch.distributed as dist
from models import Mlp, alone, model, share, train
from ranks import close, group
from test_torch_streams import coalesced, collectives, in_flight, messages, views
from torch.nn.parallel import DistributedDataParallel as Ddp

import emulated

pytestmark = pytest.mark.skipif(emulated.ON_GPU, reason="the emulated driver")


@pytest.mark.sweep
@pytest.mark.parametrize("asynchronous", [False, True])
def test_every_collective(across, asynchronous):
    across((1, 1), collectives, asynchronous)


@pytest.mark.sweep
@pytest.mark.parametrize("function", [views, messages, coalesced])
def test_views_messages_and_coalesced_calls(across, function):
    across((1, 1), function)


def in_flight_on_streams(rank, asynchronous):
    os.environ["UNISONO_CUDA_STREAMS_WAIT"] = "1"
    in_flight(rank, asynchronous)


@pytest.mark.quick(asynchronous=[True])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_host_is_not_blocked_by_ranks_of_other_hosts(across, asynchronous):
    across((1, 1), in_flight_on_streams, asynchronous)


def through_the_device(_, bucket):
    """A hook of DDP: gradients are added up as tensors of a device."""
    x = fake_cuda.tensor_of_driver(bucket.buffer() / dist.get_world_size())
    dist.all_reduce(x, async_op=True).wait()
    future = torch.futures.Future()
    future.set_result(fake_cuda.host(x))
    return future


class Plain(Mlp):
    def __init__(self):
        super().__init__()
        del self.spare


def trains(rank, streams_wait):
    os.environ["UNISONO_CUDA_STREAMS_WAIT"] = streams_wait
    fake_cuda.begin()
    with group(rank):
        net = model(Plain)
        ddp = Ddp(net, bucket_cap_mb=0.0005)
        ddp.register_comm_hook(None, through_the_device)
        train(ddp, share(rank.number))
        close(net.parameters(), alone(rank.n, Plain).parameters(), 1e-5)


@pytest.mark.quick(sizes=[(2, 1)])
@pytest.mark.parametrize("streams_wait", ["0", "1"])
@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (2, 2)], ids=str)
def test_ddp_trains_as_one_process_does(across, sizes, streams_wait):
    """Whether callers wait until nothing is left to do on the host, or only streams."""
    across(sizes, trains, streams_wait)
