"""The command line, run in this process: output, exit codes, and one-line errors."""

import csv
import io
import json
import os
import sys
from dataclasses import asdict
from itertools import pairwise

import pytest

import unisono
from unisono.algorithms import LANGUAGES, library, ring
from unisono.cli import main, output
from unisono.cli.tune import print_part
from unisono.runtime.plan.tuned import TunedCollective, TunedRow

RIGHT = """
import numpy as np
from unisono import algorithm
from unisono.schedule import copy_step

@algorithm
def all_gather(n):
    c = np.arange(n)
    for hop in range(n - 1):
        yield copy_step(c, src=(c + hop) % n, dst=(c + hop + 1) % n)
"""
WRONG = """
import numpy as np
from unisono import algorithm
from unisono.schedule import reduce_step

@algorithm(chunks=1)
def all_reduce(n):
    r = np.arange(n)
    d = 1
    while d < n:
        yield reduce_step(0, src=r, dst=(r + d) % n)
        d *= 2
"""


def test_explain_draws_costs_and_proves(run):
    code, out, _ = run("explain", "all_reduce", "ring", "-n", "5")
    assert code == 0
    assert out.count("reduce_scatter\n") == 4
    assert out.count("all_gather\n") == 4
    assert "every rank ends with a+b+c+d+e" in out


def test_explain_size_gives_the_cost_in_bytes(run):
    code, out, _ = run("explain", "all_reduce", "ring", "-n", "4", "-b", "64M")
    assert code == 0
    assert "64 MiB: span 96 MiB; each rank sends 96 MiB" in out


def test_explain_writes_svg(run, tmp_path):
    file = tmp_path / "ring.svg"
    code, out, _ = run("explain", "all_reduce", "ring", "-n", "3", "--svg", str(file))
    assert code == 0
    assert str(file) in out
    assert file.read_text().startswith("<svg")


def test_explain_writes_a_page(run, tmp_path):
    file = tmp_path / "ring.html"
    more = ("--beside", "tree", "-t", "switch:3", "-b", "4M", "--html", str(file))
    code, out, _ = run("explain", "all_reduce", "ring", "-n", "3", *more)
    assert (code, out) == (0, f"wrote {file}: all_reduce by ring, n=3, and tree\n")
    text = file.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>")
    assert "4 MiB a rank on switch:3" in text


def replay(document):
    """A judge that knows nothing of unisono: sets of contributions, by the contract."""
    n, chunks, name = document["n"], document["num_chunks"], document["collective"]
    state = {}
    for c in range(chunks):
        owner, root = c * n // chunks, document["root"]
        holders = {"broadcast": [root], "scatter": [root]}.get(name, [owner])
        everyone = name in ("all_reduce", "reduce", "reduce_scatter")
        for r in range(n) if everyone else holders:
            state[r, c] = frozenset([(r, c)])
    for step in document["steps"]:
        seen = dict(state)
        for src, dst, c, kind in step:
            if kind == "copy":
                state[dst, c] = seen[src, c]
            else:
                assert not state[dst, c] & seen[src, c], "counted twice"
                state[dst, c] |= seen[src, c]
    return state


@pytest.mark.quick(n=[5])
@pytest.mark.parametrize("n", [1, 5, 8, 13])
@pytest.mark.parametrize("key", library(), ids="-".join)
def test_explain_json_passes_an_independent_verifier(run, key, n):
    collective, algorithm = key
    code, out, _ = run("explain", collective, algorithm, "-n", str(n), "--json")
    result = json.loads(out)
    assert code == 0
    assert result["verified"] is True
    assert result["same_bits_on_all_ranks"] is True
    state, chunks = replay(result), result["num_chunks"]
    for c in range(chunks):
        owner = c * n // chunks
        target = c // (chunks // (n * n)) % n if collective == "all_to_all" else owner
        ends = {"reduce": [0], "gather": [0], "all_to_all": [target]}
        ends |= {"scatter": [owner], "reduce_scatter": [owner]}
        due = {(owner if collective != "broadcast" else 0, c)}
        if collective == "scatter":
            due = {(0, c)}
        if collective in ("all_reduce", "reduce", "reduce_scatter"):
            due = {(r, c) for r in range(n)}
        for r in ends.get(collective, range(n)):
            assert state[r, c] == due


def test_json_has_the_promised_keys(run):
    _, out, _ = run("explain", "broadcast", "tree", "-n", "6", "--root", "4", "--json")
    result = json.loads(out)
    keys = {"collective", "algorithm", "n", "root", "num_chunks", "steps", "cost"}
    assert keys | {"verified", "same_bits_on_all_ranks"} <= set(result)
    assert result["root"] == 4
    assert all(len(t) == 4 for step in result["steps"] for t in step)


def test_verify_gives_the_figures_of_the_proof(run, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(RIGHT)
    code, out, _ = run("verify", str(file), "-n", "1..64")
    assert code == 0
    total = sum(n * (n - 1) for n in range(1, 65))
    assert f"verified: all_gather by mine for n = 1..64: {total:,} transfers" in out


def test_verify_gives_a_counter_example(run, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(WRONG)
    code, out, err = run("verify", str(file), "-n", "1..64")
    assert code == 1
    assert out == ""
    assert "n=3, step 2: rank 0 already counts rank 0 in chunk 0" in err
    assert err.count("\n") == 1


def test_explain_of_a_wrong_file_shows_it_and_exits_with_1(run, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(WRONG)
    code, out, err = run("explain", "all_reduce", str(file), "-n", "3")
    assert code == 1
    assert "!abc!" in out
    assert "step 2" in err
    code, out, _ = run("explain", "all_reduce", str(file), "-n", "3", "--json")
    result = json.loads(out)
    assert (code, result["verified"], result["counter_example"]["step"]) == (
        1,
        False,
        2,
    )


def test_json_of_explain_can_be_verified(run, tmp_path):
    _, out, _ = run("explain", "all_reduce", "ring", "-n", "4", "--json")
    file = tmp_path / "ring.json"
    file.write_text(out)
    code, output, _ = run("verify", str(file))
    assert (code, output.startswith("verified: all_reduce by ring")) == (0, True)
    result = json.loads(out)
    result["steps"].pop()
    file.write_text(json.dumps(result))
    code, _, err = run("verify", str(file))
    assert code == 1
    assert "lacks" in err


def test_algorithms_lists_everything_with_its_cost(run):
    code, out, _ = run("algorithms", "-n", "13", "--verify")
    assert code == 0
    assert all(name in out for _, name in library())
    line = next(row for row in out.splitlines() if "rabenseifner:early" in row)
    assert line.split()[1:7] == ["8", "8", "3.75", "1.5", "0", "yes"]


def test_algorithms_as_json_and_csv_agree(run):
    _, out, _ = run("algorithms", "all_reduce", "-n", "13", "--json")
    result = json.loads(out)
    _, out, _ = run("algorithms", "all_reduce", "-n", "13", "--csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [r["algorithm"] for r in rows] == [r["algorithm"] for r in result]
    assert [int(r["rounds"]) for r in rows] == [r["rounds"] for r in result]
    assert [float(r["memory"]) for r in rows] == [r["memory"] for r in result]


@pytest.mark.parametrize("lang", LANGUAGES)
def test_words_are_in_the_language_asked_for(run, lang):
    words = ring.ADVICE.words(lang)
    _, out, _ = run("algorithms", "all_to_all", "--lang", lang)
    assert words.memory in out
    _, out, _ = run("explain", "all_to_all", "ring", "--lang", lang)
    assert words.memory[:40] in out
    for command in (["algorithms", "barrier"], ["explain", "all_reduce", "ring"]):
        _, out, _ = run(*command, "--lang", lang, "--json")
        document = json.loads(out)
        found = document[0] if isinstance(document, list) else document
        assert "good" in str(found["advice"])
    assert found["advice"] == {"ring": asdict(words)}


def test_unknown_language_is_refused(run):
    for command in (["algorithms"], ["explain", "all_reduce", "ring"]):
        code, _, err = run(*command, "--lang", "de")
        assert (code, "unknown language 'de'" in err) == (2, True)


def test_verify_takes_the_arguments_of_explain(run, tmp_path):
    for target in ("ring:both", "ring+circulant", "tree+ring", "all"):
        code, out, _ = run("verify", target, "-n", "1..5")
        assert (code, target in out or target == "all") == (0, True)
    file = tmp_path / "my.odd.py"
    file.write_text(RIGHT)
    assert run("verify", f"{file}", "-n", "4")[0] == 0
    assert run("explain", "all_gather", str(file), "-n", "4")[0] == 0


def test_verify_tries_every_variant_of_a_file(run, tmp_path):
    file = tmp_path / "mine.py"
    switch = RIGHT.replace("(n):", "(n, lazy=False):")
    file.write_text(switch.replace("range(n - 1)", "range(n - 1 - lazy)"))
    code, out, err = run("verify", str(file), "-n", "1..4")
    assert code == 1
    assert "all_gather by mine for" in out
    assert "mine:lazy, n=2" in err


def test_verify_json_has_the_counter_example(run, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(WRONG)
    code, out, _ = run("verify", str(file), "--json")
    result = json.loads(out)
    assert (code, result["verified"]) == (1, False)
    assert result["counter_example"]["doubled"] == [0]


def test_verify_that_verified_nothing_fails(run):
    for more in ([], ["--json"]):
        code, out, err = run("verify", "torus:shape=2x2", "-n", "5", *more)
        assert (code, out) == (2, "")
        assert "nothing was verified" in err


def test_module_beside_an_algorithm_file_can_be_imported(run, tmp_path):
    (tmp_path / "helper_of_mine.py").write_text(
        "def next_of(c, n): return (c + 1) % n\n"
    )
    file = tmp_path / "mine.py"
    text = RIGHT.replace("(c + hop + 1) % n", "next_of(c + hop, n)")
    file.write_text("from helper_of_mine import next_of\n" + text)
    assert run("verify", str(file), "-n", "1..9")[0] == 0


def test_exit_inside_an_algorithm_is_an_error(run, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(RIGHT + "\n        raise SystemExit(0)\n")
    code, _, err = run("verify", str(file), "-n", "4")
    assert code == 2
    assert "mine.py:" in err
    assert "SystemExit" in err


def test_internal_error_is_one_line(run, monkeypatch):
    def broken(*_):
        raise RuntimeError("oops")

    monkeypatch.setattr("unisono.cli.app.run", broken)
    code, _, err = run("env")
    assert code == 70
    assert err.count("\n") == 1


def test_env_names_the_network_cards(run, monkeypatch):
    monkeypatch.delenv("UNISONO_INTERFACE", raising=False)
    assert "by which rank 0 is reached" in run("env")[1]
    here = {"eth0": ["10.0.0.1"], "eth1": ["10.1.0.1"]}
    monkeypatch.setattr("unisono.transports.addresses.interfaces", lambda: here)
    monkeypatch.setenv("UNISONO_INTERFACE", "eth0,eth1")
    assert "10.0.0.1 on eth0, 10.1.0.1 on eth1" in run("env")[1]
    monkeypatch.setenv("UNISONO_INTERFACE", "eth0,eth2")
    assert "no interface, network or address" in run("env")[1]


def test_env_names_versions(run):
    code, out, _ = run("env", "--json")
    result = json.loads(out)
    assert (code, result["unisono"]) == (0, unisono.__version__)
    assert {"GPU driver", "NVRTC", "NCCL", "kernels"} <= result.keys()
    code, out, _ = run("env")
    assert "numpy" in out


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("explain all_redcue ring", "nearest: all_reduce"),
        ("explain all_reduce rnig", "nearest: ring"),
        ("explain broadcast ring", "ring has no broadcast"),
        ("explain all_reduce tree:radix=two", "radix must be a whole number"),
        ("explain all_reduce tree:radix=1", "at least 2"),
        ("explain all_reduce tree:rdaix=2", "nearest: radix"),
        ("explain all_reduce circulant:x", "has no parameters"),
        ("explain all_reduce ring -n 0", "at least one rank"),
        ("explain all_reduce ring -n -3", "at least one rank"),
        ("explain all_reduce ring -n 2.5", "expected one number"),
        ("explain all_reduce ring -n many", "expected one number"),
        ("explain broadcast tree -n 4 --root 4", "ranks are 0..3"),
        ("explain broadcast tree -n 4 --root -1", "ranks are 0..3"),
        ("explain all_reduce ring -n 4 --root 1", "has no root"),
        ("explain all_reduce torus:shape=3x4 -n 13", "has 12 ranks, got 13"),
        ("explain all_reduce hierarchical:levels=4x3 -n 13", "13 ranks do not"),
        ("explain all_reduce ring -n 100000", "at most 1024"),
        ("explain all_reduce ring+tree -n 4", "tree has no all_gather"),
        ("explain all_reduce ring+ring+ring", "at most two"),
        ("explain all_reduce ring -b lots", "size 'lots'"),
        ("explain all_reduce ring --svg /no/such/place.svg", "there is no folder"),
        ("explain all_reduce ring --html /no/such/place.html", "there is no folder"),
        ("explain all_reduce ring -n 17 --html a.html", "up to 16 ranks"),
        ("explain all_reduce ring -n 4 -t switch:5 --html a.html", "has 5 ranks"),
        ("explain all_reduce ring -n 4 -t swich:4 --html a.html", "nearest: switch"),
        ("explain all_reduce ring --beside rign --html a.html", "nearest: ring"),
        ("explain all_reduce ring --html a.html --svg a.svg", "choose one"),
        ("explain all_reduce ring --html a.html --json", "--json stands alone"),
        ("explain all_reduce ring -t switch:4", "--topology: goes with --html"),
        ("explain all_reduce ring --beside tree", "--beside: goes with --html"),
        ("explain all_reduce --html a.html", "ALGORITHM"),
        ("explain all_reduce", "ALGORITHM"),
        ("explain all_reduce ring --colour", "--colour"),
        ("explain all_reduce nowhere.py", "no such file"),
        ("verify nowhere.py", "no such file"),
        ("verify nowhere.json", "not a schedule"),
        ("verify rings", "nearest: ring"),
        ("verify ring -n 0..4", "at least one rank"),
        ("explain all_reduce ring -n ٥", "expected one number"),
        ("explain all_reduce ring -n 9999999999999999", "at most"),
        ("explain all_reduce ring -n 99999999999999999999", "expected one number"),
        ("explain all_to_all hierarchical -n 100000", "at most 1024"),
        ("explain all_reduce ring -b 9999999999999T", "more than any memory"),
        ("explain all_reduce ring --json -b 1K", "--json stands alone"),
        ("explain all_reduce hierarchical:levels=4x3x -n 12", "expected 4x3"),
        ("verify ring -n 1..9999999999999999", "at most"),
        ("algorithms -n 9999999999999999", "at most"),
        ("algorithms --json --csv", "choose one"),
        ("algorithms --csv --lang zh", "--csv has no words"),
        ("explain all_reduce ring --svg x.svg --lang zh", "--lang is for text"),
        ("explain all_reduce --on this --lang zh", "--lang is for text"),
        ("explain broadcast tree -n 4 --root 1.5", "expected one rank"),
        ("explain broadcast tree -n 4 --root 0x1", "expected one rank"),
        ("explain all_reduce tree:radix=99999999999", "at most"),
        ("verify ring:both=maybe", "both must be true or false"),
        ("verify tree:radix=1", "at least 2"),
        ("verify nowhere.json -n x", "expected numbers"),
        ("verify ring -n 9..4", "ranges ascend"),
        ("verify ring -n x", "expected numbers"),
        ("algorithms all_redcue", "nearest: all_reduce"),
        ("algorithms -n 0", "at least one rank"),
        ("frobnicate", "frobnicate"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(run, command, message):
    code, _, err = run(*command.split())
    assert code == 2
    assert message in err
    assert err.count("\n") == 1
    assert "Traceback" not in err


def test_help_shows_no_empty_defaults_and_numbers_as_numbers(run):
    for verb in (*VERBS, "plan", "tune", "simulate", "top"):
        _, out, _ = run(verb, "--help")
        text = " ".join(out.replace("│", " ").split())
        assert '[default: ""]' not in text
        assert "[default: False]" not in text
        for option in ("-n", "--per-host", "--root", "-b", "-e", "--every", "--memory"):
            assert f"{option} STR" not in text
    assert "[default: 5]" in " ".join(run("run", "--help")[1].split())


def test_help_breaks_lines_where_the_terminal_ends_and_nowhere_else(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for verb in (*VERBS, "run", "plan", "tune", "simulate", "top"):
        lines = run(verb, "--help")[1].splitlines()
        for line, following in pairwise(lines):
            text, after = (x.strip("│ ") for x in (line, following))
            room = len(line.rstrip("│ ")) + len(after.partition(" ")[0]) + 3
            broken = after[:1].islower() and text[-1:].islower()
            assert not broken or room >= 80, line


def test_terminals_without_our_signs_get_plain_letters(monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", out)
    assert main(["explain", "all_reduce", "ring", "-n", "3"]) == 0
    text = out.buffer.getvalue().decode("ascii")
    assert "?" not in text
    assert "add 0>1 chunk 2" in text
    assert "chunk 0   a..    .b.    ..c" in text


def test_simple_terminals_get_no_colours(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    for term, coloured in (("xterm", True), ("dumb", False)):
        monkeypatch.setenv("TERM", term)
        output.print_picture("step 1/2 x\n[ab]")
        assert ("\x1b[" in capsys.readouterr().out) is coloured


def test_load_of_other_processes_is_told(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    for load, told in ((0.9, False), (3.5, True)):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0, 0))
        assert ("load 3.5 on 2 cores" in output.load_warning()) is told


def test_default_that_is_kept_is_not_called_a_winner(capsys):
    rows = [
        TunedRow(8, 8, "naive", 1e-6, 2.1e-6, "direct", 1e-6, 2e-6),
        TunedRow(16, 16, "ring", 1e-6, 2e-6, "direct", 1e-6, 3e-6),
    ]
    print_part(TunedCollective("all_reduce", 4, tuple(rows)))
    head, kept, won = capsys.readouterr().out.splitlines()[1:]
    assert "winner" not in head
    assert "direct (not clearly faster)" in kept
    assert "not clearly" not in won


def test_interrupted_tune_says_that_the_table_is_as_it_was(run, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("unisono.cli.tune._measured", interrupted)
    code, _, err = run("tune", "-n", "2")
    assert code == 130
    assert "is as it was" in err


VERBS = [
    *("explain", "verify", "algorithms", "env", "bench", "run", "doctor", "secret"),
    *("studio", "config"),
]


def test_every_verb_has_an_example_and_json(run):
    for verb in VERBS:
        code, out, _ = run(verb, "--help")
        assert code == 0
        assert f"Example: unisono {verb}" in out
        assert "--json" in out


def test_options_are_frozen(run):
    result = {}
    for verb in VERBS:
        _, out, _ = run(verb, "--help")
        words = {w.strip("│ ,).") for w in out.split()} - {"--help"}
        result[verb] = sorted(w for w in words if w.startswith("-") and w != "-n")
    assert result == {
        "explain": [
            *("--beside", "--html", "--json", "--lang", "--on", "--per-host"),
            *("--ranks", "--root", "--size", "--svg", "--topology", "-b", "-t"),
        ],
        "verify": ["--json", "--ranks"],
        "algorithms": ["--csv", "--json", "--lang", "--ranks", "--verify"],
        "env": ["--json"],
        "config": ["--config", "--json", "--no-config"],
        "run": [
            *("--address", "--bind-to", "--chdir", "--config", "--env", "--grace"),
            *("--hostfile", "--hosts", "--json", "--log-dir", "--master-addr"),
            *("--master-port", "--max-restarts", "--nnodes", "--no-config"),
            *("--node-rank", "--np", "--only", "--python", "--ranks", "--records"),
            *("--ssh", "--tag-output", "--timeout-s", "--timestamps", "-m", "-x"),
        ],
        "doctor": [
            *("--address", "--chdir", "--hostfile", "--hosts", "--json", "--python"),
            *("--ranks", "--ssh"),
        ],
        "secret": ["--file", "--json"],
        "studio": ["--json", "--open", "--port"],
        "bench": [
            *("--algorithm", "--check", "--csv", "--datatype", "--device", "--iters"),
            "--json",
            *("--maxbytes", "--minbytes", "--op", "--output-file", "--per-host"),
            "--plot",
            *("--ranks", "--ranks-as", "--root", "--rounds", "--shared", "--stepbytes"),
            *("--stepfactor", "--vs", "--warmup-iters"),
            *("-J", "-b", "-c", "-d", "-e", "-f", "-i", "-o", "-r", "-w"),
        ],
    }
