"""Worlds of processes on emulated hosts: environment, results, no leftovers."""

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter

import numpy as np
import pytest

from open_files import open_files
from unisono.errors import BadArgument, CollectiveTimeout, PeerLost, UnisonoError
from unisono.testing import world_across

pytestmark = [pytest.mark.timeout(120), pytest.mark.one_in(4)]

TELL = "import os; print({k: v for k, v in os.environ.items() if 'UNISONO' in k})"


def environment(names):
    return {name: os.environ[name] for name in names}


def add_up(comm, x):
    return comm.all_reduce(np.full(3, x + comm.rank)).tolist()


def fail_on_1(comm):
    if comm.rank == 1:
        raise LookupError("of my own")
    comm.barrier()


def dawdle():
    sys.stdout.write("begun\n")
    time.sleep(600)


def stop():
    sys.stdout.write("begun\n")
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(600)  # whichever thread is interrupted first, this one is still here


def unsendable():
    return lambda: None


def child_that_stays():
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    return os.getpid()


def test_every_rank_has_its_environment():
    output = [
        eval(end.stdout)
        for end in world_across([2, 3, 1]).run_command([sys.executable, "-c", TELL])
    ]
    assert [t["UNISONO_RANK"] for t in output] == list("012345")
    assert [t["UNISONO_LOCAL_RANK"] for t in output] == list("010120")
    assert [t["UNISONO_LOCAL_WORLD_SIZE"] for t in output] == list("223331")
    assert {t["UNISONO_WORLD_SIZE"] for t in output} == {"6"}
    hosts = Counter(t["UNISONO_HOST_ID"] for t in output)
    assert list(hosts.values()) == [2, 3, 1]
    for same in ("UNISONO_JOB", "UNISONO_ADDRESS", "UNISONO_SECRET"):
        assert len({t[same] for t in output}) == 1
    assert len(bytes.fromhex(output[0]["UNISONO_SECRET"])) == 32
    host, port = output[0]["UNISONO_ADDRESS"].split(":")
    assert host == "127.0.0.1"
    assert 0 < int(port) < 1 << 16


def test_every_run_is_a_job_of_its_own():
    world = world_across([1], init=False)
    names = ["UNISONO_JOB", "UNISONO_SECRET", "UNISONO_HOST_ID"]
    first, second = world.run(environment, names), world.run(environment, names)
    for name in names:
        assert first[0][name] != second[0][name]


def test_variables_are_set_for_all_and_for_one_rank():
    world = world_across(
        [1, 1],
        env={"A": "all", "B": "all"},
        env_of=lambda rank: {"B": f"of {rank}"},
        init=False,
    )
    assert world.run(environment, ["A", "B"]) == [
        {"A": "all", "B": "of 0"},
        {"A": "all", "B": "of 1"},
    ]


def test_function_gets_a_communicator_and_returns_its_result():
    assert world_across([3]).run(add_up, 10) == [[33.0] * 3] * 3


def test_first_failure_is_raised_unchanged():
    with pytest.raises(LookupError, match="of my own") as caught:
        world_across([2]).run(fail_on_1)
    assert "rank 1" in "\n".join(caught.value.__notes__)


def test_killed_rank_is_named_and_the_others_errors_are_kept():
    with world_across([3], grace_s=30).start(barriers) as running:
        await_output(running, 1)
        running.signal(1, signal.SIGKILL)
        ends = running.wait()
        assert ends[1].status == -signal.SIGKILL
        for end in (ends[0], ends[2]):
            assert isinstance(end.error, PeerLost)
            assert end.error.ranks == (1,)
        with pytest.raises(PeerLost, match=r"rank 1.*SIGKILL") as caught:
            running.raise_failure()
        assert caught.value.pids == (ends[1].pid,)


def await_output(running, rank):
    while "begun" not in running.stdout(rank):
        time.sleep(0.01)


def barriers(comm):
    comm.barrier()
    sys.stdout.write("begun\n")
    while True:
        comm.barrier()


@pytest.mark.parametrize("stuck", [dawdle, stop])
def test_ranks_that_are_stuck_show_their_stacks(stuck):
    with world_across([1, 1], init=False).start(stuck) as running:
        for rank in range(2):
            await_output(running, rank)
        ends = running.wait(timeout_s=0.3)
        assert [end.ended_by_launcher for end in ends] == [True, True]
        with pytest.raises(CollectiveTimeout, match="ranks 0, 1 still ran") as caught:
            running.raise_failure()
    assert caught.value.ranks == (0, 1)
    assert "\n".join(caught.value.__notes__).count(f"in {stuck.__name__}") == 2


def test_world_has_a_timeout_of_its_own():
    with pytest.raises(CollectiveTimeout, match="rank 0 still ran"):
        world_across([1], init=False, timeout_s=0.1).run(dawdle)


def test_others_have_a_grace_period_after_a_failure(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, pathlib, sys, time\n"
        "begun = pathlib.Path(__file__).with_name('begun')\n"
        "if os.environ['UNISONO_RANK'] == '1':\n"
        "    begun.touch()\n"
        "    time.sleep(600)\n"
        "while not begun.exists():\n"
        "    time.sleep(0.01)\n"
        "sys.exit(3)\n"
    )
    world = world_across([2], grace_s=0.5)
    with pytest.raises(UnisonoError, match=r"rank 0.*exit code 3") as caught:
        world.run_command([sys.executable, str(script)])
    notes = "\n".join(caught.value.__notes__)
    assert "rank 1 was stuck here" in notes
    assert re.search("line [45]", notes)  # as it begins to sleep, or just before


def test_nothing_is_left_behind():
    before = open_files()
    with world_across([1], init=False).start(dawdle) as running:
        pids = running.pids
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
    pids = world_across([1], init=False).run(child_that_stays)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            wait_for_no_group(pid)
    assert not open_files() - before


def wait_for_no_group(group):
    """Raises as soon as it is empty; killed orphans are reaped by init."""
    until = time.monotonic() + 30
    while time.monotonic() < until:
        os.killpg(group, 0)
        time.sleep(0.01)


def test_ranks_end_when_their_parent_is_killed(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        "from test_across import dawdle\n"
        "from unisono.testing import world_across\n"
        "running = world_across([2], init=False).start(dawdle)\n"
        "print(*running.pids, flush=True)\n"
        "running.wait()\n"
    )
    path = os.pathsep.join(filter(None, sys.path))
    with subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": path},
    ) as parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        parent.kill()
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            wait_for_no_group(pid)


def test_unpicklable_functions_and_results_are_refused():
    with pytest.raises(BadArgument, match="cannot be sent"):
        world_across([1]).run(lambda comm: None)
    with pytest.raises(BadArgument, match="this rank returned, a function"):
        world_across([1], init=False).run(unsendable)


@pytest.mark.parametrize(
    ("hosts", "options", "message"),
    [
        ([], {}, "at least one"),
        ([2, 0], {}, "at least one"),
        ([2.5], {}, "whole number"),
        ([1], {"timeout_s": 0}, "seconds"),
        ([1], {"grace_s": -1}, "seconds"),
    ],
)
def test_invalid_worlds_are_refused(hosts, options, message):
    with pytest.raises(BadArgument, match=message):
        world_across(hosts, **options)


@pytest.mark.parametrize("command", ["python script.py", []])
def test_command_is_a_list(command):
    with pytest.raises(BadArgument, match="expected a list"):
        world_across([1]).run_command(command)


def test_missing_program_is_an_error():
    with pytest.raises(BadArgument, match=r"rank 0 cannot be started.*no-such-thing"):
        world_across([1]).run_command(["/no-such-thing"])


def test_functions_of_main_are_refused(monkeypatch):
    monkeypatch.setattr(dawdle, "__module__", "__main__")
    with pytest.raises(BadArgument, match="define it in a module"):
        world_across([1]).run(dawdle)
