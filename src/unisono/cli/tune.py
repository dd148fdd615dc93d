"""`unisono tune`: measure this machine, and record which algorithm is fastest where."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Annotated

import msgspec
from cyclopts import Parameter

from unisono.cli._bench import groups
from unisono.cli._bench.devices import Placement
from unisono.cli._progress import Progress
from unisono.cli.output import (
    load_warning,
    parse_world,
    print_json,
    print_row,
    print_text,
)
from unisono.errors import BadArgument
from unisono.runtime.plan.tuned import (
    TunedCollective,
    TunedLink,
    TunedRow,
    TunedWorld,
    machine,
)
from unisono.tune import QUICK, Effort
from unisono.tune.files import destination, save
from unisono.units import format_bandwidth, format_bytes, format_seconds

_MOST_RANKS = 256
_NOT_CLEARLY = " (not clearly faster)"
_WIDTHS = (-9, 46, -10, -10, 46, -10)


def tune(
    *,
    n: Annotated[str, Parameter(name=["-n", "--ranks"], metavar="N")] = "4",
    per_host: Annotated[str, Parameter(metavar="N")] = "",
    quick: bool = False,
    collective: str = "",
    dtype: Annotated[str, Parameter(name=["-d", "--datatype"])] = "float32",
    json: bool = False,
) -> int:
    """Measure links and collectives here, and write down which algorithm wins where.

    Later jobs of as many ranks, placed alike, choose by that table; `unisono explain
    --on this` shows it, UNISONO_TUNED=0 does without. On a cluster, start `-m
    unisono.tune` by `unisono run --hosts`.

    Example: unisono tune -n 4 --quick

    Parameters
    ----------
    n
        Number of ranks.
    per_host
        Emulate hosts with so many ranks on each: between hosts they communicate
        over TCP, on this machine's loopback.
    quick
        Five collectives at six sizes, in seconds rather than minutes.
    collective
        Only these, with commas between.
    dtype
        Element type of what is added up.
    json
        Print what was found as one JSON object.
    """
    ranks = parse_world(n)
    if not 2 <= ranks <= _MOST_RANKS:
        raise BadArgument(f"-n {n}: expected 2 to {_MOST_RANKS} ranks")
    effort = replace(QUICK if quick else Effort(), dtype=dtype)
    if collective:
        effort = replace(effort, collectives=tuple(collective.split(",")))
    file = destination()  # refused before anything is measured, if it must be
    if not json:
        if warning := load_warning():
            print_text(warning)
        print_text(f"# tuning {ranks} ranks on {machine()}")
    hosts = parse_world(per_host) if per_host else 0
    try:
        world = _measured(ranks, hosts, effort, json=json)
    except KeyboardInterrupt:
        print(
            f"unisono: interrupted: {file} is as it was, for a table is written when "
            "all collectives are measured (--quick, or --collective, take less time)",
            file=sys.stderr,
        )
        raise
    save(world, file)
    if json:
        print_json({"file": str(file), "world": msgspec.to_builtins(world)})
    else:
        print(f"# wrote {file}")
    return 0


def _measured(ranks: int, per_host: int, effort: Effort, *, json: bool) -> TunedWorld:
    settings = msgspec.to_builtins(effort)
    progress = Progress()
    with groups.running(["unisono"], ranks, Placement(per_host)) as (group,):

        def ask(what: str) -> groups.Answer:
            progress.what = f"tune {what}"
            progress("measures")
            answer = group.ask({"do": "tune", "what": what, "effort": settings})[0]
            progress.clear()
            return answer

        links = msgspec.convert(ask("links")["links"], list[TunedLink])
        if not json:
            _print_links(links)
        for name in effort.collectives:
            part = msgspec.convert(ask(name)["part"], TunedCollective)
            if not json:
                print_part(part)
        return msgspec.convert(ask("world")["world"], TunedWorld)


def _print_links(links: list[TunedLink]) -> None:
    for link in links:
        to = f"{format_bytes(link.from_bytes)} to {format_bytes(link.upto_bytes)}"
        sure = link.byte_error / link.byte if link.byte else 0.0
        rate = format_bandwidth(1 / link.byte) if link.byte else "any rate"
        late, error = format_seconds(link.latency), format_seconds(link.latency_error)
        print_text(f"# {link.kind:<7} {to:<20} {late} ± {error}, {rate} ± {sure:.0%}")


def _is_slower(row: TunedRow) -> bool:
    """Whether the default was kept although another was a little faster."""
    return bool(row.runner_up) and row.runner_up_measured < row.measured


def print_part(part: TunedCollective) -> None:
    """What was chosen for a collective, by size: the default unless clearly beaten."""
    what = f" of {part.itemsize}-byte elements" if part.itemsize else ""
    print_text(f"# {part.collective}{what}")
    head = ("size", "chosen", "measured", "predicted", "runner-up", "measured")
    print_row(head, _WIDTHS)
    for row in part.rows:
        print_row(
            (
                format_bytes(row.nbytes),
                row.algorithm,
                format_seconds(row.measured),
                format_seconds(row.predicted),
                row.runner_up + (_NOT_CLEARLY if _is_slower(row) else ""),
                format_seconds(row.runner_up_measured) if row.runner_up else "",
            ),
            _WIDTHS,
        )
