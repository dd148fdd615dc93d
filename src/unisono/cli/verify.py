"""`unisono verify`: prove algorithms for many n, or show a counter-example."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from unisono.algorithms import Algorithm, library, load_file, schedule
from unisono.algorithms.registry import Param
from unisono.cli._progress import waiting
from unisono.cli.output import counter_example, parse_ranks, print_json, print_text
from unisono.errors import (
    BadArgument,
    NotOffered,
    ScheduleError,
    UnsupportedWorld,
    unknown,
)
from unisono.schedule.collective import COLLECTIVES
from unisono.schedule.files import load
from unisono.schedule.schedule import Schedule

Maker = Callable[[int], Schedule]
Row = dict[str, object]


def verify(
    target: str,
    /,
    *,
    n: Annotated[str, Parameter(name=["-n", "--ranks"], metavar="N")] = "1..64",
    json: bool = False,
) -> int:
    """Prove algorithms right, or print the first counter-example and exit with 1.

    Example: unisono verify my_algorithm.py -n 1..64

    Parameters
    ----------
    target
        A Python file with @algorithm functions, a schedule saved as .json or .npz, an
        algorithm as `explain` takes it, or "all".
    n
        Numbers of ranks, as 5, 1..64 or 2,4,13.
    json
        Print the figures of the proofs as one JSON object.
    """
    try:
        rows = _verify(target, n, loud=not json)
    except ScheduleError as wrong:
        if not json:
            raise
        example = counter_example(wrong)
        print_json({"verified": False, "error": str(wrong), "counter_example": example})
        return 1
    if json:
        print_json({"target": target, "n": n, "verified": True, "proofs": rows})
    return 0


def _verify(target: str, n: str, *, loud: bool) -> list[Row]:
    """Prove everything that `target` means, telling of each as it is done."""
    worlds = parse_ranks(n)
    if Path(target).suffix in (".json", ".npz"):
        rows = iter([_prove_saved(target)])
    else:
        rows = (_prove(maker, worlds) for maker in _makers(target))
    proofs = []
    for row in rows:
        proofs.append(row)
        if loud and row["worlds"]:
            print_text(_sentence(row, n))
    if not any(row["worlds"] for row in proofs):
        raise BadArgument(f"nothing was verified: {target} has no schedule for -n {n}")
    return proofs


def _prove_saved(path: str) -> Row:
    proof = load(path, verify=False).verify()
    return {
        "schedule": proof.schedule.title,
        "worlds": 1,
        "left_out": 0,
        "transfers": proof.transfers,
        "seconds": proof.seconds,
    }


def _makers(target: str) -> Iterator[tuple[str, Maker]]:
    """What is to be proven: for a file or a plain name, with all its variants."""
    if target.endswith(".py"):
        algorithms = load_file(target)
    else:
        algorithms = [
            a for (_, name), a in library().items() if target in ("all", name)
        ]
    for a in algorithms:
        for variant in a.variants:
            name = f"{a.collective.name} by {a.spelled(**variant)}"
            yield name, partial(_with, a, variant)
    if not algorithms:
        for collective in _offering(target):
            yield f"{collective} by {target}", partial(schedule, collective, target)


def _offering(target: str) -> list[str]:
    """The collectives for which there is such a thing, whatever the number of ranks."""
    offering: list[str] = []
    why: BadArgument | None = None
    for collective in COLLECTIVES:
        try:
            schedule(collective, target, 4)
        except NotOffered:
            continue
        except UnsupportedWorld:
            offering.append(collective)
        except BadArgument as wrong:
            why = wrong
        else:
            offering.append(collective)
    if not offering:
        raise why or unknown("algorithm", target, {name for _, name in library()})
    return offering


def _with(algorithm: Algorithm, variant: Mapping[str, Param], n: int) -> Schedule:
    return algorithm(n, **variant)


def _prove(named: tuple[str, Maker], worlds: list[int]) -> Row:
    began = time.perf_counter()
    current = worlds[0]

    def proofs_of_all() -> Iterator[int]:
        nonlocal current
        for current in worlds:
            yield from _proofs(named[1], current)

    with waiting(lambda: f"proving {named[0]}, n = {current}"):
        proofs = list(proofs_of_all())
    return {
        "schedule": named[0],
        "worlds": len(proofs),
        "left_out": len(worlds) - len(proofs),
        "transfers": sum(proofs),
        "seconds": time.perf_counter() - began,
    }


def _proofs(make: Maker, n: int) -> Iterator[int]:
    """The transfers checked, if there is a schedule for n ranks."""
    with contextlib.suppress(UnsupportedWorld):
        yield make(n).verify().transfers


def _sentence(row: Row, n: str) -> str:
    rest = f" ({row['left_out']} not supported)" if row["left_out"] else ""
    worlds = "" if "n=" in str(row["schedule"]) else f" for n = {n}{rest}"
    return (
        f"verified: {row['schedule']}{worlds}: {row['transfers']:,} transfers, "
        f"{row['seconds']:.2f} s"
    )
