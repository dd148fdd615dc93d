"""Who started this process: a table of environments, and the launchers themselves."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import FrozenInstanceError
from functools import cache
from pathlib import Path

import pytest

from unisono.cli.env import env
from unisono.errors import BadArgument
from unisono.runtime.world.environment import find_world

ROOT = Path(__file__).parents[3]

OURS = {
    "UNISONO_RANK": "1",
    "UNISONO_WORLD_SIZE": "4",
    "UNISONO_LOCAL_RANK": "1",
    "UNISONO_LOCAL_WORLD_SIZE": "4",
    "UNISONO_JOB": "c0ffee",
}
TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "run",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "3",
    "PMIX_NAMESPACE": "prterun-host-77@1",
}
MPICH = {
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
    "PMI_FD": "9",
}
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "3",
    "MV2_COMM_WORLD_SIZE": "4",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
}
SLURM = {
    "SLURM_JOB_ID": "123",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "7",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
}
PLACES = ("rank", "world_size", "local_rank", "local_world_size", "hosts_several")


@pytest.mark.parametrize(
    ("environ", "launcher", "place", "job"),
    [
        (OURS, "unisono run", (1, 4, 1, 4, False), "c0ffee"),
        (TORCHRUN, "torchrun", (5, 8, 1, 4, True), "torchrun-10.0.0.1:29500-run-2"),
        (OPENMPI, "Open MPI", (2, 3, 2, 3, False), "openmpi-prterun-host-77@1"),
        (MPICH, "MPICH (PMI)", (1, 2, 1, 2, False), None),
        (MPICH | {"PMI_JOBID": "9.1"}, "MPICH (PMI)", (1, 2, 1, 2, False), "pmi-9.1"),
        (MVAPICH, "MPICH (PMI)", (3, 4, 1, 2, True), None),
        (SLURM, "Slurm", (5, 7, 1, 3, True), "slurm-123.0-0"),
        ({}, "alone", (0, 1, 0, 1, False), None),
    ],
)
def test_every_launcher_is_recognised(environ, launcher, place, job):
    world = find_world(environ)
    assert world.launcher == launcher
    assert tuple(getattr(world, name) for name in PLACES) == place
    assert world.job == job if job else world.job
    assert launcher in world.why
    assert f"rank {place[0]} of {place[1]}" in world.why
    assert "\n" not in world.why
    assert ("several hosts" in world.why) == world.hosts_several
    with pytest.raises(FrozenInstanceError):
        world.rank = 0


def test_launchers_have_a_fixed_order():
    result = SLURM | MPICH | OPENMPI | TORCHRUN | OURS
    order = []
    for launcher in (OURS, TORCHRUN, OPENMPI, MPICH, SLURM):
        order.append(find_world(result).launcher)
        result = {k: v for k, v in result.items() if k not in launcher}
    assert order == ["unisono run", "torchrun", "Open MPI", "MPICH (PMI)", "Slurm"]
    assert find_world(result).launcher == "alone"
    by_hand = find_world(OURS | TORCHRUN, rank=0, world_size=2, job="mine")
    assert (by_hand.launcher, by_hand.rank, by_hand.job) == ("arguments", 0, "mine")


@pytest.mark.parametrize(
    ("name", "job"),
    [
        ("MASTER_PORT", "29501"),
        ("MASTER_ADDR", "10.0.0.2"),
        ("TORCHELASTIC_RUN_ID", "other"),
        ("TORCHELASTIC_RESTART_COUNT", "3"),
    ],
)
def test_torchrun_jobs_differ_if_any_variable_differs(name, job):
    other = find_world(TORCHRUN | {name: job, "RANK": "0", "LOCAL_RANK": "0"})
    assert other.job != find_world(TORCHRUN).job
    again = find_world(TORCHRUN | {"RANK": "0", "LOCAL_RANK": "0"})
    assert again.job == find_world(TORCHRUN).job


@pytest.mark.parametrize(
    "step", [None, "", "4294967290", "4294967291", "4294967292", "4294967293", "batch"]
)
def test_shell_in_a_slurm_allocation_is_a_world_of_one(step):
    environ = {k: v for k, v in SLURM.items() if k != "SLURM_STEP_ID"}
    if step is not None:
        environ["SLURM_STEP_ID"] = step
    world = find_world(environ)
    assert (world.launcher, world.world_size) == ("alone", 1)
    assert "not of a job step" in world.why


@pytest.mark.parametrize(
    ("tasks", "node", "local"),
    [("4(x2),3", "2", 3), ("3(x2)", "0", 3), ("7", "0", 7), ("2,5", "1", 5)],
)
def test_slurm_tasks_per_node_are_read(tasks, node, local):
    record = {"SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": node}
    assert find_world(SLURM | record).local_world_size == local


def test_slurm_without_tasks_per_node_may_have_several_hosts():
    result = {k: v for k, v in SLURM.items() if "TASKS_PER_NODE" not in k}
    assert find_world(result).hosts_several
    assert not find_world(result | {"SLURM_STEP_NUM_NODES": "1"}).hosts_several


def test_worlds_of_one_have_different_jobs():
    assert find_world({}).job != find_world({}).job
    assert find_world({}, rank=0, world_size=1).job != find_world({}).job
    lonely = {"RANK": "0", "WORLD_SIZE": "1"}
    assert find_world(lonely).job != find_world(lonely).job


def test_ranks_of_one_parent_without_a_name_share_a_job():
    other = find_world(MPICH | {"PMI_RANK": "0", "MPI_LOCALRANKID": "0"})
    assert find_world(MPICH).job == other.job


@pytest.mark.parametrize("environ", [TORCHRUN, OPENMPI, MPICH, SLURM, {}])
def test_given_job_takes_precedence(environ):
    named = find_world(environ | {"UNISONO_JOB": "variable"})
    assert named.job == "variable"
    assert named.launcher == find_world(environ).launcher
    both = find_world(environ | {"UNISONO_JOB": "variable"}, job="argument")
    assert both.job == "argument"


def test_local_rank_has_defaults():
    result = {k: v for k, v in TORCHRUN.items() if "LOCAL" not in k}
    world = find_world(result)
    assert (world.local_rank, world.local_world_size) == (5, 8)
    assert not world.hosts_several
    world = find_world(result | {"LOCAL_WORLD_SIZE": "4"})
    assert (world.local_rank, world.local_world_size) == (1, 4)


def test_arguments_that_match_the_launcher_keep_its_job():
    world = find_world(TORCHRUN, rank=3, world_size=8)
    assert (world.launcher, world.rank, world.job) == (
        "arguments",
        3,
        find_world(TORCHRUN).job,
    )
    assert world.local_world_size == 4


def test_arguments_for_another_world_need_a_job():
    with pytest.raises(BadArgument, match="pass the same job="):
        find_world(OURS, rank=0, world_size=2)
    with pytest.raises(BadArgument, match="rank 0 of 2 is given"):
        find_world({}, rank=0, world_size=2)
    world = find_world({"UNISONO_JOB": "j"}, rank=1, world_size=2)
    assert (world.job, world.local_rank, world.local_world_size) == ("j", 1, 2)
    assert find_world({"RANK": "x"}, rank=0, world_size=2, job="j").job == "j"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": 1}, "one without the other"),
        ({"world_size": 1}, "one without the other"),
        ({"rank": 2, "world_size": 2}, "rank=2: expected 0 to 1, as world_size=2"),
        ({"rank": -1, "world_size": 2}, "rank=-1"),
        ({"rank": 0, "world_size": 0}, "world_size=0: a world has at least one"),
        ({"rank": 0.0, "world_size": 2}, "rank = 0.0: expected a whole number"),
        ({"rank": "0", "world_size": 2}, "rank = '0'"),
        ({"job": ""}, "job = ''"),
        ({"job": 7}, "job = 7"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(BadArgument, match=message):
        find_world({}, **arguments)


@pytest.mark.parametrize(
    ("base", "wrong", "message"),
    [
        (TORCHRUN, {"RANK": "x"}, "RANK='x': expected a whole number"),
        (TORCHRUN, {"RANK": "-1"}, "RANK='-1'"),
        (TORCHRUN, {"RANK": "٣"}, "RANK='٣'"),
        (TORCHRUN, {"RANK": "8"}, "RANK=8: expected 0 to 7, as WORLD_SIZE=8"),
        (TORCHRUN, {"WORLD_SIZE": "0"}, "WORLD_SIZE=0: a world has at least one"),
        (TORCHRUN, {"WORLD_SIZE": "1e3"}, "WORLD_SIZE='1e3'"),
        (TORCHRUN, {"WORLD_SIZE": "9" * 5000}, "WORLD_SIZE="),
        (TORCHRUN, {"WORLD_SIZE": None}, "RANK='5' is set, but WORLD_SIZE is not"),
        (TORCHRUN, {"RANK": ""}, "WORLD_SIZE='8' is set, but RANK is not"),
        (TORCHRUN, {"LOCAL_RANK": "4"}, "LOCAL_RANK=4: .* LOCAL_WORLD_SIZE=4"),
        (TORCHRUN, {"LOCAL_RANK": "y"}, "LOCAL_RANK='y'"),
        (TORCHRUN, {"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE=9: expected 1 to 8"),
        (TORCHRUN, {"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE=0: expected 1 to 8"),
        (TORCHRUN, {"MASTER_PORT": None}, "not MASTER_ADDR and MASTER_PORT; set the"),
        (OURS, {"UNISONO_JOB": None}, "UNISONO_RANK=1 .* but not UNISONO_JOB"),
        (OURS, {"UNISONO_WORLD_SIZE": None}, "UNISONO_WORLD_SIZE is not"),
        (OPENMPI, {"OMPI_COMM_WORLD_SIZE": None}, "OMPI_COMM_WORLD_SIZE is not"),
        (MPICH, {"PMI_RANK": "2"}, "PMI_RANK=2: expected 0 to 1"),
        (MPICH, {"PMI_SIZE": "two"}, "PMI_SIZE='two'"),
        (MVAPICH, {"MV2_COMM_WORLD_RANK": "4"}, "MV2_COMM_WORLD_RANK=4"),
        (SLURM, {"SLURM_PROCID": "7"}, "SLURM_PROCID=7: .* SLURM_STEP_NUM_TASKS=7"),
        (SLURM, {"SLURM_JOB_ID": None}, "not SLURM_JOB_ID"),
        (SLURM, {"SLURM_STEP_TASKS_PER_NODE": "a"}, "SLURM_STEP_TASKS_PER_NODE='a'"),
        (SLURM, {"SLURM_STEP_NUM_NODES": "-"}, "SLURM_STEP_NUM_NODES='-'"),
    ],
)
def test_malformed_variables_are_named_with_their_value(base, wrong, message):
    environ = {k: v for k, v in (base | wrong).items() if v is not None}
    with pytest.raises(BadArgument, match=message):
        find_world(environ)


@pytest.fixture
def clean(monkeypatch):
    for name in {*OURS, *TORCHRUN, *OPENMPI, *MPICH, *MVAPICH, *SLURM}:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_env_prints_which_rule_won(clean, capsys):
    def line():
        assert env() == 0
        return next(
            text
            for text in capsys.readouterr().out.splitlines()
            if text.startswith("world  ")
        )

    assert "alone: no launcher's variables are set" in line()
    for name, value in TORCHRUN.items():
        clean.setenv(name, value)
    assert "rank 5 of 8, by torchrun (RANK, WORLD_SIZE), on several hosts" in line()
    clean.setenv("RANK", "x")
    assert "none: RANK='x'" in line()
    assert env(json=True) == 0
    assert "RANK='x'" in json.loads(capsys.readouterr().out)["world"]


@cache
def mpirun(folder, marker):
    """The launcher of that kind: the one in the folder made by `make bench`, or any."""
    for found in (ROOT / folder / "bin/mpirun", shutil.which("mpirun")):
        if found and Path(found).exists():
            output = subprocess.run(
                [found, "--version"], capture_output=True, text=True, timeout=60
            )
            if marker in output.stdout:
                return str(found)
    return None


SHOW = """
import json
from unisono.runtime.world.environment import find_world
w = find_world()
print(json.dumps([w.rank, w.world_size, w.launcher, w.hosts_several, w.job]))
"""


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize(
    ("folder", "marker", "flags", "launcher"),
    [
        (".venv-openmpi", "Open MPI", ["--oversubscribe"], "Open MPI"),
        (".venv-mpich", "HYDRA", [], "MPICH (PMI)"),
    ],
)
def test_real_launchers_are_recognised(clean, folder, marker, flags, launcher, wrapped):
    command = mpirun(folder, marker)
    if command is None:
        pytest.skip(f"no mpirun of {marker}: neither in {folder} nor in PATH")
    clean.setenv("OMPI_ALLOW_RUN_AS_ROOT", "1")
    clean.setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
    rank = [sys.executable, "-c", SHOW]
    if wrapped:  # a shell between the launcher and the rank, as job scripts have it
        rank = ["sh", "-c", '"$@"; true', "sh", *rank]
    jobs = set()
    for _ in range(2):
        output = subprocess.run(
            [command, *flags, "-n", "2", *rank],
            capture_output=True,
            text=True,
            timeout=120,
            env=os.environ,
        )
        lines = re.findall(r"\[.*?\]", output.stdout)  # newlines may come late
        worlds = sorted(json.loads(line) for line in lines)
        assert [w[:4] for w in worlds] == [[r, 2, launcher, False] for r in (0, 1)]
        assert worlds[0][4] == worlds[1][4]
        jobs.add(worlds[0][4])
    assert len(jobs) == 2
