"""The model that chooses between hosts, against times that were measured there."""

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median

import numpy as np

from unisono.algorithms.choices import FLAT
from unisono.runtime.plan import select
from unisono.runtime.plan.predict import MODEL, all_alike, predicted

MEASURED = Path(__file__).parents[3] / "benchmarks" / "results" / "truth.json"


def measured():
    """Of each collective, number of hosts and size, the seconds of each candidate."""
    found = json.loads(MEASURED.read_text())
    cases = defaultdict(dict)
    for row in found["rows"]:
        what, name = row["collective"], row["algorithm"]
        if name in FLAT.get(what, ()):
            cases[what, row["n"], row["nbytes"]][name] = row["measured"]
    return found["bandwidth"], {k: v for k, v in cases.items() if len(v) > 1}


def judged():
    """Of each case the seconds that were measured, and how it is called."""
    bandwidth, cases = measured()
    latencies = replace(MODEL, start=50e-6, message=50e-6)  # of the probe, about
    for (what, n, nbytes), times in cases.items():
        model = all_alike(n, 1 / bandwidth, latencies)
        yield times, what, nbytes, tuple(range(n)), model


def test_expected_times_are_near_what_was_measured():
    errors = [
        abs(predicted(what, name, 1, hosts, nbytes, model) / seconds - 1)
        for times, what, nbytes, hosts, model in judged()
        for name, seconds in times.items()
    ]
    assert len(errors) > 200
    assert median(errors) < 0.06


def test_what_is_chosen_of_them_is_near_the_best_that_was_measured():
    regrets = []
    for times, what, nbytes, hosts, model in judged():
        some = tuple((name, 1) for name in FLAT[what] if name in times)
        chosen = select._quickest(what, nbytes, hosts, some, model)
        regrets.append(times[chosen.algorithm] / min(times.values()))
    assert len(regrets) > 90
    assert fmean(regrets) < 1.02
    assert np.percentile(regrets, 95) < 1.10
