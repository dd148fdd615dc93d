"""unisono simulate and unisono topology, run in this process."""

import json
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest

from unisono.cli import _jobs


def test_simulate_shows_the_winner_of_each_size_and_the_crossovers(run):
    code, out, _ = run(
        *("simulate", "all_reduce", "--topology", "switch:16", "-b", "1K", "-e", "1G"),
        *("--algorithm", "recursive_doubling,circulant"),
    )
    assert code == 0
    lines = out.splitlines()
    assert lines[0].startswith("# all_reduce on switch:16, 16 ranks")
    assert lines[1].split()[:3] == ["size", "winner", "time"]
    assert "recursive_doubling" in lines[2]
    assert lines[12].split()[2] == "circulant"
    assert "on circulant beats recursive_doubling" in out


def test_simulate_compares_all_algorithms_by_default(run):
    code, out, _ = run("simulate", "-t", "dgx-h100:2", "-b", "1M", "-e", "1M", "--json")
    result = json.loads(out)
    assert code == 0
    names = {row["algorithm"] for row in result["results"]}
    assert {"ring", "hierarchical:levels=8x2", "tree:radix=4"} <= names
    best = min(result["results"], key=lambda row: row["time"])
    assert result["winners"] == [best["algorithm"]]


def test_simulate_shows_one_algorithm_and_size_in_detail(run, tmp_path):
    trace = tmp_path / "trace.json"
    code, out, _ = run(
        *("simulate", "-t", "switch:4", "-b", "1M", "--algorithm", "ring"),
        *("--delay", "2=1ms", "--fidelity", "events", "--trace", str(trace)),
    )
    assert code == 0
    assert "(events)" in out
    assert "step 1: 2 → 3" in out
    assert json.loads(trace.read_text())["otherData"]["topology"] == "switch:4"


def test_conditions_are_passed_to_the_simulation(run):
    def time(*more):
        command = ("simulate", "-t", "ring:4", "-b", "1M", "--algorithm", "ring")
        _, out, _ = run(*command, "--json", *more)
        return json.loads(out)["time"]

    usual = time()
    assert time("--slow", "1>2=0.1") > 2 * usual
    assert time("--failed", "1>2") > usual
    assert time("--codec", "ratio=0.5") < usual
    assert time("--fidelity", "events") == pytest.approx(usual)
    assert time("--segments", "2") != usual
    assert time("--reduce", "1GB/s") > usual


def test_simulate_reports_exposed_time(run):
    command = ("simulate", "-t", "switch:4", "-b", "1M", "--algorithm", "ring")
    _, out, _ = run(*command, "--compute", "20us", "--share", "0.5")
    assert "beside  20.0 µs of computing" in out or "beside  20 µs of computing" in out
    _, out, _ = run(*command, "--compute", "1s", "--json")
    assert json.loads(out)["exposed"] == 0.0


def test_text_plot_has_every_line_and_a_legend(run):
    code, out, _ = run(
        *("simulate", "-t", "switch:8", "-b", "1K", "-e", "1M", "--plot"),
        *("--algorithm", "ring,tree"),
    )
    assert code == 0
    assert "a tree" in out
    assert "b ring" in out


def test_plot_to_a_picture_needs_matplotlib(run, tmp_path):
    pytest.importorskip("numpy")
    code, _, err = run(
        *("simulate", "-t", "switch:4", "-b", "1K", "-e", "4K"),
        *("--algorithm", "ring,tree", "--picture", str(tmp_path / "x.png")),
    )
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        assert code == 2
        assert "pip install 'unisono[viz]'" in err
    else:
        assert code == 0
        assert (tmp_path / "x.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("-t", "rign:4"), "nearest: ring"),
        (("-t", "ring:4", "--fidelity", "exact"), "--fidelity exact"),
        (("-t", "ring:4", "-f", "1"), "-f 1"),
        (("-t", "ring:4", "-b", "1M", "-e", "1K"), "sizes ascend"),
        (("-t", "ring:4", "--delay", "x=1ms"), "not a number"),
        (("-t", "ring:4", "--delay", "1=soon"), "as in 5ms"),
        (("-t", "ring:4", "--slow", "0>1"), "not a number"),
        (("-t", "ring:4", "--codec", "size=1"), "expected ratio="),
        (("-t", "ring:4", "--trace", "x.json"), "one --algorithm"),
        (("-t", "ring:4", "--algorithm", "rign"), "nearest"),
        (("all_reduec", "-t", "ring:4"), "nearest: all_reduce"),
        (("-t", "ring:4", "--compute", "1ms", "--share", "0"), "share 0"),
        (("-t", "ring:4", "--share", "0.5"), "only used with --compute"),
        (("-t", "ring:4", "--reduce", "fast"), "fast"),
        (("-t", "ring:4", "--reduce", "0GB/s"), "above 0"),
    ],
)
def test_invalid_simulate_commands_are_one_line(run, arguments, why):
    code, _, err = run("simulate", *arguments)
    assert code == 2
    assert why in err
    assert err.count("\n") == 1


def test_simulate_verb_accepts_a_million_ranks(run):
    code, out, _ = run(
        *("simulate", "-t", "switch:1048576", "-b", "1G"),
        *("--algorithm", "circulant", "--json"),
    )
    assert code == 0
    assert json.loads(out)["fidelity"] == "closed"


def test_topologies_are_listed_shown_and_detected(run):
    code, out, _ = run("topology", "list")
    assert code == 0
    assert "torus:4x4x4" in out
    _, out, _ = run("topology", "show", "dgx-h100:2,nics=1")
    assert "16 ranks on 2 hosts" in out
    assert "0>nvswitch0" in out
    _, out, _ = run("topology", "detect")
    assert "cores" in out
    for action in (("list",), ("show", "ring:4"), ("detect",)):
        code, out, _ = run("topology", *action, "--json")
        assert code == 0
        assert json.loads(out)


@pytest.mark.parametrize("arguments", [("show",), ("draw",), ("list", "ring:4")])
def test_invalid_actions_are_refused_with_the_valid_ones(run, arguments):
    code, _, err = run("topology", *arguments)
    assert code == 2
    assert "list, show NAME or detect" in err


def test_both_verbs_have_an_example_and_their_options_are_frozen(run):
    result = {}
    for verb in ("simulate", "topology"):
        code, out, _ = run(verb, "--help")
        assert code == 0
        assert f"Example: unisono {verb}" in out
        words = {w.strip("│ ,") for w in out.split()}
        result[verb] = sorted(w for w in words if w.startswith("--"))
    assert result == {
        "simulate": [
            *("--algorithm", "--codec", "--compute", "--delay", "--engine"),
            "--failed",
            *("--fidelity", "--jobs", "--json", "--maxbytes", "--minbytes"),
            *("--picture", "--plot", "--reduce", "--segments", "--share"),
            *("--slow", "--stepfactor", "--topology", "--trace"),
        ],
        "topology": ["--json"],
    }


class Pickling(ThreadPoolExecutor):
    """Threads, where what is given and what comes back travels as to a process."""

    def __init__(self, workers, mp_context):
        super().__init__(workers)

    def submit(self, call, *given):
        travelled = pickle.loads(pickle.dumps((call, given)))
        return super().submit(lambda: pickle.loads(pickle.dumps(call(*travelled[1]))))


def test_simulate_with_jobs_finds_the_same(run, monkeypatch):
    monkeypatch.setattr(_jobs, "ProcessPoolExecutor", Pickling)
    how = ("simulate", "all_gather", "-t", "switch:6", "-b", "1K", "-e", "16K")
    how = (*how, "--algorithm", "ring,bruck,recursive_doubling", "--json")
    code, out, err = run(*how)
    assert code == 0, err
    code, several, err = run(*how, "--jobs", "2")
    assert code == 0, err
    assert json.loads(several) == json.loads(out)
    assert run(*how, "--jobs", "0")[0] == 2
