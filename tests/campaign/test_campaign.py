"""A short part of the campaign: `make campaign` runs for MINUTES."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from unisono import _native

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
