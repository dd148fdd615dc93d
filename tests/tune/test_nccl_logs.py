"""Logs of nccl-tests: what is read, what is refused, and what is fitted."""

import pytest

from unisono.errors import BadArgument, BadLog, NotOffered
from unisono.simulate.engines.measured import dump, load
from unisono.tune import fit_logs, read_log

HEAD = """\
#                                               out-of-place           in-place
#   size  count  type  redop  root  time  algbw  busbw #wrong  time  algbw  busbw #wrong
#    (B)  (elements)                (us) (GB/s) (GB/s)         (us) (GB/s) (GB/s)
"""
SIZES = [1 << k for k in range(10, 31, 2)]


def row(size, n=8, *, wrong="0", prefix="", root="-1 "):
    """A row of an all_reduce that takes 20 µs, and moves 200 GB/s."""
    us = 20 + size / 200e3
    rate = size / us / 1e3
    bus = rate * 2 * (n - 1) / n
    half = f"{us:.2f} {rate:.2f} {bus:.2f} {wrong}"
    return f"{prefix}   {size}  {size // 4}  float  sum  {root}{half}  {half}\n"


def log(tmp_path, text):
    file = tmp_path / "test.log"
    file.write_text(text)
    return file


def rows(n=8, **how):
    return "".join(row(size, n, **how) for size in SIZES)


@pytest.mark.parametrize("prefix", ["", "0: ", "[1,0]<stdout>:", "12:00:01.5Z "])
@pytest.mark.parametrize("root", ["-1 ", ""])  # older versions do not print the root
def test_rows_are_found_behind_what_launchers_print(tmp_path, prefix, root):
    text = HEAD + rows(prefix=prefix, root=root)
    (run,) = read_log(log(tmp_path, text))
    assert run.sizes == SIZES
    assert run.seconds[0] == pytest.approx(20.01e-6, rel=1e-3)
    assert (run.collective, run.ranks) == ("all_reduce", 8)  # by the bus bandwidths


def test_log_says_what_it_is_of(tmp_path):
    ranks = "".join(f"#  Rank {r} Group 0 Pid 7 on a device 0\n" for r in range(4))
    text = "# Collective test starting: all_gather_perf\n" + ranks + HEAD
    body = "  0 0 float none -1 0.17 0.00 0.00 0 0.17 0.00 0.00 0\n"
    body += "  4096 256 float none -1 9.00 0.46 0.34 N/A 8.00 0.51 0.38 N/A\n"
    (run,) = read_log(log(tmp_path, text + body))
    assert (run.collective, run.ranks, run.sizes) == ("all_gather", 4, [4096])
    assert run.in_place == [pytest.approx(8e-6)]


def test_each_table_is_a_run(tmp_path):
    text = HEAD + rows(8) + HEAD + rows(16)
    assert [r.ranks for r in read_log(log(tmp_path, text))] == [8, 16]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no rows as nccl-tests prints them"),
        (HEAD, "no rows as nccl-tests prints them"),
        (HEAD + rows() + "  4096  1024  float  sum  -1  12.0\n", r"log:15: .*cut off"),
        (HEAD + row(4096, wrong="17"), "17 values were wrong at 4096 bytes"),
        (HEAD + "  64 16 float sum -1 0 0 0 0 0 0 0 0\n", "a time of 0 at 64 bytes"),
        (HEAD + row(1024), "does not say of which collective"),
    ],
)
def test_bad_logs_are_refused_with_the_place(tmp_path, text, why):
    with pytest.raises(BadLog, match=why):
        read_log(log(tmp_path, text))


def test_missing_file_and_contradictions_are_named(tmp_path):
    with pytest.raises(BadLog, match="cannot be read"):
        read_log(tmp_path / "none.log")
    with pytest.raises(BadLog, match="number of ranks is wrong"):
        read_log(log(tmp_path, HEAD + rows(8)), ranks=2)
    with pytest.raises(BadLog, match="2 sizes of all_reduce on 8 ranks"):
        fit_logs([log(tmp_path, HEAD + row(1 << 28) + row(1 << 30))])


def test_fit_is_an_engine_that_can_be_saved(tmp_path):
    made = fit_logs([log(tmp_path, HEAD + rows())], name="mine")
    file = tmp_path / "mine.json"
    file.write_bytes(dump(made))
    read = load(file)
    assert read == made
    calls = read.find("all_reduce", 8)
    for size in (2048, 1 << 25, 1 << 31):
        assert calls.at(size) == pytest.approx(20e-6 + size / 200e9, rel=0.01)
    with pytest.raises(NotOffered, match="on 4 ranks was not measured"):
        read.find("all_reduce", 4)
    file.write_text('{"name": "mine"}')
    with pytest.raises(BadArgument, match="not a file that `unisono fit`"):
        load(file)


def test_half_of_the_sizes_predicts_the_other_half(tmp_path):
    half = "".join(row(size) for size in SIZES[::2])
    calls = fit_logs([log(tmp_path, HEAD + half)]).find("all_reduce", 8)
    for size in SIZES[1::2]:
        assert calls.at(size) == pytest.approx(20e-6 + size / 200e9, rel=0.03)
