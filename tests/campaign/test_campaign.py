"""A short part of the campaign: `make campaign` runs for MINUTES."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from unisono import _native
from unisono.testing.hosts import needs_hosts

pytestmark = pytest.mark.one_in(3)

HERE = Path(__file__).parent


def run(*args, out):
    command = [sys.executable, str(HERE), "--out", str(out), *map(str, args)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return json.loads(out.read_text())


@pytest.mark.parametrize(
    ("seed", "only", "trials"),
    [
        (5, ["kill", "kill_two", "kill_at_failpoint"], 3),
        (34, ["kill_in_shrink", "interrupt", "close"], 3),
        (5, ["quiet", "pause", "fork_exit"], 1),
        pytest.param(
            5,
            ["kill", "kill_two", "kill_at_failpoint"],
            6,
            marks=pytest.mark.sweep,
        ),
        pytest.param(
            34, ["kill_in_shrink", "interrupt", "close"], 4, marks=pytest.mark.sweep
        ),
        pytest.param(5, ["quiet", "pause", "fork_exit"], 2, marks=pytest.mark.sweep),
    ],
    ids=["kills", "leaving", "healing", "more kills", "more leaving", "more healing"],
)
def test_random_trials_keep_all_guarantees(seed, only, trials, tmp_path):
    result = run(
        "--seed", seed, "--trials", trials, "--only", *only, out=tmp_path / "f"
    )
    assert result["trials"] == trials
    assert not result["failures"]


@pytest.mark.sweep
def test_random_trials_of_all_kinds_keep_all_guarantees(tmp_path):
    result = run("--seed", 1, "--trials", 40, out=tmp_path / "f")
    assert result["trials"] == 40
    assert not result["failures"]


def test_error_pids_match_those_in_its_message():
    from campaign.judge import judge_work
    from campaign.plan import Phase

    record = {"error": "PeerLost", "named": [1], "at": 0.0, "calls": 3, "kind": "split"}
    record["message"] = "split: rank 1 (pid 12 on host0) died"
    phase = Phase("kill_two", victims=(1, 2))
    assert not judge_work(phase, {0: record}, 0.0, True, {0: 10, 1: 12, 2: 11})[0]
    assert judge_work(phase, {0: record}, 0.0, True, {0: 10, 1: 11, 2: 12})[0]


def test_half_of_a_world_continues_only_with_its_first_rank():
    from campaign.judge import may_be_too_few
    from campaign.plan import Phase

    phase = Phase("kill")
    assert may_be_too_few(phase, [5, 4], {5}, True)
    assert not may_be_too_few(phase, [5, 4], {4}, True)


def test_short_partition_may_cost_ranks_only_if_it_was_too_long():
    from campaign.judge import judge_work, outlasts
    from campaign.plan import Phase

    assert not outlasts(0.3, 2)  # what is asked for at most
    assert outlasts(1.0, 2)
    phase = Phase("short_partition", victims=(2,), side=(1,))

    def problems(too_long, error, named):
        record = {"error": error, "named": named, "at": 0.0, "message": ""}
        result = judge_work(phase, {0: record}, 0.0, True, {}, too_long=too_long)
        return result[0]

    assert problems(False, "PeerLost", [2])
    assert not problems(True, "PeerLost", [2])
    assert problems(True, "PeerLost", [1])  # of its own side
    assert problems(True, "CollectiveTimeout", [2])
    assert problems(True, "WrongResult", [])


LASTS = """
import os, time
os.environ["UNISONO_TUNED"] = "0"
from campaign import driver
from campaign.plan import Phase, Trial
from unisono.testing import Hosts

class Slow(Hosts):
    def heal(self):
        time.sleep(5.0)
        super().heal()

phase = Phase("short_partition", victims=(1,), side=(1,), turns=10_000)
trial = Trial(1, 1, "namespaces", 2, (0, 1), False, False, (phase, Phase("quiet")))
driver.become_reaper()
with Slow(2) as made:
    driver.spare_children()
    found = driver.run_trial(trial, made)
assert not found.problems, (found.problems, found.stderr)
print(*(strike for strike, _ in found.done))
"""


@needs_hosts()
@pytest.mark.sweep
def test_trial_ends_after_a_short_partition_that_was_too_long():
    """As one is on a machine that is busy."""
    paths = os.pathsep.join([str(HERE.parent), str(HERE.parent / "support")])
    env = os.environ | {"PYTHONPATH": paths}
    command = [sys.executable, "-c", LASTS]
    ended = subprocess.run(
        command, capture_output=True, text=True, check=False, env=env
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["short_partition", "too_long_partition"]


def test_trial_is_determined_by_seed_and_number():
    from campaign.plan import draw

    assert draw(5, 7) == draw(5, 7)
    assert draw(5, 7) != draw(5, 8)


def test_wrong_result_is_reported_with_its_trial(tmp_path):
    """A reference that is wrong on purpose: each call seems to return nonsense."""
    env = os.environ | {"CAMPAIGN_WRONG_REFERENCE": "1"}
    command = [sys.executable, str(HERE), "--seed", "1", "--trial", "2"]
    command += ["--only", "quiet"]
    ended = subprocess.run(
        command, capture_output=True, text=True, check=False, env=env
    )
    assert ended.returncode == 1
    assert "python tests/campaign --seed 1 --trial 2 --only quiet" in ended.stdout
    assert "WrongResult" in ended.stdout


KEEPS = """
from types import SimpleNamespace
from campaign.leftovers import holding, holding_before, let_decrypted_bytes_wait
before = holding_before(SimpleNamespace(tls=True))
let_decrypted_bytes_wait()
assert not holding().more_than(before), holding().more_than(before)
"""


@pytest.mark.skipif(bool(_native.tls_missing()), reason="no OpenSSL 3")
def test_descriptor_that_a_process_keeps_for_tls_is_no_leftover():
    """In a process of its own: this one may have made it for another test."""
    env = os.environ | {"PYTHONPATH": str(HERE.parent)}
    command = [sys.executable, "-c", KEEPS]
    ended = subprocess.run(
        command, capture_output=True, text=True, check=False, env=env
    )
    assert ended.returncode == 0, ended.stderr
