"""Kill a rank at work, many times over: who notices, what do they say, and how soon?

    python benchmarks/kill_trials.py [trials] [seed]
    python benchmarks/kill_trials.py --across [trials] [seed]

Real processes, two to five of them, run collectives; one is killed, at a failpoint of
the native core or at any time. Every survivor must raise PeerLost that names it. Then
as many trials by a tenth with nobody killed, but ranks that are slow here and there:
all results must be right.

With --across the ranks are on two to four hosts, which are emulated: some have shared
memory between them, and between hosts there are streams over TCP.
"""

from __future__ import annotations

import itertools
import secrets
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from kill_trials.trials import (
    PLACEMENTS,
    TrialReport,
    TrialServer,
    draw,
    draw_jitter,
    summary,
)

LIMIT_MS = {"one host": 100.0, "several": 1000.0}
"""What 99 of 100 survivors must keep to."""


def main() -> int:
    """Run, print, and fail if anything was not as promised."""
    numbers = [int(word) for word in sys.argv[1:] if word != "--across"]
    across = "--across" in sys.argv
    count = numbers[0] if numbers else 500
    seed = numbers[1] if len(numbers) > 1 else secrets.randbits(32)
    places = PLACEMENTS if across else ((),)
    print(f"seed        {seed}{', across hosts' * across}")
    began = time.monotonic()
    killed: list[TrialReport] = []
    slow: list[TrialReport] = []
    with TrialServer() as server:
        trials = itertools.chain(
            draw(seed, count, placements=places),
            draw_jitter(seed, count // 10, placements=places),
        )
        for number, trial in enumerate(trials):
            report = server.run(trial)
            (killed if trial.action == "kill" else slow).append(report)
            if report.problems:
                _print(number, report)
            if sys.stderr.isatty():
                print(f"\r{number + 1}", end="", file=sys.stderr)
    totals = summary(killed)
    print(totals.text)
    wrong = sum(bool(r.problems) for r in slow)
    print(f"slow ranks  {len(slow)} trials, {wrong} failures")
    print(f"took        {time.monotonic() - began:.0f} s")
    limit_ms = LIMIT_MS["several" if across else "one host"]
    return int(bool(totals.failures or wrong or totals.p99_ms > limit_ms))


def _print(number: int, report: TrialReport) -> None:
    print(f"trial {number}: {report.trial}")
    for problem in report.problems:
        print(f"  {problem}")
    print(report.stderr)


if __name__ == "__main__":
    sys.exit(main())
