"""What nccl-tests has measured: its output, read back.

    (run,) = read_log(Path("all_reduce.log"))
    run.collective, run.ranks, run.sizes, run.seconds

The format is that of `all_reduce_perf` and its siblings, of rccl-tests, and of `unisono
bench`. What launchers put before each line ("0: ", "[1,0]<stdout>:", times of day) is
skipped. A log may have several tables; each is a run of its own.

Which collective it was is said in the log, by its first lines, by the command that was
recorded with it, or else by its bus bandwidths: for n ranks those of an all_reduce are
2(n-1)/n times the algorithm's, those of an all_gather (n-1)/n times.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from unisono.errors import BadLog

COLLECTIVES = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
}
"""Our names by nccl-tests'."""
_TEST = re.compile(
    r"(?:Collective test starting: |\b)"
    r"(all_reduce|all_gather|reduce_scatter|alltoall|broadcast|gather|scatter|reduce)"
    r"_perf\b"
)
_HEAD = re.compile(r"#\s+size\s+count\s+type")
_RANK = re.compile(r"#\s+Rank\s+(\d+)\s.*\bPid\b")
_NUMBER = r"[0-9]+(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?"
_WRONG = rf"(?:N/A|{_NUMBER})"
_ROW = re.compile(
    rf"(?:^|[\s:>])(\d+)\s+(\d+)\s+([a-z]\w*)\s+([a-z]\w*)\s+(?:(-?\d+)\s+)?"
    rf"({_NUMBER})\s+({_NUMBER})\s+({_NUMBER})\s+({_WRONG})"
    rf"(?:\s+({_NUMBER})\s+({_NUMBER})\s+({_NUMBER})\s+({_WRONG}))?\s*(?:$|\s)"
)
_BEGUN = re.compile(
    r"(?:^|[\s:>])\d+\s+\d+\s+(?:u?int\d+|half|float|double|bfloat16)\b"
)
_EXACT = ("sum", "none", "max", "min", "prod", "avg")
_TOLERANCE = 0.03


@dataclass
class LogRun:
    """One table of a log: times of calls by their size, for both kinds of buffers."""

    file: str
    line: int
    collective: str = ""
    ranks: int = 0
    sizes: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    in_place: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    """Bus bandwidth over algorithm bandwidth, where both have three digits."""


def read_log(file: Path | str, *, collective: str = "", ranks: int = 0) -> list[LogRun]:
    """The tables of a log; BadLog if there are none, or one cannot be trusted.

    `collective` and `ranks` are for logs that do not tell.
    """
    path = Path(file)
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as why:
        raise BadLog(f"cannot be read: {why.strerror}", file=str(file)) from why
    runs = [run for run in _runs(str(file), text.splitlines()) if run.sizes]
    if not runs:
        raise BadLog(
            "no rows as nccl-tests prints them (size, count, type, ..., time, algbw, "
            "busbw); is this the output of all_reduce_perf or one of its siblings?",
            file=str(file),
        )
    for run in runs:
        _complete(run, collective, ranks)
    return runs


def _runs(file: str, lines: Sequence[str]) -> Iterator[LogRun]:
    run, test, ranks = LogRun(file, 1), "", 0
    for number, line in enumerate(lines, start=1):
        if named := _TEST.search(line):
            test = COLLECTIVES[named[1]]
        if rank := _RANK.search(line):
            ranks = 1 + max(int(rank[1]), ranks - 1 if int(rank[1]) else 0)
        if _HEAD.search(line):
            yield run
            run = LogRun(file, number, test, ranks)
        elif row := _ROW.search(line):
            run.collective, run.ranks = run.collective or test, run.ranks or ranks
            _add(run, row, number)
        elif _BEGUN.search(line):
            raise BadLog(
                "a row that is cut off; remove it, or measure again",
                file=file,
                line=number,
            )
    yield run


def _add(run: LogRun, row: re.Match[str], line: int) -> None:
    nbytes, wrong = int(row[1]), (row[9], row[13])
    for count in wrong:
        if row[4] in _EXACT and count not in (None, "N/A") and float(count) >= 1:
            raise BadLog(
                f"{count} values were wrong at {nbytes} bytes: what was measured is "
                "not this collective",
                file=run.file,
                line=line,
            )
    seconds = float(row[6]) * 1e-6
    inside = float(row[10] or row[6]) * 1e-6
    if nbytes == 0:  # as an all_gather prints sizes below one element a rank
        return
    if min(seconds, inside) <= 0:
        raise BadLog(
            f"a time of 0 at {nbytes} bytes: expected microseconds above 0",
            file=run.file,
            line=line,
        )
    run.sizes.append(nbytes)
    run.seconds.append(seconds)
    run.in_place.append(inside)
    algorithm, bus = float(row[7]), float(row[8])
    if algorithm >= 1:
        run.ratios.append(bus / algorithm)


def _complete(run: LogRun, collective: str, ranks: int) -> None:
    """What the log does not say: from what was given, or from the bandwidths."""
    run.collective = collective or run.collective
    run.ranks = ranks or run.ranks
    ratio = median(run.ratios) if run.ratios else 0.0
    if not run.collective and ratio > 1 + _TOLERANCE:
        run.collective = "all_reduce"  # of no other is the bus the faster one
    if run.collective == "all_reduce" and not run.ranks and 1 <= ratio < 2:
        run.ranks = round(2 / (2 - ratio))
    if not run.collective or run.ranks < 2:
        what = "of which collective" if not run.collective else "of how many ranks"
        raise BadLog(
            f"does not say {what} it is; give --collective NAME and --ranks N",
            file=run.file,
            line=run.line,
        )
    expected = 2 * (run.ranks - 1) / run.ranks
    if run.collective == "all_reduce" and ratio and abs(ratio / expected - 1) > 0.1:
        raise BadLog(
            f"bus bandwidths are {ratio:.2f} times the algorithm's; an all_reduce of "
            f"{run.ranks} ranks has {expected:.2f}: the number of ranks is wrong",
            file=run.file,
            line=run.line,
        )
