"""Blocking calls that the compiled adapter makes without Python, by their plans."""

import pytest

torch = pytest.importorskip("torch")

from scripted_ranks import CALLS, PRELUDE, environment, scripted  # noqa: E402

# To compile it takes longer than all other tests of this folder.
pytestmark = [pytest.mark.sweep, pytest.mark.usefixtures("built")]

PLANNED = """
from unisono.errors import BadArgument, CollectiveMismatch
from unisono.interop.torch.collectives import TorchCollectives
begin()
x, rows, other = torch.ones(4), torch.ones(4 * n), torch.empty(4 * n)
def calls(group=None):
    x.fill_(rank + 1)
    dist.all_reduce(x, group=group)
    assert x.tolist() == [3] * 4
    dist.all_reduce(x, dist.ReduceOp.AVG, group=group)
    dist.all_gather_into_tensor(rows, x + rank, group=group)
    assert rows.tolist() == [3] * 4 + [4] * 4
    dist.reduce_scatter_tensor(x, rows, dist.ReduceOp.MAX, group=group)
    assert x.tolist() == [3 + rank] * 4
    dist.all_to_all_single(other, rows + rank, group=group)
    assert other.tolist() == [3 + rank] * 4 + [4 + rank] * 4
    dist.broadcast(x, 1, group=group)
    assert x.tolist() == [4] * 4
    dist.reduce(x, 1, group=group)
    assert rank == 0 or x.tolist() == [8] * 4
    dist.barrier(group=group)
calls()
general = {}
for name in ("allreduce", "all_gather_single", "reduce_scatter_single", "reduce",
             "all_to_all_single", "broadcast", "barrier"):
    general[name] = getattr(TorchCollectives, name)
    setattr(TorchCollectives, name, None)
calls()
for name, function in general.items():
    setattr(TorchCollectives, name, function)

# What is not plain still takes the general path.
wide = torch.full((4, 6), rank + 1.0).t()
dist.all_reduce(wide)
assert wide.tolist() == [[3.0] * 4] * 6
shared = torch.arange(8.0)
dist.all_gather_into_tensor(shared, shared[2:6] + rank)
dist.all_gather_into_tensor(shared, shared[2:6])  # they overlap
scaled = torch.ones(2)
dist.all_reduce(scaled, dist._make_nccl_premul_sum(2.0))
assert scaled.tolist() == [4, 4]
y = torch.ones(3)
with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as several:
    dist.broadcast(y, 0)
several.wait()
for wrong in (lambda: dist.all_gather_into_tensor(torch.ones(3), torch.ones(2)),
              lambda: dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND)):
    try:
        wrong()
        raise AssertionError("it does not fit")
    except BadArgument as error:
        assert isinstance(error, dist.DistBackendError)

late = dist.new_group(timeout=timedelta(seconds=60))
calls(late)
work = dist.all_reduce(torch.ones(4), group=late, async_op=True)
dist.all_reduce(x, group=late)  # behind it
work.wait()
try:
    if rank == 0:
        dist.all_reduce(x, group=late)
    else:
        dist.broadcast(x, 1, group=late)
    raise AssertionError("ranks called different things")
except CollectiveMismatch as error:
    print(type(error).__name__, isinstance(error, dist.DistBackendError))
try:
    dist.all_reduce(x, group=late)
    raise AssertionError("the group cannot be used")
except CollectiveMismatch as error:
    print("refused")
end()
"""


def test_plain_blocking_calls_need_no_python_once_they_were_made(scripts):
    ours = "CollectiveMismatch True\nrefused\n"
    assert scripts("compiled", PLANNED) == [ours] * 2


LATE = """
from unisono.errors import CollectiveTimeout
begin()
dist.all_reduce(torch.ones(4))
if rank == 0:
    dist.group.WORLD._get_backend(torch.device("cpu")).set_timeout(timedelta(seconds=1))
    try:
        dist.all_reduce(torch.ones(4))
        raise AssertionError("the other does not come")
    except CollectiveTimeout as error:
        print(error.ranks)
else:
    while not os.path.exists(os.environ["STORE"] + ".late"):
        time.sleep(0.01)
if rank == 0:
    open(os.environ["STORE"] + ".late", "w").close()
"""


def test_planned_call_has_the_deadline_of_its_group(scripts):
    assert scripts("compiled", LATE) == ["(1,)\n", ""]


def test_ranks_with_different_adapters_make_one_group(forks, tmp_path):
    env = [
        environment(tmp_path, adapter, 2) | {"RANK": str(r)}
        for r, adapter in enumerate(("python", "compiled"))
    ]
    ends = forks.run(2, scripted, PRELUDE + CALLS, env=env)
    assert [end.status for end in ends] == [0, 0], [end.stderr for end in ends]
