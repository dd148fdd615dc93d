"""`unisono verify`: prove algorithms right for many n, or show where not."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from unisono.algorithms import Algorithm, library, load_file
from unisono.cli.output import parse_ranks, print_json
from unisono.errors import BadArgument, UnsupportedWorld, unknown
from unisono.schedule.files import load


def verify(
    target: str,
    /,
    *,
    n: Annotated[str, Parameter(name=["-n", "--ranks"])] = "1..64",
    json: bool = False,
) -> int:
    """Prove algorithms right, or print the first counter-example and exit with 1.

    Example: unisono verify my_algorithm.py -n 1..64

    Parameters
    ----------
    target
        A Python file with @algorithm functions, a schedule saved as .json or .npz, the
        name of an algorithm, or "all".
    n
        Numbers of ranks, as 5, 1..64 or 2,4,13.
    json
        Print the figures of the proofs as one JSON object.
    """
    if Path(target).suffix in (".json", ".npz"):
        return _verify_saved(target, json=json)
    worlds = parse_ranks(n)
    told = []
    for algorithm in _targets(target):
        row = _prove(algorithm, worlds)
        told.append(row)
        if not json:
            print(_sentence(row, n), flush=True)
    if json:
        print_json({"target": target, "n": n, "verified": True, "proofs": told})
    elif not any(row["worlds"] for row in told):
        raise BadArgument(f"nothing was verified: {target} has no schedule for -n {n}")
    return 0


def _verify_saved(path: str, *, json: bool) -> int:
    proof = load(path, verify=False).verify()
    if json:
        figures = {"steps": proof.steps, "transfers": proof.transfers}
        print_json(
            {"target": path, "verified": True, **figures, "seconds": proof.seconds}
        )
    else:
        print(proof)
    return 0


def _targets(target: str) -> list[Algorithm]:
    if target.endswith(".py"):
        return load_file(target)
    known = library()
    found = [a for (_, name), a in known.items() if target in ("all", name)]
    if not found:
        raise unknown("algorithm", target, {name for _, name in known})
    return found


def _prove(algorithm: Algorithm, worlds: list[int]) -> dict[str, object]:
    began = time.perf_counter()
    proofs = list(_proofs(algorithm, worlds))
    return {
        "algorithm": algorithm.name,
        "collective": algorithm.collective.name,
        "worlds": len(proofs),
        "left_out": len(worlds) - len(proofs),
        "transfers": sum(proofs),
        "seconds": time.perf_counter() - began,
    }


def _proofs(algorithm: Algorithm, worlds: list[int]) -> Iterator[int]:
    """The transfers followed for each n that the algorithm has a schedule for."""
    for n in worlds:
        try:
            made = algorithm(n)
        except UnsupportedWorld:
            continue
        yield made.verify().transfers


def _sentence(row: dict[str, object], n: str) -> str:
    rest = f" ({row['left_out']} not supported)" if row["left_out"] else ""
    return (
        f"{row['algorithm']}.{row['collective']}: verified for n = {n}{rest}: "
        f"{row['transfers']:,} transfers, {row['seconds']:.2f} s"
    )
