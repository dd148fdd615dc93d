"""What is known of a pytest worker that ended in the middle of a test, told at the end.

xdist says only which test it was. Here a worker that gets a fatal signal leaves the
native stack of that thread, and those of all threads in Python, in a file. The
controller prints it last, with the signal: of a long run, the end is what is kept.
"""

import faulthandler
import os
import re
import signal
import tempfile
from pathlib import Path

import pytest

from unisono import _native

_RUNNER = re.compile(r"/(_pytest|pluggy|xdist|execnet)/|File \"<string>\"")
"""Lines of a stack that are the same for every test."""


class WorkerSide:
    """In a worker: stacks go to a file."""

    def __init__(self, folder):
        name = os.environ["PYTEST_XDIST_WORKER"]
        self._file = (Path(folder) / name).open("w")

    @pytest.hookimpl(trylast=True)  # after pytest's own, which writes to stderr
    def pytest_sessionstart(self):
        faulthandler.enable(self._file)
        _native.write_stack_on_crash(self._file.fileno())  # first, then Python's


class ControllerSide:
    """In the process that starts workers: files are read when one is lost."""

    def __init__(self):
        self._folder = tempfile.TemporaryDirectory()
        self._found = []

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node):
        node.workerinput["stacks"] = self._folder.name

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node, error):
        if error:
            name = node.gateway.id
            file = Path(self._folder.name) / name
            stacks = file.read_text() if file.exists() else ""
            lines = [line for line in stacks.splitlines() if not _RUNNER.search(line)]
            self._found.append((name, end_of(node), "\n".join(lines)))

    def pytest_terminal_summary(self, terminalreporter):
        for name, end, stacks in self._found:
            terminalreporter.section(f"worker {name} ended: {end}")
            terminalreporter.write_line(stacks or "It left no stacks.")


def end_of(node):
    """How the process of a worker ended, in words."""
    popen = getattr(getattr(node.gateway, "_io", None), "popen", None)
    if popen is None:
        return "in an unknown way"
    try:
        code = popen.wait(10)
    except Exception as error:  # it lives on, or the gateway is another kind
        return f"in an unknown way ({error})"
    return f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"


def register(config):
    """Watch the workers of this run, or be watched as one of them."""
    given = getattr(config, "workerinput", None)
    if given is None:
        config.pluginmanager.register(ControllerSide(), "worker_crashes")
    elif "stacks" in given:
        config.pluginmanager.register(WorkerSide(given["stacks"]), "worker_crashes")
