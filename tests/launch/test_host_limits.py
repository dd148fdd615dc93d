"""What the host allows and what its kernel did: ranks, cores, and lack of memory."""

import importlib
import os
import resource

import pytest

from unisono.errors import BadArgument
from unisono.launch import binding, limits
from unisono.launch.memory_kills import MemoryKills

pytestmark = pytest.mark.timeout(60)


def test_more_ranks_than_the_host_can_start_are_refused_before_any_starts():
    with pytest.raises(BadArgument, match=r"at most [0-9]+ ranks: .*unisono simulate"):
        limits.refuse_too_many(1_000_000_000)
    limits.refuse_too_many(2)


def test_soft_limit_of_descriptors_is_raised_for_many_ranks(monkeypatch):
    raised = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: (100, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda *new: raised.append(new))
    limits.refuse_too_many(50)
    assert raised == [(resource.RLIMIT_NOFILE, (50 * 3 + 64, 4096))]
    with pytest.raises(BadArgument, match="at most 1344 ranks: three of 4096"):
        limits.refuse_too_many(1500)


@pytest.fixture
def eight_cores(monkeypatch, tmp_path):
    """Eight hardware threads of four cores, of which i and i + 4 are one core."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(binding, "_CPUS", tmp_path)
    for cpu in range(8):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text("0")
        (folder / "core_id").write_text(str(cpu % 4))


@pytest.mark.usefixtures("eight_cores")
def test_ranks_get_their_share_of_the_cores(monkeypatch):
    assert binding.cores_of_ranks("none", 3) is None
    assert binding.cores_of_ranks("core", 2) == [{0, 4, 1, 5}, {2, 6, 3, 7}]
    assert binding.cores_of_ranks("core", 3) == [{0, 4}, {1, 5, 2}, {6, 3, 7}]
    numa = [[0, 4], [1, 2, 3, 5, 6, 7]]
    detect = importlib.import_module("unisono.topology.detect")
    monkeypatch.setattr(detect, "numa_nodes", lambda: numa)
    assert binding.cores_of_ranks("numa", 4) == [{0, 4}, *[set(numa[1])] * 3]
    with pytest.raises(BadArgument, match="9 ranks, but 8 cores"):
        binding.cores_of_ranks("core", 9)
    with pytest.raises(BadArgument, match="unknown binding 'cor'; nearest: core"):
        binding.cores_of_ranks("cor", 1)


@pytest.fixture
def kernel(tmp_path):
    """Files of a kernel whose cgroup of this process has killed nobody so far."""

    def write(name, text):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    write("proc/self/cgroup", "3:cpuset:/\n0::/job/rank\n")
    write("proc/vmstat", "nr_free_pages 7\noom_kill 4\n")
    write("sys/fs/cgroup/job/memory.events", "low 0\noom 0\noom_kill 1\n")
    write("sys/fs/cgroup/job/memory.max", "2147483648\n")
    write("sys/fs/cgroup/job/rank/memory.events", "oom_kill 0\n")
    return tmp_path, write


def test_kill_for_lack_of_memory_is_known_by_the_cgroup(kernel):
    root, write = kernel
    kills = MemoryKills(root)
    assert kills.evidence(77) == ""
    write("sys/fs/cgroup/job/memory.events", "oom_kill 2\n")
    write("proc/vmstat", "oom_kill 5\n")
    limit = f"the limit of 2 GiB of cgroup {root}/sys/fs/cgroup/job was reached"
    assert kills.evidence(77) == f"out of memory: {limit}"


def test_kill_for_lack_of_memory_is_known_by_old_cgroups_and_by_the_host(kernel):
    root, write = kernel
    write("proc/self/cgroup", "4:memory:/old\n")
    write("sys/fs/cgroup/memory/old/memory.oom_control", "under_oom 0\noom_kill 0\n")
    write("sys/fs/cgroup/memory/old/memory.limit_in_bytes", "1048576")
    kills = MemoryKills(root)
    write("proc/vmstat", "oom_kill 5\n")
    assert kills.evidence(77).startswith("probably out of memory")
    write("sys/fs/cgroup/memory/old/memory.oom_control", "oom_kill 1\n")
    assert "the limit of 1 MiB of cgroup" in kills.evidence(77)


def test_kill_for_lack_of_memory_is_known_by_the_log(kernel):
    root, write = kernel
    write(
        "dev/kmsg",
        "3,1,2,-;Out of memory: Killed process 77 (python3) total-vm:9kB, "
        "anon-rss:2048kB, file-rss:0kB\n",
    )
    kills = MemoryKills(root)
    found = "out of memory: the kernel's log names it, with 2 MiB in use"
    assert kills.evidence(77) == found
    assert kills.evidence(7) == ""
