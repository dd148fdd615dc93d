"""benchmarks/choice_hosts.py loses nothing that it has measured."""

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(BENCHMARKS)
    made = import_module("choice_hosts")
    monkeypatch.setattr(made, "RESULTS", tmp_path / "results.json")
    monkeypatch.setattr(made, "hosts_available", str)
    return made


def run(benchmark, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["choice_hosts.py", *arguments])
    benchmark.main()


def row_of(ratio):
    judged = {"chosen": "ring", "best": "ring", "ratio": ratio, "noise": 1.0}
    row = {how: {**judged, "error": 0.1} for how in ("before", "after")}
    about = {"collective": "all_reduce", "nbytes": 4096}
    return {**about, "probe_s": 0.04, "steady": True, **row}


def test_time_that_is_too_short_is_refused_at_once(benchmark, monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "measured", None)
    with pytest.raises(SystemExit):
        run(benchmark, monkeypatch, "--minutes", "1")
    assert "--minutes: 9 networks start in 1.2 minutes" in capsys.readouterr().err


def test_results_are_kept_when_a_later_network_fails(benchmark, monkeypatch, capsys):
    """And a network for which there was no time has no row, and no error."""
    found = iter([[], [row_of(1.5)]])

    def measured(rates, limit_s, congestion):
        rows = next(found, None)
        if rows is None:
            raise KeyboardInterrupt
        return rows

    monkeypatch.setattr(benchmark, "measured", measured)
    names = list(benchmark.NETWORKS)[:3]
    with pytest.raises(KeyboardInterrupt):
        run(benchmark, monkeypatch, *names, "--congestion", "reno")
    kept = json.loads(benchmark.RESULTS.read_text())
    assert kept["networks"] == {names[0]: [], names[1]: [row_of(1.5)]}
    assert kept["after"]["mean"] == 1.5
    assert f"{names[0]:16} no time for 10 sizes" in capsys.readouterr().out
