"""Both adapters of the torch backend: calls, futures, errors and an orderly end."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch._dynamo")  # which DDP imports when it is first called

from scripted_ranks import CALLS, PRELUDE, environment  # noqa: E402

from unisono.errors import BadArgument, UsageError  # noqa: E402
from unisono.interop.torch import adapters, compiled  # noqa: E402

# To compile it takes longer than all other tests of this folder.
pytestmark = pytest.mark.quick(adapter=["python"])


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


@pytest.mark.sweep
def test_both_adapters_run_calls_and_time_out(scripts, adapter):
    first, second = scripts(adapter, CALLS)
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


def test_future_and_wait_name_the_lost_rank(scripts, adapter):
    output = scripts(adapter, LOST, dies=[1])[0].splitlines()
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


@pytest.mark.sweep  # with the adapter in Python, test_torch_ddp.py trains
def test_compiled_adapter_runs_ddp(scripts, adapter):
    assert scripts(adapter, DDP) == ["unisono\n"] * 2


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
def test_compiled_adapter_supports_backend_only_calls(scripts):
    for output in scripts("compiled", OPS):
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
def test_compiled_adapter_works_beside_the_backend_of_another_device(scripts):
    assert scripts("auto", MIXED) == ["compiled gloo\n"] * 2


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
def test_replaced_backend_leaves_that_of_another_device_with_its_options(scripts):
    assert scripts("auto", REPLACED) == ["compiled gloo\n"] * 2


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
