"""`simulate`: a schedule, a topology, a number of bytes, and the fidelity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from unisono.errors import BadArgument, BadTopology, NotOffered, unknown, whole_number
from unisono.schedule.collective import COLLECTIVES, collective
from unisono.schedule.schedule import Schedule
from unisono.simulate import closed
from unisono.simulate.candidates import fitted, schedule_for
from unisono.simulate.conditions import CodecModel, Conditions, SimulatedWorld
from unisono.simulate.events import by_events
from unisono.simulate.limits import fits
from unisono.simulate.messages import chunk_bytes
from unisono.simulate.overlap import Compute, beside
from unisono.simulate.result import Result
from unisono.simulate.steps import by_steps
from unisono.topology import Topology, parse
from unisono.units import parse_bytes

FIDELITIES = ("auto", "closed", "steps", "events")
"""How closely to simulate; "auto" chooses, see `simulate`."""

LARGE = 1 << 14
"""From how many ranks on "auto" takes the closed form."""


def simulate(
    what: Schedule | str,
    topology: Topology | str,
    nbytes: int | str,
    fidelity: str = "auto",
    *,
    collective: str = "all_reduce",
    segments: int = 1,
    delays: Mapping[int, float] | Sequence[float] = (),
    slow: Mapping[str, float] | None = None,
    failed: Sequence[str] = (),
    reduce: float | None = None,
    codec: CodecModel | None = None,
    compute: Compute | float = 0.0,
) -> Result:
    """How long a schedule takes on a topology, and what decides it.

    `what` is a schedule, or the name of an algorithm for `collective`; `nbytes` the
    size of one rank's buffer. "closed" is for any number of ranks and costs
    microseconds once the law is known; "steps" has link loads and a clock per rank;
    "events" has max-min fair flows. "auto" depends on the topology alone, so that a
    delay changes the time by what it costs and not by another model: events where
    messages go in streams, unless that would take minutes; the closed form above 16,384
    ranks (not with delays, slow or failed links, where steps gives the same); steps
    else. Where ranks drift apart events is nearer to the truth. `compute` is what the
    ranks have to compute meanwhile, in seconds; a `Compute` also gives the share of
    speed that is left.
    """
    where = parse(topology) if isinstance(topology, str) else topology
    size = parse_bytes(nbytes) if isinstance(nbytes, str) else nbytes
    size, segments = whole_number("nbytes", size), whole_number("segments", segments)
    if size < 0 or segments < 1:
        raise BadArgument(
            f"nbytes = {size}, segments = {segments}: expected 0 or more, 1 or more"
        )
    given = Conditions(
        _by_rank(delays), dict(slow or {}), tuple(failed), reduce, codec or CodecModel()
    )
    busy = compute if isinstance(compute, Compute) else Compute(float(compute))
    how = _fidelity(fidelity, where, given)
    if how == "closed":
        result = _closed(what, where, size, collective, segments, given)
        return beside(result, busy)
    world = SimulatedWorld.of(where, given)
    try:
        schedule = _schedule(what, where, collective, segments, events=how == "events")
        result = (_events if how == "events" else _steps)(schedule, world, size)
    except NotOffered:
        if how != "events" or fidelity == "events":
            raise
        schedule = _schedule(what, where, collective, segments)
        result = _steps(schedule, world, size)
    return beside(result, busy)


def _events(schedule: Schedule, world: SimulatedWorld, nbytes: int) -> Result:
    events = by_events(schedule, world, chunk_bytes(schedule, nbytes))
    return Result(
        schedule.collective,
        schedule.name,
        world.topology,
        nbytes,
        "events",
        float(events.finished.max()),
        world.bound(schedule.collective, nbytes, schedule.root),
        bandwidth=world.bandwidth[:-1],
        messages=events.timeline.src.size,
        events=events.count,
        finished=events.finished,
        carried=events.carried,
        path=events.path(),
        timeline=events.timeline,
    )


def _steps(schedule: Schedule, world: SimulatedWorld, nbytes: int) -> Result:
    clocks = by_steps(schedule, world, chunk_bytes(schedule, nbytes), keep=True)
    return Result(
        schedule.collective,
        schedule.name,
        world.topology,
        nbytes,
        "steps",
        float(clocks.clock.max()),
        world.bound(schedule.collective, nbytes, schedule.root),
        bandwidth=world.bandwidth[:-1],
        messages=clocks.count,
        finished=clocks.clock[0],
        carried=clocks.carried[:-1],
        path=clocks.path(),
        timeline=clocks.timeline(),
    )


def sweep(
    algorithm: str,
    topology: Topology,
    sizes: Sequence[int],
    *,
    collective: str = "all_reduce",
    segments: int = 1,
) -> list[Result]:
    """The same for many sizes at once, by steps, or by closed form if it is large.

    Bytes are shared out evenly to fractions of one, which is the only difference to
    asking for each size apart.
    """
    how = _fidelity("auto", topology, Conditions())
    if how != "steps":
        more: dict[str, Any] = {"collective": collective, "segments": segments}
        return [simulate(algorithm, topology, size, **more) for size in sizes]
    schedule = _schedule(algorithm, topology, collective, segments)
    world = SimulatedWorld.of(topology, Conditions())
    unit = chunk_bytes(schedule, None)
    clocks = by_steps(schedule, world, unit, np.array(sizes, dtype=np.float64))
    results = []
    for size, row in zip(sizes, clocks.clock, strict=True):
        least = world.bound(schedule.collective, size, schedule.root)
        carried = clocks.carried[:-1] * size
        results.append(
            Result(
                schedule.collective,
                schedule.name,
                topology,
                size,
                "steps",
                float(row.max()),
                least,
                clocks.count,
                finished=row,
                carried=carried,
            )
        )
    return results


def _by_rank(delays: Mapping[int, float] | Sequence[float]) -> dict[int, float]:
    if isinstance(delays, Mapping):
        return {whole_number("rank", r): float(late) for r, late in delays.items()}
    return {rank: float(late) for rank, late in enumerate(delays)}


def _fidelity(fidelity: str, topology: Topology, given: Conditions) -> str:
    if fidelity not in FIDELITIES:
        raise unknown("fidelity", fidelity, FIDELITIES)
    if fidelity != "auto":
        return fidelity
    if topology.streams:
        return "events"
    large = topology.n > LARGE and topology.grown is not None and given.usual
    return "closed" if large else "steps"


def _schedule(
    what: Schedule | str,
    topology: Topology,
    name: str,
    segments: int,
    *,
    events: bool = False,
) -> Schedule:
    if isinstance(what, str):
        fits(name, what, topology, segments, events=events)
        return schedule_for(name, what, topology, segments)
    if what.n != topology.n:
        raise BadTopology(
            f"{what.title}: {topology.name} has {topology.n} ranks; expected as many "
            "as the schedule"
        )
    return what.split(segments) if segments > 1 else what


def _closed(
    what: Schedule | str,
    topology: Topology,
    nbytes: int,
    name: str,
    segments: int,
    given: Conditions,
) -> Result:
    if not isinstance(what, str):
        raise NotOffered(
            "closed form: needs the name of an algorithm, to have it at other sizes "
            "too; a schedule alone can be simulated by steps or events"
        )
    cost = closed.line(collective(name).name, what, topology, segments, given)
    return Result(
        COLLECTIVES[name],
        fitted(what, topology),
        topology,
        nbytes,
        "closed",
        cost.time(nbytes),
        cost.least * nbytes * given.codec.ratio,
        exact=cost.exact,
    )
