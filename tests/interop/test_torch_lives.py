"""How groups of all ranks begin and end: again and again, late, or not at all."""

import json
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import expect, group, store_of

from forked import attempt

pytestmark = pytest.mark.one_in(3)


def summed(n):
    x = torch.ones(9)
    dist.all_reduce(x)
    expect(x, torch.full((9,), float(n)))


def on_a_store(rank, kind):
    with group(rank, kind=kind):
        summed(rank.n)


@pytest.mark.parametrize(
    ("n", "kind"), [(1, "hash"), (1, "file"), (1, "tcp"), (2, "file"), (3, "tcp")]
)
def test_every_kind_of_store_works(ranks, n, kind):
    ranks(n, on_a_store, kind)


def again(rank, kind):
    """One store outlives many groups, and holds what they left."""
    store = store_of(rank, kind)
    fds = []
    for _ in range(8):
        with group(rank, store=store):
            summed(rank.n)
            made = dist.new_group(list(range(rank.n)))
            dist.barrier(made)
        fds.append(len(os.listdir("/proc/self/fd")))
    assert fds[-1] <= fds[2], f"file descriptors stay behind: {fds}"


@pytest.mark.parametrize("kind", ["file", "tcp"])
def test_groups_can_be_made_again_on_one_store(ranks, kind):
    ranks(3, again, kind)


def spelled(rank, name):
    with group(rank, backend=name) as pg:
        summed(rank.n)
        assert pg.name() == pg._get_backend_name() == "unisono"
        assert pg.group_name == dist.group.WORLD.group_name
        made = dist.new_group(group_desc="for tests")
        assert made.group_desc == "for tests"
        return dist.get_backend()


@pytest.mark.parametrize("name", ["unisono", "UNISONO", "cpu:unisono"])
def test_every_spelling_of_the_backend_works(ranks, name):
    assert ranks(2, spelled, name) == [name.lower()] * 2


def late(rank, where):
    """Rank 1 does not arrive; a rank that waits for it gets an error."""
    limit = timedelta(seconds=0.5)
    with group(rank):
        made = dist.new_group(timeout=limit if where == "group" else None)
        x, result = torch.ones(3), None
        if where != "group":  # where a slow rank would get an error here
            dist.all_reduce(x, group=made)
        if where == "method":
            made.set_timeout(limit)
        began = time.monotonic()
        if rank.number == 0:
            if where == "call":
                options = dist.AllreduceOptions()
                options.timeout = limit
                result = attempt(made.allreduce([x], options).wait)
            elif where == "wait":
                work = made.allreduce([x])
                result = attempt(work.wait, limit)
            elif where == "future":
                made.set_timeout(limit)
                result = attempt(made.allreduce([x]).get_future().wait)
            else:
                result = attempt(dist.all_reduce, x, group=made)
        took = time.monotonic() - began
        dist.barrier()
        return [result, took]


@pytest.mark.parametrize("where", ["group", "method", "call", "wait", "future"])
def test_timeout_names_the_late_rank(ranks, where):
    result, took = ranks(2, late, where)[0]
    if where != "future":  # whose errors are plain ones
        assert result["error"] == "CollectiveTimeout"
    assert " Timed out " in result["message"]
    assert "rank 1" in result["message"].replace("ranks 1", "rank 1")
    assert took > 0.4


def waited_again(rank):
    """A wait that ran out has not ended the call."""
    with group(rank):
        x, result = torch.ones(3), None
        if rank.number == 0:
            work = dist.all_reduce(x, async_op=True)
            result = attempt(work.wait, timedelta(seconds=0.2))
            store_says("go")
            work.wait()
        else:
            store_waits("go")
            dist.all_reduce(x)
        expect(x, torch.full((3,), 2.0))
        return result


def store_says(key):
    dist.distributed_c10d._get_default_store().set(key, "")


def store_waits(key):
    dist.distributed_c10d._get_default_store().wait([key])


def test_wait_can_be_repeated(ranks):
    assert ranks(2, waited_again)[0]["error"] == "CollectiveTimeout"


def nobody_comes(rank):
    if rank.number == 1:
        return None
    return attempt(lambda: group(rank, timeout_s=1).__enter__())


def test_missing_rank_is_named(ranks):
    result = ranks(2, nobody_comes)[0]
    assert result["error"] == "ConnectFailed"
    assert result["attributes"]["missing"] == [1]


# One process imports torch and forks; its children end as interpreters do.
SCRIPT = """
import json, os, sys, torch, torch.distributed as dist
import unisono.interop.torch.process_group

def rank(number, where, then):
    os.environ["OMP_NUM_THREADS"] = "1"
    store = dist.FileStore(where, 2)
    dist.init_process_group("unisono", store=store, rank=number, world_size=2)
    x = torch.ones(100)
    dist.all_reduce(x)
    exec(then)
    sys.exit()

endings, folder = json.loads(sys.argv[1]), sys.argv[2]
ends = {}
for name, then in endings.items():
    pids = []
    for number in range(2):
        if (pid := os.fork()) == 0:
            rank(number, os.path.join(folder, name), then)
        pids.append(pid)
    ends[name] = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
print(json.dumps(ends))
"""
ENDINGS = {
    "nothing": "",
    "a future": "f = dist.all_reduce(x, async_op=True).get_future(); f.wait()",
    "other groups": "g = dist.new_group(); dist.all_reduce(x, group=g)",
    "a receive in flight": "w = dist.irecv(x, 1 - number); dist.barrier()",
    "destroyed": "dist.destroy_process_group()",
    "shut down": "dist.barrier(); dist.group.WORLD.shutdown()",
    "aborted": "dist.barrier(); dist.distributed_c10d._abort_process_group()",
}
FEW = ["nothing", "a receive in flight"]


@pytest.mark.quick(names=[FEW])
@pytest.mark.parametrize("names", [FEW, list(ENDINGS)], ids=["few", "all"])
def test_process_may_exit_without_destroying_its_group(names, tmp_path: Path):
    endings = {name: ENDINGS[name] for name in names}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(endings), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    assert json.loads(done.stdout) == {name: [0, 0] for name in names}, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert "leaked" not in done.stderr, done.stderr
