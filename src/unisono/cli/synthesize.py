"""`unisono synthesize`: a schedule made for one topology."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from unisono.algorithms import schedule
from unisono.cli._progress import waiting
from unisono.cli.output import print_json, print_text, refuse_unwritable
from unisono.errors import BadArgument, UsageError
from unisono.schedule.schedule import Schedule
from unisono.simulate import simulate as run
from unisono.simulate.candidates import candidates, fitted
from unisono.synthesize import SUFFIXES, Quickest, Synthesis, quickest, save
from unisono.synthesize import synthesize as make
from unisono.topology import Topology
from unisono.tune import topology_named
from unisono.units import format_bandwidth, format_bytes, format_seconds, parse_bytes

_NEAR = 0.98


def synthesize(
    collective: str = "all_reduce",
    /,
    *,
    topology: Annotated[str, Parameter(name=["-t", "--topology"])] = "dgx-h100:1",
    size: Annotated[str, Parameter(name=["-b", "--bytes"], metavar="SIZE")] = "",
    segments: int = 0,
    root: int = 0,
    slow: list[str] | None = None,
    failed: list[str] | None = None,
    output: Annotated[Path | None, Parameter(name=["-o", "--output"])] = None,
    alone: bool = False,
    small: bool = False,
    json: bool = False,
) -> int:
    """Make a schedule for a topology: trees or paths, as fast as its links allow.

    The schedule is verified and simulated, beside the algorithms of the library.

    Example: unisono synthesize all_reduce -t torus:4x4 --failed 0-1 -o mine.py

    Parameters
    ----------
    collective
        all_reduce, all_gather, reduce_scatter, broadcast, reduce or all_to_all.
    topology
        A preset, as switch:8, torus:4x4x4, dgx-h100:16,nics=1, a .toml file, or "this".
    size
        The size of a buffer in the simulation, as 32M; 1G unless given.
    segments
        Cut the data into so many parts that follow each other, in the simulation; 32
        unless given, and 1 with --small.
    root
        Where the data of a broadcast begins, or the sum of a reduce ends.
    slow
        A link with a part of its bandwidth, as "0>switch=0.1"; may be given again.
    failed
        A link that is down, as 4-5 (both ways) or "4>5"; may be given again.
    output
        Write the schedule to this file: .py, for --algorithm; .json or .npz, as data.
    alone
        Do not simulate the algorithms of the library beside it.
    small
        Search for the schedule of least time for small buffers (-b 4K unless given), on
        up to 8 ranks; also barrier.
    json
        Print one JSON object.
    """
    if output and output.suffix not in SUFFIXES:
        raise BadArgument(f"-o {output}: expected one of {', '.join(SUFFIXES)}")
    refuse_unwritable(output)
    where = topology_named(topology)
    nbytes = parse_bytes(size or ("4K" if small else "1G"))
    segments = segments or (1 if small else 32)
    conditions: dict[str, Any] = {"slow": _slow(slow), "failed": failed or []}
    began = time.perf_counter()
    with waiting(lambda: f"finding a schedule on {where.name}"):
        made: Synthesis | Quickest
        if small:
            made = quickest(collective, where, nbytes, root=root, **conditions)
        else:
            made = make(collective, where, root=root, **conditions)
    took = time.perf_counter() - began
    made.schedule.verify()
    facts = _facts(made, took, nbytes)
    with waiting(lambda: f"simulating {made.schedule.name} on {where.name}"):
        more = {k: v for k, v in conditions.items() if v}
        found = run(made.schedule, where, nbytes, segments=segments, **more)
        facts["time"] = found.time
        if not alone:
            facts |= _best(made, nbytes, segments, more)
    if output:
        save(made, output)
        facts["file"] = str(output)
    if json:
        print_json(facts)
    else:
        _print(facts)
    return 0


def _slow(given: list[str] | None) -> dict[str, float]:
    links = {}
    for text in given or []:
        link, _, part = text.rpartition("=")
        try:
            links[link] = float(part)
        except ValueError:
            raise BadArgument(f"--slow {text}: {part!r} is not a number") from None
    return links


def _facts(made: Synthesis | Quickest, took: float, nbytes: int) -> dict[str, object]:
    if isinstance(made, Quickest):
        more: dict[str, object] = {
            "transfers": sum(map(len, made.schedule)),
            "optimal": made.optimal,
            "taken_from": made.library or None,
        }
    else:
        more = {"trees": len(made.trees), "reached": made.reached}
    return {
        "collective": made.schedule.collective.name,
        "topology": made.topology.name,
        "n": made.schedule.n,
        "chunks": made.schedule.num_chunks,
        "depth": made.depth,
        "least": made.least,
        "optimum": made.optimum,
        "synthesis_seconds": took,
        "verified": True,
        "size": nbytes,
        **more,
    }


def _best(
    made: Synthesis | Quickest, nbytes: int, segments: int, conditions: dict[str, Any]
) -> dict[str, object]:
    """The fastest algorithm of the library, whole or cut into segments."""
    what, root = made.schedule.collective.name, made.schedule.root
    more = {"collective": what, **conditions}
    found = []
    for name in candidates(what, made.topology):
        for parts in sorted({1, 1 if "segments=" in name else segments}):
            try:
                one = _rooted(what, name, made.topology, root) if root else name
                result = run(one, made.topology, nbytes, segments=parts, **more)
            except UsageError:  # it cannot be cut into segments
                continue
            found.append((result.time, result.algorithm, parts))
    if not found:
        return {}
    least, name, parts = min(found)
    return {"library": name, "library_segments": parts, "library_time": least}


def _rooted(what: str, name: str, where: Topology, root: int) -> Schedule:
    return schedule(what, fitted(name, where), where.n, root=root)


def _print(facts: dict[str, object]) -> None:
    size, seconds = int(str(facts["size"])), float(str(facts["time"]))
    what = f"{facts['collective']} on {facts['topology']}, {facts['n']} ranks: "
    if "trees" in facts:
        _print_rates(what, facts)
    else:
        least = format_seconds(float(str(facts["least"])))
        count = f"{facts['transfers']} transfers, {facts['depth']}"
        print_text(f"{what}{count} one after the other")
        print_text(
            f"  least      {least} by latencies and cuts: no schedule is quicker"
        )
        reached = f"  optimum    {float(str(facts['optimum'])):.1%}"
        print_text(f"{reached}: optimal" if facts["optimal"] else reached)
        if facts["taken_from"]:
            print_text(
                f"  is         the library's {facts['taken_from']}: the search found "
                "nothing quicker"
            )
    took = format_seconds(float(str(facts["synthesis_seconds"])))
    print_text(f"  verified   made in {took}")
    print_text(f"  simulated  {format_bytes(size)} in {format_seconds(seconds)}")
    if "library" in facts and seconds:
        other = float(str(facts["library_time"]))
        parts = facts["library_segments"]
        cut = f" in {parts} segments" if parts != 1 else ""
        print_text(
            f"  library    {facts['library']}{cut}: {format_seconds(other)}, "
            f"{other / seconds:.2f} times as long"
        )
    if "file" in facts:
        print_text(f"  wrote      {facts['file']}")


def _print_rates(what: str, facts: dict[str, object]) -> None:
    print_text(
        f"{what}{facts['trees'] or 'no'} trees, {facts['chunks']} chunks, "
        f"depth {facts['depth']}"
    )
    rates = [float(str(facts[key])) for key in ("least", "reached")]
    best, reached = (format_bandwidth(1 / r) if r else "no limit" for r in rates)
    print_text(f"  links allow {best} of a buffer; the busiest link gives {reached}")
    print_text(f"  optimum    {float(str(facts['optimum'])):.1%}")
    if float(str(facts["optimum"])) < _NEAR:
        print_text(
            "             the topology's routes, or links with no common measure, "
            "leave the rest unused"
        )
