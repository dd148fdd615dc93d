"""`unisono fit`: what others measured by nccl-tests, as an engine of the simulator."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter

from unisono.cli.output import (
    parse_world,
    print_json,
    print_row,
    print_text,
    refuse_unwritable,
)
from unisono.errors import BadArgument
from unisono.results import write_or_keep
from unisono.schedule.collective import collective as find_collective
from unisono.simulate.engines.measured import MeasuredEngine, dump
from unisono.tune import fit_logs
from unisono.units import format_bandwidth, format_bytes, format_seconds

_WIDTHS = (-9, -9, -10, -11)


def fit(
    logs: Annotated[list[Path], Parameter(metavar="LOG")],
    /,
    *,
    output: Annotated[Path | None, Parameter(name=["-o", "--output-file"])] = None,
    collective: str = "",
    n: Annotated[str, Parameter(name=["-n", "--ranks"], metavar="N")] = "",
    in_place: bool = False,
    json: bool = False,
) -> int:
    """Fit the times in logs of nccl-tests by straight lines: latency and bandwidth.

    The file that -o writes is an engine: `unisono simulate --engine FILE` takes its
    times for the collectives and the numbers of ranks that were measured.

    Example: unisono fit all_reduce.log -o cluster.json

    Parameters
    ----------
    logs
        Output of all_reduce_perf and its siblings, or of `unisono bench`.
    output
        Write what was fitted to this file.
    collective
        Which collective it was, if a log does not say.
    n
        The number of ranks, if a log does not say.
    in_place
        Take the times of buffers that are input and result at once.
    json
        Print what was fitted as one JSON document.
    """
    if not logs:
        raise BadArgument("fit: expected a log of nccl-tests, as in: unisono fit a.log")
    refuse_unwritable(output)
    engine = fit_logs(
        logs,
        name=output.stem if output else "measured",
        collective=find_collective(collective).name if collective else "",
        ranks=parse_world(n) if n else 0,
        in_place=in_place,
    )
    if output:
        text = dump(engine)
        write_or_keep(output, lambda there: there.write_bytes(text))
    if json:
        print_json(msgspec.to_builtins(engine))
        return 0
    _print(engine)
    if output:
        print_text(f"# wrote {output}: unisono simulate --engine {output} -t TOPOLOGY")
    return 0


def _print(engine: MeasuredEngine) -> None:
    for one in engine.calls:
        print_text(
            f"# {one.collective} on {one.ranks} ranks, {one.source}: "
            f"typical error {one.error:.1%}"
        )
        print_row(("from", "to", "latency", "bandwidth"), _WIDTHS)
        for line in one.lines:
            rate = format_bandwidth(1 / line.byte) if line.byte else "any"
            row = (
                format_bytes(line.from_bytes),
                format_bytes(line.upto_bytes),
                format_seconds(line.latency),
                rate,
            )
            print_row(row, _WIDTHS)
