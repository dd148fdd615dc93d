"""What commands show while they work."""

import importlib
import io
import time

import pytest

from unisono.cli import _progress, simulate
from unisono.transports import waiting


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    """Makes standard error a terminal, on which everything is shown soon."""

    def make():
        made = Terminal()
        monkeypatch.setattr("sys.stderr", made)
        monkeypatch.setattr(_progress, "NOTICE_S", -1.0)
        monkeypatch.setattr(waiting, "NOTICE_S", 1e-3)
        monkeypatch.setenv("TERM", "xterm")
        return made

    return make


def test_line_is_erased(terminal):
    shown = terminal()
    progress = _progress.Progress()
    progress.what = "all_reduce"
    progress("ring")
    progress.clear()
    assert shown.getvalue() == "\r\x1b[Kmeasuring all_reduce: ring\r\x1b[K"


def test_terminal_that_cannot_erase_gets_lines(terminal, monkeypatch):
    shown = terminal()
    monkeypatch.setenv("TERM", "dumb")
    progress = _progress.Progress()
    progress.what = "all_reduce"
    progress("ring")
    progress.clear()
    assert shown.getvalue() == "measuring all_reduce: ring\n"


def test_files_get_nothing(monkeypatch, capsys):
    monkeypatch.setattr(_progress, "NOTICE_S", -1.0)
    _progress.Progress()("ring")
    with _progress.waiting(lambda: "waits"):
        pass
    assert capsys.readouterr().err == ""


def test_simulation_shows_which_algorithm_it_is_at(terminal, run):
    shown = terminal()
    command = "simulate all_reduce -t ring:4 --algorithm ring,tree"
    assert run(*command.split())[0] == 0
    for text in ("1 of 2: ring", "2 of 2: tree"):
        assert f"simulating all_reduce on ring:4, {text}" in shown.getvalue()


def test_interrupted_simulation_says_that_nothing_is_kept(monkeypatch, run):
    def interrupted(*_, progress, **__):
        progress("ring")
        raise KeyboardInterrupt

    monkeypatch.setattr(simulate, "compare", interrupted)
    code, _, err = run("simulate", "all_reduce", "-t", "ring:4")
    assert code == 130
    assert "interrupted while simulating ring: nothing is kept" in err


@pytest.mark.parametrize(
    ("command", "module", "name", "text"),
    [
        ("verify ring -n 5", "verify", "_proofs", "proving all_gather by ring, n = 5"),
        (
            "simulate train --model 7B -t dgx-h100:2",
            "_train",
            "simulated",
            "simulating a step of 7B on dgx-h100:2",
        ),
        (
            "simulate all_reduce -t ring:4 -b 1K --algorithm ring",
            "simulate",
            "run",
            "simulating ring on ring:4",
        ),
    ],
)
def test_long_computations_are_named(
    terminal, run, monkeypatch, command, module, name, text
):
    shown = terminal()
    there = importlib.import_module(f"unisono.cli.{module}")
    real = getattr(there, name)

    def slow(*arguments, **options):
        while text not in shown.getvalue():
            time.sleep(1e-3)
        return real(*arguments, **options)

    monkeypatch.setattr(there, name, slow)
    assert run(*command.split())[0] == 0
