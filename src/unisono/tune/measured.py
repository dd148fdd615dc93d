"""From logs to an engine: every table of a log fitted by straight lines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from unisono.errors import BadLog
from unisono.simulate.engines.measured import Line, MeasuredCalls, MeasuredEngine
from unisono.tune.fit import FEWEST_SIZES, fit
from unisono.tune.nccl_logs import LogRun, read_log

MOST_LINES = 4
"""Three protocols, and the sizes at which pipelines are not full yet."""


def fit_logs(
    files: Sequence[Path | str],
    *,
    name: str = "measured",
    collective: str = "",
    ranks: int = 0,
    in_place: bool = False,
) -> MeasuredEngine:
    """The lines of all tables in all logs; tables of the same calls are one."""
    found: dict[tuple[str, int], list[LogRun]] = {}
    for file in files:
        for run in read_log(file, collective=collective, ranks=ranks):
            found.setdefault((run.collective, run.ranks), []).append(run)
    return MeasuredEngine(
        name, tuple(_fitted(runs, in_place=in_place) for runs in found.values())
    )


def _fitted(runs: Sequence[LogRun], *, in_place: bool) -> MeasuredCalls:
    first = runs[0]
    sizes = [size for run in runs for size in run.sizes]
    times = [t for run in runs for t in (run.in_place if in_place else run.seconds)]
    if len(set(sizes)) < FEWEST_SIZES:
        raise BadLog(
            f"{len(set(sizes))} sizes of {first.collective} on {first.ranks} ranks; "
            f"a fit needs {FEWEST_SIZES} (-b 8 -e 1G -f 2)",
            file=first.file,
            line=first.line,
        )
    made = fit(sizes, times, most=MOST_LINES)
    return MeasuredCalls(
        first.collective,
        first.ranks,
        tuple(Line(p.lower, p.upto, p.latency, p.byte) for p in made.pieces),
        ", ".join(dict.fromkeys(run.file for run in runs)),
        made.error,
    )
