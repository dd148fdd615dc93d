"""Asynchronous calls and messages that the compiled adapter begins without Python.

What they do to others is the same with both adapters.
"""

import pytest

torch = pytest.importorskip("torch")

# To compile it takes longer than all other tests of this folder.
pytestmark = pytest.mark.sweep

COMMON = """
from torch.multiprocessing.reductions import StorageWeakRef
from unisono.errors import BadArgument, CollectiveMismatch, CollectiveTimeout
from unisono.errors import PeerLost, UnisonoError, UsageError
from unisono.interop.torch.collectives import TorchCollectives
def until(true):
    while not true():
        time.sleep(0.001)
def raised(call):
    try:
        call()
    except UnisonoError as error:
        return type(error).__name__, isinstance(error, dist.DistBackendError)
    raise AssertionError("it does not fail")
begin()
signal = dist.new_group()
dist.barrier(group=signal)
"""

RESULTS = """
def calls(count):
    x, rows, other = torch.ones(count), torch.ones(count * n), torch.empty(count * n)
    def all_of(y, *values):
        for r, value in enumerate(values):
            part = y[r * count : (r + 1) * count]
            assert torch.equal(part, torch.full_like(part, value)), (part, value)
    x.fill_(rank + 1)
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    assert work.is_completed() and work.is_success() and work.result()[0] is not None
    all_of(x, 3)
    dist.all_reduce(x, dist.ReduceOp.AVG, async_op=True).wait()
    all_of(x, 3)
    dist.all_gather_into_tensor(rows, x + rank, async_op=True).wait()
    all_of(rows, 3, 4)
    dist.reduce_scatter_tensor(x, rows, dist.ReduceOp.MAX, async_op=True).wait()
    all_of(x, 3 + rank)
    dist.all_to_all_single(other, rows + rank, async_op=True).wait()
    all_of(other, 3 + rank, 4 + rank)
    dist.broadcast(x, 1, async_op=True).wait()
    all_of(x, 4)
    dist.reduce(x, 1, async_op=True).wait()
    assert rank == 0 or all_of(x, 8) is None
    dist.barrier(async_op=True).wait()
    x.fill_(rank)
    for kind in (torch.float32, torch.uint64, torch.float8_e4m3fnuz):
        y, there = torch.zeros(count).to(kind), x.to(kind)
        if rank == 0:
            dist.send(there, 1, tag=3)
            assert dist.recv(y, tag=4) == 1
        else:
            work = dist.irecv(y, 0, tag=3)
            work.wait()
            dist.isend(there, 0, tag=4).wait()
        all_of(y.float(), 1 - rank)
calls(4)
calls(50_000)
general = {}
if adapter_of() == "compiled":
    for name in ("allreduce", "all_gather_single", "reduce_scatter_single", "reduce",
                 "all_to_all_single", "broadcast", "barrier", "send", "recv"):
        general[name] = getattr(TorchCollectives, name)
        setattr(TorchCollectives, name, None)
calls(4)
calls(50_000)
for name, function in general.items():
    setattr(TorchCollectives, name, function)

# What is not plain takes the general path.
wide = torch.full((4, 6), rank + 1.0).t()
dist.all_reduce(wide, async_op=True).wait()
assert wide.tolist() == [[3.0] * 4] * 6
if rank == 0:
    dist.send(wide, 1)
else:
    wide.zero_()
    dist.recv(wide, 0)
    assert wide.tolist() == [[3.0] * 4] * 6
assert raised(lambda: dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND,
                                      async_op=True)) == ("BadArgument", True)
if rank == 0:
    dist.send(torch.ones(5), 1)
else:
    assert raised(lambda: dist.recv(torch.ones(3), 0)) == ("BadArgument", True)
end()
"""


def test_asynchronous_calls_and_messages_have_the_right_results(scripts, adapter):
    assert scripts(adapter, COMMON + RESULTS) == ["", ""]


ORDER = """
# Each call is on what the one before has left.
for count in (2, 100_000):
    x, works = torch.ones(count), []
    for i in range(12):
        if i % 4 == 3:
            dist.all_reduce(x)
        else:
            works.append(dist.all_reduce(x, async_op=True))
    for work in works:
        work.wait()
    assert x[0] == x[-1] == 2**12, x

# Wherever the other is: in order although one rank is late.
x, y = torch.full((3,), rank + 1.0), torch.full((3,), rank + 1.0)
if rank == 1:
    dist.barrier(group=signal)
first = dist.all_reduce(x, async_op=True)
second = dist.broadcast(x, 1, async_op=True)
if rank == 0:
    assert not first.is_completed() and not second.is_completed()
    assert not first.is_success() and first.exception() is None
    dist.barrier(group=signal)
dist.all_reduce(y)  # behind both
assert first.is_completed() and second.is_completed()
assert x.tolist() == [3] * 3 and y.tolist() == [3] * 3

# Nobody waits for it, and it ends.
if rank == 1:
    dist.barrier(group=signal)
work = dist.all_reduce(x, async_op=True)
if rank == 0:
    assert not work.is_completed()
    dist.barrier(group=signal)
until(work.is_completed)
assert work.is_success() and x.tolist() == [6] * 3
end()
"""


def test_asynchronous_and_blocking_calls_run_in_the_order_of_the_calls(
    scripts, adapter
):
    assert scripts(adapter, COMMON + ORDER) == ["", ""]


FREED = """
def junk():
    return [torch.full((50_000,), -1.0) for _ in range(20)]
def begun(keeps):
    x = torch.full((50_000,), rank + 1.0)
    work = dist.all_reduce(x, async_op=True)
    return work if keeps else None, StorageWeakRef(x.untyped_storage())
for keeps in (True, False):
    if rank == 1:
        dist.barrier(group=signal)
    work, memory = begun(keeps)
    others = junk()
    assert rank == 1 or not memory.expired()
    if rank == 0:
        dist.barrier(group=signal)
    y = torch.full((50_000,), rank + 1.0)
    dist.all_reduce(y)
    assert torch.equal(y, torch.full_like(y, 3))
    if keeps:
        assert torch.equal(work.result()[0], y)
        del work
    elif adapter_of() == "compiled":
        until(memory.expired)
    assert all(torch.equal(z, torch.full_like(z, -1)) for z in others)

# A message, too.
if rank == 0:
    dist.isend(torch.full((500_000,), 7.0), 1)
    others = [torch.full((500_000,), -1.0) for _ in range(3)]
    dist.barrier(group=signal)
else:
    dist.barrier(group=signal)
    z = torch.empty(500_000)
    dist.recv(z, 0)
    assert torch.equal(z, torch.full_like(z, 7))
end()
"""


def test_tensors_live_until_the_call_has_ended(scripts, adapter):
    assert scripts(adapter, COMMON + FREED) == ["", ""]


FUTURES = """
ran, x = [], torch.full((3,), rank + 1.0)
if rank == 1:
    dist.barrier(group=signal)
work = dist.all_reduce(x, async_op=True)
future = work.get_future()
after = future.then(lambda done: ran.append(done.value()[0].tolist()))
if rank == 0:
    assert not future.done()
    dist.barrier(group=signal)
after.wait()
assert ran == [[3.0] * 3]
work.wait()
assert future.done() and work.get_future().wait()[0].tolist() == [3] * 3
assert ran == [[3.0] * 3]
late = dist.all_reduce(x, async_op=True)  # its future is made after its end
late.wait()
assert late.get_future().then(lambda done: done.value()[0][0]).wait() == 6
if rank == 0:
    incoming = dist.irecv(x, 1).get_future()
    dist.barrier(group=signal)
    assert incoming.wait()[0].tolist() == [9] * 3
else:
    dist.barrier(group=signal)
    dist.send(torch.full((3,), 9.0), 0)
end()
"""


def test_future_of_a_begun_call_runs_what_follows_once(scripts, adapter):
    assert scripts(adapter, COMMON + FUTURES) == ["", ""]


LATE = """
x = torch.full((3,), rank + 1.0)
if rank == 1:
    dist.barrier(group=signal)
work = dist.all_reduce(x, async_op=True)
if rank == 0:
    try:
        work.wait(timedelta(milliseconds=20))
        raise AssertionError("the other does not come")
    except CollectiveTimeout as error:
        print(error.ranks, error.collective, isinstance(error, dist.DistBackendError))
    assert not work.is_completed()
    dist.barrier(group=signal)
work.wait(timedelta(seconds=60))  # it goes on
assert x.tolist() == [3] * 3
if rank == 0:
    late = dist.new_group([0, 1], timeout=timedelta(seconds=0.2))
    work = dist.irecv(x, 1, group=late)
    print(*raised(work.wait), work.is_completed(), work.is_success())
else:
    dist.new_group([0, 1], timeout=timedelta(seconds=0.2))
end()
"""


def test_waiting_for_a_begun_call_has_deadlines(scripts, adapter):
    late = "(1,) all_reduce True\nCollectiveTimeout True True False\n"
    assert scripts(adapter, COMMON + LATE) == [late, ""]


BROKEN = """
made = dist.new_group()
x = torch.ones(3)
dist.all_reduce(x, group=made)
if rank == 0:
    work = dist.all_reduce(x, group=made, async_op=True)
else:
    work = dist.broadcast(x, 1, group=made, async_op=True)
print(*raised(work.get_future().wait), *raised(work.wait), *raised(work.wait))
print(type(work.exception()).__name__)
print(*raised(lambda: dist.all_reduce(x, group=made, async_op=True)))
print(*raised(lambda: dist.isend(x, 1 - rank, group=made)))

# A fork cannot wait for it; who has made it can.
if rank == 1:
    dist.barrier(group=signal)
work = dist.all_reduce(x, async_op=True)
if rank == 0:
    child = os.fork()
    if child == 0:
        try:
            work.wait()
        except UsageError as error:
            os._exit(7 if "fork of the rank that made the call" in str(error) else 8)
        finally:
            os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    dist.barrier(group=signal)
work.wait()

# Whoever leaves ends what is in flight, for itself and for the other.
gone = dist.new_group()
dist.all_reduce(x, group=gone)
if rank == 0:
    works = [dist.all_reduce(x, group=gone, async_op=True)]
    works.append(dist.irecv(x, 1, group=gone))
    dropped = dist.all_reduce(x, group=gone, async_op=True)
    del dropped
    calls = getattr(gone, "_calls", None)
    gone.abort() if calls is None else calls.close()
    for work in works:
        print(*raised(work.wait), work.is_completed())
    dist.barrier(group=signal)
else:
    dist.barrier(group=signal)
    print(*raised(lambda: dist.all_reduce(x, group=gone, async_op=True).wait()))
dist.barrier()
"""


def test_begun_calls_fail_with_named_errors(scripts, adapter):
    first, second = scripts(adapter, COMMON + BROKEN)
    mismatch = "CollectiveMismatch True"
    common = [" ".join([mismatch] * 3), "CollectiveMismatch", mismatch, mismatch]
    assert first.splitlines()[:4] == second.splitlines()[:4] == common
    assert first.splitlines()[4:] == ["PeerLost True True"] * 2
    assert second.splitlines()[4:] == ["PeerLost True"]


LOST = """
x = torch.ones(3)
dist.all_reduce(x)
if rank == 1:
    os._exit(3)
works = [dist.all_reduce(x, async_op=True), dist.irecv(x, 1)]
for work in works:
    print(*raised(work.wait))
print(*raised(lambda: dist.all_reduce(x, async_op=True)))
"""


def test_begun_call_names_the_lost_rank(scripts, adapter):
    lost = "PeerLost True\n"
    assert scripts(adapter, COMMON + LOST, dies=[1])[0] == 3 * lost


RECORDED = """
with torch.profiler.profile(record_shapes=True) as seen:
    x = torch.ones(4, 5)
    dist.all_reduce(x, async_op=True).wait()
    if rank == 0:
        dist.send(x, 1)
    else:
        dist.recv(x, 0)
for event in seen.events():
    if event.name.startswith("unisono:"):
        print(event.name)
end()
"""


@pytest.mark.usefixtures("built")
def test_profiler_sees_begun_calls(scripts):
    first, second = scripts("compiled", COMMON + RECORDED)
    assert set(first.split()) == {"unisono:all_reduce", "unisono:send"}
    assert set(second.split()) == {"unisono:all_reduce", "unisono:recv"}
