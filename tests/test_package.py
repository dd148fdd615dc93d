"""The package as a whole: what importing it loads, what it exports, examples."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import unisono

ROOT = Path(__file__).parents[1]


def fresh(code, *options):
    done = subprocess.run(
        [sys.executable, *options, "-c", code],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_of_unisono_imports_nothing_heavy():
    loaded = fresh("import sys, unisono; print(*sys.modules)").split()
    assert not {"torch", "rich", "cyclopts", "numpy", "matplotlib"} & set(loaded)


def test_schedules_need_numpy_and_msgspec_alone():
    code = """
import sys, unisono
print(unisono.explain(unisono.schedule("all_reduce", "ring", n=5))[:0])
print(*sys.modules)
"""
    assert not {"torch", "rich", "cyclopts", "matplotlib"} & set(fresh(code).split())


def test_first_call_imports_nothing_of_others():
    """Ctrl-C is lost where a module of Cython, as NumPy's random, is being imported."""
    code = """
import sys
import numpy as np
from unisono.testing import world
with world(2) as w:
    before = {*sys.modules}
    w.run(lambda comm: comm.all_reduce(np.ones(3)))
print(*{name.partition(".")[0] for name in {*sys.modules} - before})
"""
    assert set(fresh(code).split()) <= {"unisono"}


def test_everything_works_without_the_native_core():
    code = """
import sys
sys.modules["unisono._native"] = None
import unisono
from unisono.schedule import domains
assert domains._native is None
for name in ("ring", "direct", "dissemination:carry", "hierarchical"):
    print(unisono.schedule("all_reduce", name, n=13).verify().transfers)
print(unisono.schedule("all_to_all", "bruck", n=13).verify().transfers)
"""
    with_native = [
        unisono.schedule("all_reduce", name, n=13).verify().transfers
        for name in ("ring", "direct", "dissemination:carry", "hierarchical")
    ]
    bruck = unisono.schedule("all_to_all", "bruck", n=13).verify().transfers
    assert [int(x) for x in fresh(code).split()] == [*with_native, bruck]


def test_native_core_was_built():
    from unisono.schedule import domains

    assert domains._native is not None


def test_public_names_are_exact():
    assert sorted(unisono.__all__) == unisono.__all__
    for name in unisono.__all__:
        assert getattr(unisono, name) is not None
        assert name in dir(unisono)
    with pytest.raises(AttributeError, match="no attribute 'all_reduec'"):
        _ = unisono.all_reduec


def test_schedule_is_the_function_whatever_was_imported_before():
    code = """
import unisono.schedule.step
from unisono.schedule import Step
import unisono
print(unisono.schedule("all_reduce", "ring", n=2).num_steps, Step.__name__)
"""
    assert fresh(code).split() == ["2", "Step"]


EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SHORTER = {"train_gpt.py": ["--steps", "2"]}


@pytest.mark.cases(2)
@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_every_example_runs(example, tmp_path):
    run_example(example, tmp_path, *SHORTER.get(example.name, []))


@pytest.mark.sweep
@pytest.mark.parametrize("name", SHORTER)
def test_long_examples_run_in_full(name, tmp_path):
    run_example(ROOT / "examples" / name, tmp_path)


def run_example(example, tmp_path, *args):
    done = subprocess.run(
        [sys.executable, str(example), *args],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_command_line_names_the_missing_extra():
    code = """
import sys
sys.modules["cyclopts"] = None
from unisono.cli import main
sys.exit(main(["env"]) - 2)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert done.stderr == (
        "unisono: the command line needs: pip install 'unisono[cli]'\n"
    )


def test_python_dash_m_is_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "unisono", "env"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert unisono.__version__ in done.stdout


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_terminal_without_unicode_shows_the_explanation(encoding):
    done = subprocess.run(
        [sys.executable, "-m", "unisono", "explain", "all_reduce", "ring", "-n", "3"],
        env={**os.environ, "PYTHONIOENCODING": encoding},
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"every rank ends with a+b+c" in done.stdout


def test_ctrl_c_ends_with_130_and_no_traceback():
    command = [sys.executable, "-m", "unisono", "verify", "ring", "-n", "1..4,3000"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        running.stdout.readline()  # it is at work
        running.send_signal(signal.SIGINT)
        _, err = running.communicate(timeout=60)
    assert (running.returncode, err) == (130, "")


def test_closed_output_pipe_is_not_an_error():
    command = f"{sys.executable} -m unisono explain all_reduce ring -n 8 | head -1"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_files_and_functions_stay_readable():
    for file in sorted((ROOT / "src").rglob("*.py")):
        assert len(file.read_text(encoding="utf-8").splitlines()) <= 500, file


def test_version_is_the_same_everywhere():
    from importlib.metadata import version

    assert version("unisono") == unisono.__version__
