"""Published steps with pipelines, or whose data parallel ranks keep all states.

They are played out pass by pass as `unisono plan --search` does it, on the published
mesh, with NCCL's collectives. What was not published (the sequences of a micro-batch,
the chunks of a stage) is what is quickest of that which fits; authors chose it so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from math import ceil

from benchmarks.published.tables import PublishedStep, shape
from unisono.parallel.estimate import Axes
from unisono.search.cost import Passes, estimate
from unisono.search.memory import memory_of
from unisono.search.network import Groups, Network
from unisono.search.played import play
from unisono.search.space import BUCKETS, Choice, Job, Limits, choices
from unisono.simulate.groups import EqualGroups
from unisono.simulate.kernels import Device
from unisono.topology import parse


@cache
def network(topology: str) -> Network:
    """A machine with all prices that have been asked for."""
    return Network(parse(topology))


@cache
def _groups(topology: str, of: Groups) -> EqualGroups:
    where = network(topology)
    return EqualGroups(where.topology, where.members(of), "auto", "nccl")


def priced(topology: str, of: Groups, collective: str, nbytes: float) -> float:
    """Seconds of NCCL on groups of a mesh."""
    if not of or not nbytes:
        return 0.0
    return _groups(topology, of).time(collective, ceil(nbytes))[0]


def job_of(step: PublishedStep, device: Device) -> Job:
    """What was trained, on which ranks."""
    return Job(
        shape(step.model, step.sequence),
        step.ranks,
        step.sequences,
        step.sequence,
        device.peak,
        memory_rate=device.bandwidth * device.elementwise,
        memory=device.memory,
        gradient_bytes=step.gradient_bytes,
        device=device,
        plain=step.attention == "plain",
    )


def ways(step: PublishedStep, job: Job) -> Iterator[Choice]:
    """All ways in which the step may have been made, by what was published of it."""
    axes = Axes(dp=step.dp, tp=step.tp, pp=step.pp, cp=step.cp)
    given = {"dp": step.dp, "tp": step.tp, "pp": step.pp, "cp": step.cp, "ep": 1}
    zero = (0,) if step.strategy == "ddp" else (1, 2)
    if step.batch and step.chunks:
        known = Choice(axes, 0, step.recompute, step.batch, step.microbatches)
        yield from (replace(known, zero=z, chunks=step.chunks) for z in zero)
        return
    limits = Limits(given, zero=zero, recompute=(step.recompute,))
    for family in choices(job, limits):
        for choice in family:
            if step.batch in (0, choice.microbatch):
                yield choice


def seconds(step: PublishedStep, device: Device, topology: str) -> float:
    """Of a whole step, all micro-batches."""
    job, where = job_of(step, device), network(topology)
    price = partial(priced, topology)
    found = [replace(way, bucket=BUCKETS[-1]) for way in ways(step, job)]
    fitting = [way for way in found if memory_of(job, way).total <= job.memory]

    def closed(way: Choice) -> float:
        return estimate(Passes(job, way, where, price)).time

    best = min(fitting or found, key=closed)
    return play(Passes(job, best, where, price)).time
