"""Constants from measurements: a search in one direction after the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from statistics import fmean

import msgspec

from benchmarks.published import pipelines
from benchmarks.published.tables import (
    PublishedCall,
    PublishedStep,
    engine_of,
    fabric,
    shape,
)
from unisono.simulate import TrainingStep, train
from unisono.simulate.engines import Calibration, modelled
from unisono.simulate.kernels import Device, find_device

PULL = 0.02
"""What it costs to leave the first guess, so that few rows do not decide much."""
BEFORE = Calibration(1.0, 0.82, 0.96, 0.5, 8.0, 1.0)
"""Before anything is fitted: an engine's constants, 82 % of links, 96 % of cards."""
MOST = 0.95
"""The part of a rate that is reached at most: more would be another rate."""
_FIRST, _LAST = 0.4, 0.01
"""Steps of the search, in logarithms."""


def search(
    cost: Callable[[Sequence[float]], float], guess: Sequence[float]
) -> list[float]:
    """Positive values with a low cost, near the guess; always the same."""
    first = [math.log(x) for x in guess]

    def judged(at: Sequence[float]) -> float:
        pull = fmean(abs(a - b) for a, b in zip(at, first, strict=True))
        return cost([math.exp(x) for x in at]) + PULL * pull

    best, step = list(first), [_FIRST] * len(first)
    least = judged(best)
    while max(step) > _LAST:
        for i in range(len(best)):
            for sign in (1, -1):
                tried = list(best)
                tried[i] += sign * step[i]
                if (found := judged(tried)) < least:
                    least, best = found, tried
                    break
            else:
                step[i] /= 2
    return [math.exp(x) for x in best]


# Collectives


def predicted(call: PublishedCall, given: Calibration) -> float:
    """Seconds by the engine's model."""
    where = fabric(call.source)
    engine = modelled(engine_of(call.source))
    return engine.time(call.collective, where, call.nbytes, given).seconds


def calibrated(rows: Sequence[PublishedCall]) -> Calibration:
    """What these rows make of the engine's constants."""

    def cost(values: Sequence[float]) -> float:
        given = Calibration(*values)
        return fmean(abs(math.log(predicted(r, given) / r.seconds)) for r in rows)

    return Calibration(*search(cost, astuple(BEFORE)))


# Training steps


@dataclass(frozen=True)
class Work:
    """What a micro-batch takes at full rates, and what is sent meanwhile."""

    matmul: float
    attention: float
    elementwise: float
    sent: float
    measured: float

    def seconds(self, values: Sequence[float]) -> float:
        """With these parts of the rates, and this part of hidden communication."""
        matmul, attention, elementwise, contention = values
        computed = self.matmul / matmul + self.attention / attention
        computed += self.elementwise / elementwise
        hidden = min(computed, self.sent)
        return max(computed, self.sent) + contention * hidden


_SLICES = {
    "tpu-v4": (6 * 45e9, 25e9 / 4),
    "tpu-v5e": (4 * 45e9, 25e9 / 8),
    "tpu-v5p": (6 * 90e9, 25e9 / 4),
    "tpu-v6e": (4 * 90e9, 100e9 / 8),
}
"""Of a chip, in bytes per second of one direction: all its links to other chips of its
slice, and its share of its host's cards. Links of two kinds are in jax-ml/scaling-book
(tpus.md, "TPU specs"), chips and cards of a host at https://cloud.google.com/tpu/docs."""


def topology(step: PublishedStep) -> str:
    """The machine of a step, as the simulator spells it."""
    hosts = max(1, step.ranks // step.per_host)
    if step.device in _SLICES:  # a slice is a host with a card for all its chips
        inside, across = _SLICES[step.device]
        rates = f"memory={inside:g},network={across * step.per_host:g}"
        return f"cloud:{hosts}x{step.per_host},{rates}"
    return f"dgx-{step.device.partition('-')[0]}:{hosts}"


def simulated(step: PublishedStep, device: Device) -> TrainingStep:
    """One micro-batch of the step, with NCCL's collectives."""
    return train(
        shape(step.model, step.sequence),
        topology(step),
        strategy="fsdp",
        tp=step.tp,
        sequence=step.sequence,
        batch=step.batch,
        recompute=step.recompute == "full",
        gradient_bytes=step.gradient_bytes,
        device=device,
        engine="nccl",
        attention=step.attention,
    )


def tokens_per_second(step: PublishedStep, device: Device) -> float:
    """What the simulator says; the optimizer works once for all micro-batches."""
    if step.played:
        took = pipelines.seconds(step, device, topology(step))
        return step.sequences * step.sequence / took
    found = simulated(step, device)
    tokens = step.sequence * step.batch * step.ranks / step.tp
    update = _update(step, device)
    seconds = step.microbatches * (found.time - update) + update
    return step.microbatches * tokens / seconds


def _update(step: PublishedStep, device: Device) -> float:
    size = shape(step.model, step.sequence).parameters / step.ranks
    return size * device.update


def work(step: PublishedStep) -> Work:
    """What the fit needs of a step, each class of kernels apart."""
    plain = find_device(step.device)
    rates = ("matmul", "attention", "elementwise")
    full = dict.fromkeys(rates, 1e9) | {"contention": 0.0}
    parts = []
    for rate in rates:
        device = msgspec.structs.replace(plain, **full | {rate: 1.0})
        found = simulated(step, device)
        parts.append(found.compute)
    tokens = step.sequence * step.batch * step.ranks / step.tp
    sent = found.communication
    return Work(parts[0], parts[1], parts[2], sent, tokens / step.tokens_per_second)


def fitted_device(name: str, rows: Sequence[PublishedStep]) -> Device:
    """The device with the rates that these steps show."""
    works = [work(row) for row in rows]

    def cost(values: Sequence[float]) -> float:
        return fmean(abs(math.log(w.seconds(values) / w.measured)) for w in works)

    values = search(lambda at: cost([min(x, MOST) for x in at]), (0.75, 0.3, 0.6, 0.2))
    names = ("matmul", "attention", "elementwise", "contention")
    return msgspec.structs.replace(
        find_device(name),
        **{name: min(x, MOST) for name, x in zip(names, values, strict=True)},
    )
