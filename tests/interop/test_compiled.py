"""Both adapters of the torch backend: calls, futures, errors and an orderly end."""

import contextlib
import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch._dynamo")  # which DDP imports when it is first called

from adapter_cache import CACHE  # noqa: E402

from unisono.errors import BadArgument, UsageError  # noqa: E402
from unisono.interop.torch import adapters, compiled  # noqa: E402

# To compile it takes longer than all other tests of this folder.
pytestmark = pytest.mark.quick(adapter=["python"])

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


@pytest.fixture
def ranks(forks, tmp_path):
    """ranks(adapter, code): what each of two ranks says, which are forked."""

    def run(adapter, code, dies=()):
        common = environment(tmp_path, adapter, 2)
        env = [common | {"RANK": str(r)} for r in range(2)]
        ends = forks.run(2, scripted, PRELUDE + code, env=env)
        for end in ends:
            assert end.rank in dies or end.status == 0, end.stderr
            assert "leaked" not in end.stderr
        return [end.value for end in ends]

    return run


def processes(tmp_path, adapter, code, n=2):
    """Run the code on n ranks, which begin and end as interpreters do."""
    script = tmp_path / "script.py"
    script.write_text(PRELUDE + code)
    env = os.environ | environment(tmp_path, adapter, n)
    started = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env=env | {"RANK": str(r)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for r in range(n)
    ]
    output = [process.communicate(timeout=200) for process in started]
    for r, process in enumerate(started):
        assert process.returncode == 0, output[r][1]
        assert "leaked" not in output[r][1]
    return [out for out, _ in output]


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


@pytest.mark.sweep
def test_both_adapters_run_calls_and_time_out(ranks, adapter):
    first, second = ranks(adapter, CALLS)
    assert second.split() == [adapter, adapter, "unisono"]
    assert first.split()[0] == "CollectiveTimeout"


LOST = """
from unisono.errors import PeerLost
begin()
dist.all_reduce(torch.ones(1))
if rank == 1:
    os._exit(3)
work = dist.all_reduce(torch.ones(100), async_op=True)
try:
    work.get_future().wait()
except RuntimeError as error:
    print("future:", type(error).__name__, error.ranks)
try:
    work.wait()
except PeerLost as error:
    print("wait:", error.ranks, isinstance(error, dist.DistBackendError))
assert work.is_completed()
"""


def test_future_and_wait_name_the_lost_rank(ranks, adapter):
    output = ranks(adapter, LOST, dies=[1])[0].splitlines()
    assert output[0] == "future: PeerLost (1,)"
    assert output[1] == "wait: (1,) True"


DDP = """
begin()
torch.manual_seed(rank)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 4))
model(torch.full((2, 8), rank + 1.0)).sum().backward()
grad = model.module.weight.grad
assert torch.equal(grad, torch.full_like(grad, 3.0)), grad  # the mean of 2 and 4
print(model._get_ddp_logging_data()["backend_name"])
end()
"""


def test_compiled_adapter_runs_ddp(ranks, adapter):
    assert ranks(adapter, DDP) == ["unisono\n"] * 2


LEFT = """
begin()
dist.barrier()
kept = [dist.all_reduce(torch.ones(9), async_op=True) for _ in range(20)]
futures = [work.get_future().then(lambda done: done.value()[0] + 1) for work in kept]
if rank == 0:
    waits_for_nobody = dist.irecv(torch.ones(4), 1).get_future()
dist.barrier()
print("bye")
"""


@pytest.mark.sweep
def test_process_may_end_without_destroying_its_group(tmp_path, adapter):
    assert processes(tmp_path, adapter, LEFT) == ["bye\n"] * 2


OPS = """
begin()
name = dist.group.WORLD.group_name
ops, wait = torch.ops._c10d_functional, torch.ops._c10d_functional.wait_tensor
x, y = torch.full((3,), float(rank)), torch.empty(6)
wait(ops.all_gather_into_tensor_out(x, n, name, out=y))
assert y.tolist() == [0, 0, 0, 1, 1, 1]
z = torch.empty(3)
wait(ops.reduce_scatter_tensor_out(y, "sum", n, name, out=z))
assert z[0] == 2 * rank
with torch.profiler.profile(record_shapes=True) as seen:
    dist.all_reduce(torch.ones(4, 5), async_op=True).wait()
    dist.barrier()
    dist.broadcast(torch.ones(6), 0)
for event in seen.events():
    if event.name.startswith("unisono:"):
        print(event.name, event.input_shapes)
end()
"""


@pytest.mark.sweep
@pytest.mark.usefixtures("built")
def test_compiled_adapter_supports_backend_only_calls(ranks):
    for output in ranks("compiled", OPS):
        assert "unisono:all_reduce [[4, 5]]" in output
        assert "unisono:barrier" in output
        assert "unisono:broadcast [[6]]" in output


MIXED = """
begin("cpu:unisono,cuda:gloo")
x = torch.ones(3)
dist.all_reduce(x)
assert x[0] == 2
group = dist.group.WORLD
print(adapter_of(), group._get_backend(torch.device("cuda")).name())
end()
"""


@pytest.mark.sweep
@pytest.mark.usefixtures("built")
def test_compiled_adapter_works_beside_the_backend_of_another_device(ranks):
    assert ranks("auto", MIXED) == ["compiled gloo\n"] * 2


REPLACED = """
from unisono.interop.torch.replacement import replace
replace("mpi")
store = dist.FileStore(os.environ["STORE"], n)
options = dist.ProcessGroupGloo._Options()
dist.init_process_group(
    "cuda:gloo,cpu:mpi", store=store, rank=rank, world_size=n, pg_options=options
)
x = torch.ones(3)
dist.all_reduce(x)
assert x[0] == 2
print(adapter_of(), dist.group.WORLD._get_backend(torch.device("cuda")).name())
end()
"""


@pytest.mark.sweep
@pytest.mark.usefixtures("built")
def test_replaced_backend_leaves_that_of_another_device_with_its_options(ranks):
    assert ranks("auto", REPLACED) == ["compiled gloo\n"] * 2


def test_python_adapter_refuses_a_second_backend(monkeypatch):
    mixed = {"cpu": "unisono", "cuda": "nccl"}
    monkeypatch.setenv(adapters.VARIABLE, "python")
    with pytest.raises(BadArgument, match="cpu:unisono,cuda:nccl"):
        adapters.chosen(mixed)
    monkeypatch.setenv(adapters.VARIABLE, "auto")
    assert adapters.chosen(mixed) == "compiled"
    monkeypatch.setenv(adapters.VARIABLE, "C++")
    with pytest.raises(BadArgument, match="auto, python, compiled"):
        adapters.chosen()


def test_missing_compiler_is_reported(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(adapters.VARIABLE, raising=False)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert adapters.chosen() == "python"
    with pytest.raises(UsageError, match="no-such-compiler"):
        compiled.build()
    broken = tmp_path / "compiler"
    broken.write_text("#!/bin/sh\necho 'no room left for templates'; exit 4\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(UsageError, match="no room left for templates"):
        compiled.build()


@pytest.mark.sweep
def test_ranks_that_build_at_once_build_once(tmp_path):
    compiler = tmp_path / "compiler"
    compiler.write_text(
        f'#!/bin/sh\necho built >> {tmp_path}/log\nsleep 0.5\nwhile [ "$1" != -o ]; do '
        'shift; done\necho module > "$2"\n'
    )
    compiler.chmod(0o755)
    code = "from unisono.interop.torch import compiled; print(compiled.build())"
    env = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "CXX": str(compiler)}
    run = [sys.executable, "-c", code]
    both = [subprocess.Popen(run, env=env, stdout=subprocess.PIPE) for _ in range(2)]
    made = {process.communicate(timeout=100)[0].decode().strip() for process in both}
    assert (tmp_path / "log").read_text() == "built\n"
    assert len(made) == 1
    assert Path(made.pop()).read_text() == "module\n"


# --- whose the file is


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """A module in a cache of its own, made by a compiler that is quick; its builds."""
    compiler = tmp_path / "compiler"
    compiler.write_text(
        f'#!/bin/sh\necho built >> {tmp_path}/log\nwhile [ "$1" != -o ]; do '
        'shift; done\necho module > "$2"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(compiler))
    target = compiled.build()
    return target, lambda: (tmp_path / "log").read_text().count("built")


def test_cache_is_this_users_alone_whatever_the_umask(kept):
    target, builds = kept
    before = os.umask(0)
    try:
        shutil.rmtree(target.parents[2])
        assert compiled.build() == target
    finally:
        os.umask(before)
    for one in (target, *target.parents[:3]):
        assert one.stat().st_mode & 0o077 == 0, one
    assert compiled.is_built()
    assert compiled.build() == target
    assert builds() == 2


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
def test_file_that_others_can_write_to_is_built_anew(kept, mode):
    target, builds = kept
    target.write_text("somebody else's")
    target.chmod(mode)
    assert not compiled.is_built()
    assert compiled.build().read_text() == "module\n"
    assert target.stat().st_mode & 0o077 == 0
    assert builds() == 2


def test_link_in_the_files_place_is_built_anew(kept, tmp_path):
    target, builds = kept
    other = tmp_path / "other.so"
    other.write_text("somebody else's")
    target.unlink()
    target.symlink_to(other)
    assert not compiled.is_built()
    assert compiled.build().read_text() == "module\n"
    assert other.read_text() == "somebody else's"
    assert builds() == 2


@pytest.mark.parametrize("level", [0, 1, 2])
def test_folder_that_others_can_write_to_is_refused(kept, level):
    target, builds = kept
    folder = target.parents[level]
    folder.chmod(0o770)
    assert not compiled.is_built()
    with pytest.raises(UsageError, match=r"others can write to .*chmod go-w"):
        compiled.build()
    folder.chmod(0o700)
    assert compiled.is_built()
    assert builds() == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_files_of_another_user_are_rebuilt_and_folders_refused(kept, tmp_path):
    target, builds = kept
    os.chown(target, 12345, -1)
    assert not compiled.is_built()
    assert compiled.build() == target
    assert target.stat().st_uid == os.geteuid()
    os.chown(target.parent, 12345, -1)
    with pytest.raises(UsageError, match="belongs to user 12345"):
        compiled.build()
    os.chown(target.parent, os.geteuid(), -1)
    aside = tmp_path / "aside"
    target.parent.rename(aside)
    target.parent.symlink_to(aside)
    assert compiled.is_built()  # the user's own link
    os.chown(target.parent, 12345, -1, follow_symlinks=False)
    with pytest.raises(UsageError, match="is a link that belongs to user 12345"):
        compiled.build()
    assert builds() == 2
