"""What ranks print, as the launcher shows it: labels, progress bars, tracebacks."""

import io
import re

import pytest

from unisono.launch.output import RankOutput
from unisono.launch.screen import OutputOptions

TRACEBACK = b"""Traceback (most recent call last):
  File "train.py", line 3, in <module>
    load()
ValueError: %s
"""


class Terminal(io.BytesIO):
    """Bytes that were written, on what says that it is a terminal."""

    def isatty(self):
        return True

    def screen(self):
        """What is to be seen: carriage returns and erasures are obeyed."""
        lines = [""]
        for part in re.split(r"(\n|\r\x1b\[K)", self.getvalue().decode()):
            if part == "\n":
                lines.append("")
            elif part == "\r\x1b[K":
                lines[-1] = ""
            else:
                lines[-1] += part
        return lines


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    return Terminal()


def streams(n, out, err, **options):
    output = RankOutput(out, err, OutputOptions(**options))
    return output, [output.streams(rank) for rank in range(n)]


def test_lines_are_labelled_with_stream_and_time():
    out, err = io.BytesIO(), io.BytesIO()
    _, ranks = streams(2, out, err, tag=True, timestamps=True)
    ranks[1][0].write(b"a\nb\n")
    ranks[0][1].write(b"c\n")
    clock = rb"\d\d:\d\d:\d\d\.\d\d\d"
    assert re.fullmatch(
        clock + rb" \[1\]<stdout> a\n" + clock + rb" \[1\]<stdout> b\n", out.getvalue()
    )
    assert re.fullmatch(clock + rb" \[0\]<stderr> c\n", err.getvalue())


def test_progress_bar_is_shown_live_below_the_lines(terminal):
    _, ranks = streams(2, terminal, terminal)
    (_, err0), (out1, err1) = ranks
    err1.write(b"\r10%")
    assert terminal.screen() == ["[1] 10%"]
    err0.write(b"\r 5%")
    err1.write(b"\r20%")
    assert terminal.screen() == ["[0]  5%"]  # the lowest rank's alone
    out1.write(b"a line\n")
    assert terminal.screen() == ["[1] a line", "[0]  5%"]
    err0.write(b"\r 7%\r 8%")
    assert terminal.screen() == ["[1] a line", "[0]  8%"]
    err0.write(b"\r100%\n")
    assert terminal.screen() == ["[1] a line", "[0] 100%", "[1] 20%"]
    err1.write(b"\r30%\r")
    assert terminal.screen()[-1] == "[1] 30%"
    err1.finish()
    assert terminal.screen() == ["[1] a line", "[0] 100%", "[1] 30%", ""]


def test_long_progress_bar_stays_in_one_line(terminal):
    _, ranks = streams(1, terminal, terminal)
    ranks[0][1].write(b"\r" + b"x" * 200)
    assert terminal.screen() == ["[0] " + "x" * 75]


def test_progress_bars_pass_unchanged_where_there_is_no_terminal(monkeypatch):
    out, err = io.BytesIO(), io.BytesIO()
    _, ranks = streams(1, out, err)
    ranks[0][1].write(b"\r1%\r2%")
    assert err.getvalue() == b""
    ranks[0][1].write(b"\n")
    assert err.getvalue() == b"[0] \r1%\r2%\n"
    monkeypatch.setenv("TERM", "dumb")
    simple = Terminal()
    _, ranks = streams(1, simple, simple)
    ranks[0][1].write(b"\r1%")
    ranks[0][1].write(b"\r2%\n")
    assert simple.getvalue() == b"[0] \r1%\r2%\n"


def test_same_traceback_of_many_ranks_is_shown_once(tmp_path):
    err = io.BytesIO()
    output, ranks = streams(5, io.BytesIO(), err, log_dir=tmp_path)
    for rank, (_, stderr) in enumerate(ranks):
        stderr.write(b"before\n" if rank == 0 else b"")
        stderr.write(TRACEBACK % (b"other" if rank == 3 else b"same"))
    for stdout, stderr in ranks:
        stdout.finish()
        stderr.finish()
    output.close()
    lines = err.getvalue().decode().splitlines()
    assert lines[0] == "[0] before"
    assert lines[4] == "[0] ValueError: same"
    assert lines[5] == "unisono: ranks 1, 2: the same traceback as rank 0"
    assert lines[9] == "[3] ValueError: other"
    assert lines[10:] == ["unisono: rank 4: the same traceback as rank 0"]
    assert (tmp_path / "rank4.log").read_bytes() == TRACEBACK % b"same"
    assert b"ValueError: same" in ranks[4][1].last  # for the report of the failure


def test_chained_tracebacks_are_folded_together_and_later_lines_are_shown():
    err = io.BytesIO()
    output, ranks = streams(2, io.BytesIO(), err)
    chain = b"\nDuring handling of the above exception, another exception occurred:\n\n"
    for _, stderr in ranks:
        stderr.write(TRACEBACK % b"1" + chain + TRACEBACK % b"2")
    ranks[1][1].write(b"\nafter\n")
    output.close()
    lines = err.getvalue().decode().splitlines()
    assert lines[10] == "[0] ValueError: 2"
    told = "unisono: rank 1: the same traceback as rank 0"
    assert [line for line in lines[11:] if line != "[1] "] == [told, "[1] after"]


def test_traceback_that_one_rank_prints_again_is_shown_again():
    err = io.BytesIO()
    _, ranks = streams(1, io.BytesIO(), err)
    for _ in range(2):
        ranks[0][1].write(TRACEBACK % b"x")
    assert err.getvalue().count(b"ValueError") == 2


def test_traceback_cut_off_by_the_end_of_a_rank_is_shown():
    err = io.BytesIO()
    _, ranks = streams(1, io.BytesIO(), err)
    ranks[0][1].write(b"".join((TRACEBACK % b"x").splitlines(keepends=True)[:2]))
    ranks[0][1].finish()
    assert err.getvalue().count(b"\n") == 2
