"""`unisono synthesize`, in this process."""

import json
from pathlib import Path

import pytest

from unisono.cli.app import run
from unisono.errors import BadArgument

SMALL = ["synthesize", "all_reduce", "-t", "torus:2x3", "--failed", "0-1", "-b", "16M"]


def test_says_what_was_made_and_what_the_library_has(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "mine.py"
    assert run([*SMALL, "-o", str(file)]) == 0
    text = capsys.readouterr().out
    assert "all_reduce on torus:2x3, 6 ranks" in text
    assert "optimum    100.0%" in text
    assert "times as long" in text
    assert "wrote" in text
    assert run(["verify", str(file), "-n", "6"]) == 0
    simulated = ["simulate", "all_reduce", "-t", "torus:2x3", "-b", "1M"]
    assert run([*simulated, "--algorithm", str(file), "--failed", "0-1"]) == 0
    assert "all_reduce by mine" in capsys.readouterr().out


def test_json_has_the_same_facts(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*SMALL, "--slow", "1-2=0.5", "--alone", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["verified"] is True
    assert facts["n"] == 6
    assert 0.98 <= facts["optimum"] <= 1.0
    assert facts["reached"] >= facts["least"] > 0
    assert facts["time"] >= facts["reached"] * facts["size"]
    assert "library" not in facts


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["-o", "mine.xml"], "expected one of .py"),
        (["--slow", "0-1=half"], "'half' is not a number"),
        (["--failed", "7-9"], "no such link"),
    ],
)
def test_wrong_words_are_refused(words: list[str], why: str) -> None:
    with pytest.raises(BadArgument, match=why):
        run(["synthesize", "all_reduce", "-t", "ring:4", *words])


def test_says_why_the_optimum_is_not_reached(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [
        "synthesize",
        "all_gather",
        "-t",
        "fat-tree:4",
        "--failed",
        "edge0-agg0",
        "-b",
        "1M",
        "--alone",
    ]
    assert run([*words, "--segments", "2"]) == 0
    assert "leave the rest unused" in capsys.readouterr().out


def test_one_rank_has_nothing_to_compare(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["synthesize", "all_reduce", "-t", "ring:1", "-b", "1K"]) == 0
    assert "times as long" not in capsys.readouterr().out


def test_small_buffers_are_searched_for(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["synthesize", "broadcast", "-t", "cloud:2x2", "--small"]
    assert run(words) == 0
    text = capsys.readouterr().out
    assert "one after the other" in text
    assert "no schedule is quicker" in text
    assert "times as long" in text
    assert run([*words, "--json", "--alone"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["size"] == 4096
    assert facts["time"] >= facts["least"] > 0
    assert not facts["optimal"]


def test_it_says_what_is_optimal_and_what_the_library_has(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["synthesize", "all_reduce", "-t", "switch:3", "--small", "-b"]
    assert run([*words, "64"]) == 0
    assert "optimum    100.0%: optimal" in capsys.readouterr().out
    assert run([*words, "4M"]) == 0
    text = capsys.readouterr().out
    assert "the search found nothing quicker" in text
    assert "1.00 times as long" in text


def test_library_is_compared_for_the_same_root(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Rank 2 is at the end of a line: from there everything takes longer."""
    file = tmp_path / "line.toml"
    file.write_text(
        'ranks = 3\nname = "line"\n'
        '[[links]]\nbetween = [[0], [1]]\nkind = "wire"\n'
        '[[links]]\nbetween = [[0], [2]]\nkind = "cable"\n'
        '[kinds.wire]\nlatency = "1us"\nbandwidth = "10GB/s"\n'
        '[kinds.cable]\nlatency = "9us"\nbandwidth = "1GB/s"\n'
    )
    words = ["synthesize", "broadcast", "-t", str(file), "--small", "--json"]
    times = []
    for root in ("0", "2"):
        assert run([*words, "--root", root]) == 0
        facts = json.loads(capsys.readouterr().out)
        assert facts["time"] <= facts["library_time"]
        times.append(facts["library_time"])
    assert times[0] < times[1]
