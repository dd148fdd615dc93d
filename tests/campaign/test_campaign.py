"""A slice of the campaign: `make campaign` runs for as long as it is told."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def run(*args, out):
    command = [sys.executable, str(HERE), "--out", str(out), *map(str, args)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return json.loads(out.read_text())


@pytest.mark.parametrize(
    ("seed", "only", "trials"),
    [
        (5, ["kill", "kill_two", "kill_at_failpoint"], 6),
        (34, ["kill_in_shrink", "interrupt", "close"], 4),
        (5, ["quiet", "pause", "fork_exit"], 2),
    ],
    ids=["kills", "leaving", "healing"],
)
def test_random_trials_go_as_promised(seed, only, trials, tmp_path):
    told = run("--seed", seed, "--trials", trials, "--only", *only, out=tmp_path / "f")
    assert told["trials"] == trials
    assert not told["failures"]


def test_a_trial_follows_from_its_seed_and_number():
    from campaign.plan import draw

    assert draw(5, 7) == draw(5, 7)
    assert draw(5, 7) != draw(5, 8)


def test_a_wrong_result_is_told_with_the_trial_that_shows_it(tmp_path):
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
