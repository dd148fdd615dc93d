"""Ranks of torch that run a piece of code with one adapter or the other."""

import contextlib
import io

from adapter_cache import CACHE

PRELUDE = """
import os, sys, time
import torch, torch.distributed as dist
from datetime import timedelta
from unisono.interop.torch import adapter_of
rank, n = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
def begin(backend="unisono"):
    store = dist.FileStore(os.environ["STORE"], n)
    dist.init_process_group(backend, store=store, rank=rank, world_size=n)
def end():
    dist.barrier()
    dist.destroy_process_group()
"""


def environment(tmp_path, adapter, n):
    return {
        "XDG_CACHE_HOME": str(CACHE),
        "UNISONO_TORCH_ADAPTER": adapter,
        "WORLD_SIZE": str(n),
        "STORE": str(tmp_path / "store"),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def scripted(rank, code):
    """The code as a rank; what it prints."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(code, {"__name__": "__main__"})
    return output.getvalue()


CALLS = """
begin()
x = torch.full((1000,), rank + 1.0)
dist.all_reduce(x)
assert x[0] == 3
work = dist.all_reduce(x, async_op=True)
work.wait()
assert x[0] == 6 and work.is_completed()
future = dist.all_reduce(x, async_op=True).get_future()
assert future.wait()[0][0] == 12 and x[0] == 12

# What follows a future may make calls and wait for them.
def again(done):
    more = dist.all_reduce(done.value()[0], async_op=True).get_future()
    return more.wait()[0] + 1
assert dist.all_reduce(x, async_op=True).get_future().then(again).wait()[0] == 49

# Not in one piece: it is brought home before the future is complete.
wide = torch.full((4, 6), rank + 1.0).t()
assert dist.all_reduce(wide, async_op=True).get_future().wait()[0][2, 3] == 3

# Nobody keeps the handle, or anything.
for _ in range(50):
    dist.all_reduce(torch.ones(5000), async_op=True)
    dist.all_reduce(torch.ones(60, 40).t(), async_op=True)
futures = []
for i in range(300):
    y = torch.full((i + 1,), rank + i)
    futures.append(dist.all_reduce(y, async_op=True).get_future())
for i, future in enumerate(futures):
    assert future.wait()[0].tolist() == [2 * i + 1] * (i + 1)

both = [torch.ones(3), torch.ones(5)]
with dist._coalescing_manager(async_ops=True) as all_of_them:
    for y in both:
        dist.all_reduce(y)
all_of_them.wait()
assert both[0][0] == both[1][4] == 2
first, second = torch.full((3,), rank), torch.full((4, 3), rank).t()
with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as several:
    dist.broadcast(first, 1, async_op=True)
    dist.broadcast(second, 1, async_op=True)
several.wait()
assert first[0] == 1 and second[2, 1] == 1
rows = torch.empty(n, 7)
dist.all_gather(list(rows), torch.full((7,), float(rank)))
assert rows[:, 0].tolist() == [0, 1]
gives, gets = torch.arange(4) + 10 * rank, torch.empty(4, dtype=torch.int64)
dist.all_to_all_single(gets, gives)
assert gets.tolist() == ([0, 1, 10, 11] if rank == 0 else [2, 3, 12, 13])
y = torch.zeros(3)
if rank == 0:
    dist.send(torch.ones(3), 1)
else:
    assert dist.recv(y) == 0 and y[0] == 1
late = torch.zeros(3)
if rank == 0:
    work = dist.irecv(late, 1)
    assert not work.is_completed()
    try:
        work.wait(timedelta(milliseconds=50))
        raise AssertionError("it cannot be there yet")
    except Exception as error:
        print(type(error).__name__)
dist.barrier()
if rank == 1:
    dist.send(torch.ones(3), 0)
else:
    work.wait()
    assert late[0] == 1
group = dist.new_group([0, 1])
dist.broadcast(x, 1, group=group)
print(adapter_of(), adapter_of(group), dist.group.WORLD.name())
end()
"""
