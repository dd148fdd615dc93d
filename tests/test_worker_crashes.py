"""A worker that dies in a test: its stacks come last in the output."""

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import os
import signal
import pytest

@pytest.mark.parametrize("number", range(50))
def test_many(number, tmp_path_factory):
    died = tmp_path_factory.getbasetemp().parent / "died"
    if number == 5 and not died.exists():
        died.touch()
        os.kill(os.getpid(), signal.SIGSEGV)

@pytest.mark.parametrize("number", range(50))
def test_others(number):
    pass
"""

CONFTEST = """
import sys
sys.path.append({support!r})

def pytest_configure(config):
    import worker_crashes
    worker_crashes.register(config)
"""


@pytest.mark.sweep
def test_stacks_of_a_worker_that_died_are_printed_last(tmp_path):
    support = Path(__file__).parent / "support"
    (tmp_path / "test_dies.py").write_text(TESTS)
    (tmp_path / "conftest.py").write_text(CONFTEST.format(support=str(support)))
    command = [sys.executable, "-m", "pytest", "-n", "2", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "--dist", "loadscope", "--basetemp", str(tmp_path / "temp")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "ended: by SIGSEGV" in done.stdout
    last = done.stdout.partition("ended: by SIGSEGV")[2]
    assert "libc.so" in last
    assert 'test_dies.py", line 11 in test_many' in last
    assert "_pytest" not in last
