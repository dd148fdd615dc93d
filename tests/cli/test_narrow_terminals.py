"""Terminals that are narrow, that have ASCII alone, and `--json` for programs."""

import io
import json
import re
import sys

import pytest

from unisono.cli import main, output

COMMANDS = [
    "algorithms all_reduce -n 13 --verify",
    "algorithms scatter -n 5",
    "plan 7B -n 64",
    "plan 7B -n 64 --compare",
    "plan 7B -n 64 --mesh dp=8,tp=8 --memory 80G",
    "simulate all_reduce -t switch:8 -b 1K -e 1M -f 32 --algorithm ring,tree",
    "simulate all_reduce -t switch:8 -b 1K --algorithm ring",
    "simulate train --model 7B -t dgx-h100:2",
    "topology list",
    "topology show dgx-h100:2",
    "topology detect",
    "explain all_reduce --on this -n 4 -b 1M",
    "verify ring -n 3",
    "env",
]
TIMES = re.compile(r"[\d.]+ s\b")


@pytest.fixture
def narrow(monkeypatch):
    """Makes standard output a terminal of so many columns, without colours."""

    def make(columns):
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setenv("TERM", "dumb")

    return make


@pytest.mark.parametrize("command", COMMANDS)
def test_lines_fit_sixty_columns_and_nothing_is_lost(run, narrow, command):
    code, wide, _ = run(*command.split())
    assert code == 0
    narrow(60)
    code, folded, _ = run(*command.split())
    assert code == 0
    assert TIMES.sub("", folded).split() == TIMES.sub("", wide).split()
    for line in folded.splitlines():
        assert len(line) <= 60 or " " not in line.strip()


def test_columns_below_stay_aligned(narrow, capsys):
    narrow(20)
    for row in (("a", "b", "c"), ("one", "22", "333"), ("two", "2", "")):
        output.print_row(row, (8, -8, -9))
    assert capsys.readouterr().out == (
        "a                b\n            c\none             22\n          333\n"
        "two              2\n"
    )


def test_lines_of_bench_are_cut_behind_the_same_columns(narrow, capsys):
    narrow(12)
    ruler = "# size  count   time"
    output.print_aligned([ruler, "     8      2   1.25", "#"], ruler)
    expected = "# size", "  count", "   time", "     8", "      2", "   1.25", "#"
    assert capsys.readouterr().out.splitlines() == [*expected]
    narrow(80)
    output.print_aligned([ruler], ruler)
    assert capsys.readouterr().out == f"{ruler}\n"


def test_files_and_pipes_are_not_folded(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    assert output.columns() is None
    output.print_text("word " * 40)
    assert capsys.readouterr().out == "word " * 40 + "\n"


@pytest.mark.parametrize("command", [*COMMANDS, "algorithms --help", "bench --help"])
def test_ascii_terminals_get_readable_text(monkeypatch, command):
    monkeypatch.setenv("TERM", "dumb")
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="ascii") for _ in range(2)]
    monkeypatch.setattr("sys.stdout", streams[0])
    monkeypatch.setattr("sys.stderr", streams[1])
    assert main(command.split()) == 0
    for stream in streams:
        stream.flush()
        text = stream.buffer.getvalue().decode("ascii")
        asked = re.compile(r"\?$", re.MULTILINE)
        assert "?" not in asked.sub("", text)  # what could not be encoded
        assert "\x1b" not in text


@pytest.mark.parametrize(
    "command",
    [
        *(c for c in COMMANDS if not c.startswith("explain")),
        "explain all_reduce ring -n 3",
        "bench all_reduce -n 2 -b 8 -e 8 --rounds 1 --iters 2 -w 1",
    ],
)
def test_json_is_alone_on_standard_output(run, command):
    code, out, _ = run(*command.split(), "--json")
    assert code == 0
    assert json.loads(out) is not None
    assert out.count("\n") == 1
