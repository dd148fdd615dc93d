"""Simulation by events: messages wait for their data, and flows share links fairly.

A message waits until everything that it reads and overwrites is done (the dependencies
of the schedule, not its steps), and until its sender's earlier messages are sent; or,
if the topology has `streams`, those to the same rank. What a rank sends to another in a
step is one message; with `streams` each chunk that is copied is, and those of one step
leave in the runtime's order. Then it is a flow along its route. When a flow begins or
ends, the rates of flows that share a saturated link with it are computed again, max-min
fair. The native core does the work.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.errors import UsageError
from unisono.schedule.collective import Ints
from unisono.schedule.message_order import as_simulated
from unisono.schedule.oracle import checked_steps
from unisono.schedule.schedule import Schedule
from unisono.simulate.conditions import SimulatedWorld
from unisono.simulate.limits import Load
from unisono.simulate.result import Hop, Timeline
from unisono.topology.topology import Floats

try:
    from unisono import _native
except ImportError:  # a source tree without its native core
    _native = None  # type: ignore[assignment]


@dataclass(frozen=True, eq=False)
class Events:
    """The result: when ranks finished, what links carried, and every message."""

    world: SimulatedWorld
    count: int
    finished: Floats
    carried: Floats
    timeline: Timeline
    cause: Ints

    def path(self) -> tuple[Hop, ...]:
        """From the message that ended last, back through those that let it go."""
        hops: list[Hop] = []
        line = self.timeline
        at = int(np.argmax(line.end)) if line.end.size else -1
        while at >= 0:
            src, dst = int(line.src[at]), int(line.dst[at])
            when = float(line.start[at]), float(line.end[at])
            size = float(line.nbytes[at])
            link = self._busiest(src, dst)
            hops.append(Hop(int(line.step[at]), src, dst, size, *when, link))
            at = int(self.cause[at])
        return tuple(reversed(hops))

    def _busiest(self, src: int, dst: int) -> str:
        """The link of a route that was busy longest."""
        row = self.world.route(np.array([src]), np.array([dst]))[0]
        row = row[row >= 0]
        if not row.size:
            return "none"
        busy = self.carried[row] / self.world.bandwidth[row]
        return self.world.topology.wiring.link_name(int(row[np.argmax(busy)]))


def by_events(schedule: Schedule, world: SimulatedWorld, sizes: Floats) -> Events:
    """Run a schedule for slots of `sizes` bytes to its end."""
    simulator = loaded(schedule, world, sizes)
    count = simulator.run(world.start, world.n)
    step, src, dst, nbytes, start, end, cause = simulator.messages()
    return Events(
        world,
        count,
        simulator.finished(),
        simulator.carried(),
        Timeline(step + 1, src, dst, nbytes, start, end),
        cause,
    )


def loaded(
    schedule: Schedule, world: SimulatedWorld, sizes: Floats
) -> _native.Simulator:
    """The simulator with all messages, their dependencies and paths, before it runs."""
    if _native is None:
        raise UsageError(
            "simulate: events need the native core, which is not built here; take "
            "fidelity='steps'"
        )
    codec, load = world.codec, Load(f"{schedule.title}, events", world)
    load.begins(sizes.size)
    simulator = _native.Simulator(
        world.n,
        np.ascontiguousarray(sizes),
        np.ascontiguousarray(world.bandwidth[:-1]),
        world.twins,
        world.overhead,
        codec.encode,
        codec.decode,
        world.reduce,
        codec.ratio,
        world.topology.duplex,
        world.topology.streams,
    )
    sent = as_simulated(world.n, sizes.size, streams=world.topology.streams)
    for step in checked_steps(schedule):
        load.add(step)
        src, dst, chunk, mask, into = sent(step)
        simulator.add(
            _whole(src), _whole(dst), _whole(chunk), _whole(into), _whole(mask)
        )
        pair = simulator.unknown()
        if pair.size:
            simulator.know(*_paths(world, pair))
    return simulator


def _whole(array: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(array)


def _paths(world: SimulatedWorld, pair: Ints) -> tuple[Ints, Ints, Floats]:
    """Where each pair's links begin, the links end to end, and the latencies."""
    table = world.route(pair // world.n, pair % world.n)
    there = table >= 0
    first = np.concatenate([[0], np.cumsum(there.sum(axis=1))])
    return first, table[there], world.latency[table].sum(axis=1)
