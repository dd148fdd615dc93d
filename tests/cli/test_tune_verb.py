"""unisono tune, unisono explain --on this, and unisono simulate train."""

import json

import pytest

from unisono.runtime.plan import tuned

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("UNISONO_TUNED", str(tmp_path / "table.json"))
    return tmp_path / "table.json"


@pytest.mark.sweep
def test_tuned_algorithm_is_chosen(run, file):
    """Three ranks on two emulated hosts: measured, written, explained."""
    brief = ("--quick", "--collective", "barrier,all_gather")
    code, out, err = run("tune", "-n", "3", "--per-host", "2", *brief)
    assert (code, err) == (0, "")
    assert "# inside" in out
    assert "# across" in out
    assert f"# wrote {file}" in out
    (world,) = tuned.load(file).worlds
    assert (world.n, world.placement) == (3, "0x2.1")
    rows = {part.collective: part.rows for part in world.choices}
    code, out, _ = run(
        *("explain", "all_gather", "--on", "this", "-n", "3", "--per-host", "2"),
        *("-b", "32K", "--json"),
    )
    (result,) = json.loads(out)
    assert result["by"] == "table"
    near = next(row for row in rows["all_gather"] if row.upto >= 32 << 10)
    assert result["algorithm"] == near.algorithm
    assert result["measured"] == near.measured
    assert result["runner_up"] == near.runner_up
    assert result["predicted"] == near.predicted


def test_explain_on_this_without_a_table_says_so(run, file, monkeypatch):
    monkeypatch.setenv("UNISONO_TUNED", "0")
    code, out, _ = run("explain", "all_reduce", "--on", "this", "-n", "4")
    assert code == 0
    assert out.count("there is no table (unisono tune)") == 5
    assert "the rules for ranks that share memory" in out
    code, out, _ = run(
        *("explain", "all_reduce", "--on", "this", "-n", "4", "--per-host", "2")
    )
    assert "the model of hosts on a network" in out
    assert "predicted" in out


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("tune -n 1", "expected 2 to"),
        ("tune -n x", "expected one number"),
        ("tune --collective all_redcue", "nearest: all_reduce"),
        ("tune -d float31", "element type"),
        ("explain all_reduce", "--on this"),
        ("explain all_reduce ring --on this", "--on this"),
        ("explain all_reduce --on that", "--on this"),
        ("explain all_redcue --on this", "nearest: all_reduce"),
        ("explain all_reduce --on this --per-host 0", "1 or more"),
        ("simulate train --model gtp2", "nearest: gpt2"),
        ("simulate train --tp 3", "does not divide"),
        ("simulate train -t switch:4", "give peak="),
        ("simulate train --strategy fdsp", "nearest: fsdp"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(run, file, command, message):
    code, _, err = run(*command.split())
    assert code == 2
    assert message in err
    assert err.count("\n") == 1


def test_file_that_is_not_a_table_is_refused_before_measuring(run, file):
    file.write_text("dear diary")
    file.chmod(0o600)
    for command in ("tune -n 2", "explain all_reduce --on this"):
        code, out, err = run(*command.split())
        assert code == 2
        assert "not a tuned table" in err
        assert out == ""
    assert file.read_text() == "dear diary"


def test_training_step_is_shown_with_its_assumptions(run):
    command = "simulate train --model 70B -t dgx-h100:64 --tp 8 --strategy fsdp"
    code, out, _ = run(*command.split())
    assert code == 0
    assert out.startswith("70B (70.6 billion parameters) on dgx-h100:64")
    for word in ("step", "exposed", "efficiency", "assumed:", "989 Tflop/s"):
        assert word in out
    code, out, _ = run(*command.split(), "--json", "--no-recompute")
    result = json.loads(out)
    assert result["n"] == 512
    assert result["setup"]["recompute"] is False
    assert result["assumptions"]


def test_nested_verbs_have_help(run):
    for verb in ("tune", "simulate", "simulate train"):
        code, out, _ = run(*verb.split(), "--help")
        assert code == 0
        assert f"Example: unisono {verb}" in out
        assert "--json" in out
