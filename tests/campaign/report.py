"""Many trials in numbers."""

import time
from collections import Counter, defaultdict
from dataclasses import asdict

import numpy as np


class Report:
    def __init__(self, seed):
        self.seed, self.began = seed, time.monotonic()
        self.trials = self.kills = self.calls = 0
        self.kinds, self.strikes = Counter(), Counter()
        self.times = defaultdict(list)
        self.failures = []

    def add(self, outcome):
        self.trials += 1
        self.kills += outcome.kills
        self.calls += outcome.calls
        trial = outcome.trial
        self.kinds[trial.kind + "+tls" * trial.tls] += 1
        for strike, times in outcome.done:
            self.strikes[strike] += 1
            where = "one host" if not trial.hosts else "hosts"
            self.times[f"{strike}, {where}"] += times
        if outcome.problems:
            self.failures.append(outcome)

    def merge(self, other):
        self.trials += other.trials
        self.kills += other.kills
        self.calls += other.calls
        self.kinds += other.kinds
        self.strikes += other.strikes
        for name, times in other.times.items():
            self.times[name] += times
        self.failures += other.failures

    def text(self):
        seconds = time.monotonic() - self.began
        lines = [
            f"seed        {self.seed}",
            f"trials      {self.trials} in {seconds:.0f} s, {self.calls} turns",
            f"worlds      {_counts(self.kinds)}",
            f"disturbed   {_counts(self.strikes)}",
            f"kills       {self.kills}",
            *(f"error after {name}: {_spread(t)}" for name, t in self._seen()),
            f"failures    {len(self.failures)}",
        ]
        return "\n".join(lines)

    def _seen(self):
        return sorted((name, times) for name, times in self.times.items() if times)

    def as_data(self):
        """For a file of results."""
        return {
            "seed": self.seed,
            "seconds": round(time.monotonic() - self.began, 1),
            "trials": self.trials,
            "kills": self.kills,
            "turns": self.calls,
            "worlds": dict(self.kinds),
            "disturbances": dict(self.strikes),
            "seconds_to_error": {
                name: dict(zip(("p50", "p99", "max"), _quantiles(t), strict=True))
                for name, t in self._seen()
            },
            "failures": [
                {
                    "again": o.trial.again,
                    "trial": asdict(o.trial),
                    "problems": o.problems,
                    "stderr": o.stderr[-20_000:],
                }
                for o in self.failures
            ],
        }


def failure_text(outcome):
    """One failure, for people."""
    trial = outcome.trial
    world = f"{trial.kind} n={trial.n} hosts={trial.hosts} tls={trial.tls}"
    return "\n".join(
        [
            f"--- {trial.again}",
            f"{world}, phases {len(outcome.done)} of {len(trial.phases)}:",
            *(f"  {phase}" for phase in trial.phases[: len(outcome.done) + 1]),
            *outcome.problems,
            outcome.stderr,
        ]
    )


def _counts(counter):
    return ", ".join(f"{count} {name}" for name, count in counter.most_common())


def _quantiles(times):
    return [round(float(t), 4) for t in np.percentile(times, [50, 99, 100])]


def _spread(times):
    p50, p99, most = (1e3 * t for t in _quantiles(times))
    return f"p50 {p50:.1f} ms, p99 {p99:.1f} ms, max {most:.0f} ms ({len(times)})"
