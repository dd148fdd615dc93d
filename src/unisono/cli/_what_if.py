"""`unisono trace what-if`: a trace with other collectives."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from unisono.cli._engine import refuse_beside
from unisono.cli._progress import waiting
from unisono.cli.output import print_json, print_row, print_text
from unisono.interop.what_if import what_if as answer_for
from unisono.simulate.engines.engine import OURS
from unisono.units import format_bytes, format_seconds

_WIDTHS = (14, -6, -9, -6, -12, -12, 24)


def what_if(
    path: Path,
    /,
    *,
    topology: Annotated[str, Parameter(name=["-t", "--topology"])],
    engine: str = OURS,
    algorithm: str = "auto",
    codec: str = "none",
    json: bool = False,
) -> int:
    """Tell the time of a recorded step if its collectives ran elsewhere or otherwise.

    Example: unisono trace what-if step.pt.trace.json.gz -t dgx-h100:2 --codec fp8

    Parameters
    ----------
    path
        A trace of one rank: of PyTorch's profiler (.json, .json.gz) or Chakra's (.et).
    topology
        Where they would run: a preset, as dgx-h100:2, or a .toml file.
    engine
        Whose calls: unisono (schedules, simulated), or by a model nccl, gloo, mpi, xla,
        or FILE.json, which `unisono fit` has written (for groups of all ranks).
    algorithm
        One for all collectives, as ring; by default the quickest of a few.
    codec
        A codec for all that is sent, as fp8.
    json
        Print one JSON document.
    """
    if engine != OURS:
        given = {"algorithm": algorithm != "auto", "codec": codec != "none"}
        refuse_beside(engine, given)
    with waiting(lambda: f"simulating the collectives of {path}"):
        found = answer_for(
            path, topology, algorithm=algorithm, codec=codec, engine=engine
        )
    if json:
        print_json(asdict(found))
        return 0
    change = found.after / found.before - 1 if found.before else 0.0
    place = found.topology if engine == OURS else f"{found.topology} by {engine}"
    print_text(
        f"# {path}: {format_seconds(found.before)} as recorded, "
        f"{format_seconds(found.after)} on {place} ({change:+.1%})"
    )
    head = ("collective", "ranks", "size", "calls", "recorded", "simulated")
    print_row((*head, "algorithm"), _WIDTHS)
    for one in found.calls:
        sizes = str(one.ranks), format_bytes(one.nbytes), str(one.times)
        times = format_seconds(one.before), format_seconds(one.after)
        print_row((one.collective, *sizes, *times, one.algorithm), _WIDTHS)
    if found.left_out:
        print_text(
            f"# {found.left_out} collectives are as recorded: their size or meaning is "
            "not in the trace (gloo: profile with record_shapes=True)"
        )
    return 0
