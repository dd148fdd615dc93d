"""What a step needs and sends on a mesh: the axes' formulas, put together.

    dp   replicas, each with 1/dp of the batch
    tp   1/tp of every layer                       activations are summed, in each pair
    pp   a run of the layers                       activations go to the neighbours
    cp   1/cp of the sequence                      keys and values go round
    ep   1/ep of the experts, and of the batch     tokens go to their experts and back

A rank has the part of the model that tp and pp leave it, and of the batch what dp, ep
and cp leave it. The ranks that have the same part of the model average its gradients,
dp · cp · ep of them: as DDP does, or ZeRO, or FSDP. Only DDP is offered where one of
the others does not compose (a pipeline, experts). Experts are not cut by tp.

The formulas are those of `estimate`, and the tests hold both against ranks at work.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from math import ceil, prod

from unisono.errors import BadArgument, whole_number
from unisono.parallel.estimate.strategies import (
    INNER,
    WHOLE,
    Estimate,
    Model,
    Setting,
    all_gather,
    all_reduce,
    cut_block,
    sharded,
    stage,
)

MOST_IDLE = 0.25


@dataclass(frozen=True)
class Axes:
    """How many ranks each axis has."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        for name, size in asdict(self).items():
            if whole_number(f"mesh: {name}", size) < 1:
                raise BadArgument(f"mesh: {name} = {size}: at least one")

    @property
    def n(self) -> int:
        """All ranks."""
        return prod(asdict(self).values())

    @property
    def alike(self) -> int:
        """How many ranks have the same part of the model, experts aside."""
        return self.dp * self.cp * self.ep

    def __str__(self) -> str:
        """As it is written: dp=2,tp=4."""
        said = [f"{name}={size}" for name, size in asdict(self).items() if size > 1]
        return ",".join(said) or "dp=1"


def on_mesh(model: Model, at: Setting, axes: Axes) -> Iterator[Estimate]:
    """What a rank needs and sends there, for each way to keep what replicas share."""
    if problem := misfit(model, at, axes):
        raise BadArgument(f"mesh {axes}: {problem}")
    layers = ceil(model.layers / axes.pp)
    along, calls = _along(model, at, axes, layers)
    shared = at.itemsize * stage(model, layers, axes.pp, axes.tp)
    experts = at.itemsize * layers * model.experts * model.expert / axes.ep
    a, m = _share(model, at, axes), microbatches(at, axes)
    flying = min(m, axes.pp) / m if axes.pp > 1 else 1.0
    kept = layers * _kept(model, axes) * a * flying
    block = at.itemsize * cut_block(model, axes.tp)
    k = at.optimizer
    among = axes.dp * axes.cp  # who has the same experts
    for way in sharded(shared, at, axes.alike, block, layers, kept):
        if way.strategy != "ddp" and (axes.pp > 1 or model.experts):
            return
        sent = {"average": way.sent + all_reduce(among, experts), **along}
        yield replace(
            way,
            parameters=way.parameters + experts,
            gradients=way.gradients + experts,
            optimizer=way.optimizer + k * experts,
            sent=sum(sent.values()),
            calls=way.calls + calls,
            axes={axis: value for axis, value in sent.items() if value},
        )


def misfit(model: Model, at: Setting, axes: Axes) -> str:
    """Why the model cannot be trained on such a mesh; empty if it can."""
    shaped = model.width and at.length
    problems = {
        f"it has {axes.n} ranks, there are {at.n}": axes.n != at.n,
        f"tp and cp need the shape of {model.name}, as in gpt:layers=12,width=768": (
            not shaped and axes.tp * axes.cp > 1
        ),
        f"the width {model.width} cannot be divided by tp": model.width % axes.tp,
        f"{model.layers} layers are too few for pp": model.layers < axes.pp,
        f"{at.length} tokens cannot be cut in 2 cp blocks": (
            axes.cp > 1 and at.length % (2 * axes.cp)
        ),
        f"a batch of {at.batch} cannot be divided by dp and ep": (
            at.batch % (axes.dp * axes.ep)
        ),
        f"{at.microbatches} micro-batches are more than the rows of a replica": (
            axes.pp > 1 and at.microbatches > _rows(at, axes)
        ),
        f"{model.experts} experts cannot be divided by ep": (
            axes.ep > 1 and (not model.experts or model.experts % axes.ep)
        ),
        "experts are not cut by tp": model.experts and axes.tp > 1,
    }
    return next((told for told, wrong in problems.items() if wrong), "")


def meshes(model: Model, at: Setting) -> Iterator[Axes]:
    """Every mesh of n ranks that the model fits on."""
    for tp in _divisors(at.n):
        for pp in _divisors(at.n // tp):
            for cp in _divisors(at.n // tp // pp):
                for ep in _divisors(at.n // tp // pp // cp):
                    axes = Axes(at.n // tp // pp // cp // ep, tp, pp, cp, ep)
                    if not misfit(model, at, axes):
                        yield axes


def best_mesh(model: Model, at: Setting, memory: float) -> tuple[Axes, Estimate] | None:
    """Of those that need no more than this, the one on which a rank sends least.

    Pipelines that idle for more than a quarter of the time are left out.
    """
    fitting = [
        (way.sent, sum(size > 1 for size in asdict(axes).values()), axes, way)
        for axes in meshes(model, at)
        if idle(at, axes) <= MOST_IDLE
        for way in on_mesh(model, at, axes)
        if way.memory <= memory
    ]
    if not fitting:
        return None
    *_, axes, way = min(fitting, key=lambda found: found[:2])
    return axes, way


def microbatches(at: Setting, axes: Axes) -> int:
    """Into how many a pipeline cuts its batch."""
    return at.microbatches or min(4 * axes.pp, _rows(at, axes))


def idle(at: Setting, axes: Axes) -> float:
    """The share of the time in which a stage of the pipeline waits."""
    m = microbatches(at, axes)
    return (axes.pp - 1) / (m + axes.pp - 1)


def _rows(at: Setting, axes: Axes) -> int:
    """Sequences of the batch that a rank has a part of."""
    return at.batch // (axes.dp * axes.ep)


def _share(model: Model, at: Setting, axes: Axes) -> float:
    """Bytes of one activation of what a rank has of the batch."""
    return _rows(at, axes) * at.length / axes.cp * model.width * at.itemsize


def _kept(model: Model, axes: Axes) -> float:
    return model.kept if axes.tp == 1 else WHOLE + INNER / axes.tp


def _along(
    model: Model, at: Setting, axes: Axes, layers: int
) -> tuple[dict[str, float], int]:
    """What activations cost on each axis, on the busiest rank; and in how many calls.

    That is one of the last stage for tp, one in the middle for pp.
    """
    a, sent, calls = _share(model, at, axes), {}, 0
    turns = microbatches(at, axes) if axes.pp > 1 else 1
    if axes.tp > 1:
        sums = 4 * layers + (2 if axes.pp == 1 else 1)
        loss = all_reduce(axes.tp, 3 * a / model.width)
        sent["tp"] = sums * all_reduce(axes.tp, a) + loss
        calls += (sums + 2) * turns
    if axes.pp > 1:
        neighbours = 2 if axes.pp > 2 else 1
        sent["pp"] = neighbours * a
        calls += neighbours * turns
    if axes.cp > 1:
        hops = layers * (3 * axes.cp - 2)
        sent["cp"] = hops * 2 * a / axes.tp
        calls += hops * turns
    if axes.ep > 1:
        sent["ep"] = layers * 4 * model.top_k * all_gather(axes.ep, a)
        calls += 5 * layers * turns
    return sent, calls


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
