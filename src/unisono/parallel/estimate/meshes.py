"""Memory and traffic of a training step on a mesh: the formulas of all axes combined.

    dp   replicas, each with 1/dp of the batch
    tp   1/tp of every layer                       activations are summed, in each pair
    pp   a run of the layers                       activations go to the neighbours
    cp   1/cp of the sequence                      keys and values are sent around
    ep   1/ep of the experts, and of the batch     tokens are sent to experts and back

A rank has the part of the model that tp and pp give it, and of the batch the part that
dp, ep and cp give it. The dp · cp · ep ranks with the same part of the model average
its gradients: as DDP does, or ZeRO, or FSDP. Only DDP is offered where the others
cannot be combined (a pipeline, experts). Experts are not sharded by tp.

The formulas are those of `strategies`; the tests compare both with what ranks do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from math import ceil, prod

from unisono.errors import BadArgument, whole_number
from unisono.memory_use import kept, kept_in_block, logits
from unisono.models import ModelShape
from unisono.parallel.estimate.strategies import (
    Estimate,
    Setting,
    all_gather,
    all_reduce,
    data_parallel,
    sharded_block,
    stage,
)

MOST_IDLE = 0.25


@dataclass(frozen=True)
class Axes:
    """The number of ranks of each axis."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        """Refuse sizes below one."""
        for name, size in asdict(self).items():
            if whole_number(f"mesh: {name}", size) < 1:
                raise BadArgument(f"mesh: {name} = {size}: at least one")

    @property
    def n(self) -> int:
        """All ranks."""
        return prod(asdict(self).values())

    @property
    def replicas(self) -> int:
        """How many ranks have the same part of the model, without experts."""
        return self.dp * self.cp * self.ep

    def __str__(self) -> str:
        """As users write it: dp=2,tp=4."""
        sizes = [f"{name}={size}" for name, size in asdict(self).items() if size > 1]
        return ",".join(sizes) or "dp=1"


def on_mesh(model: ModelShape, at: Setting, axes: Axes) -> Iterator[Estimate]:
    """What a rank needs and sends there, with ddp, zero and fsdp among replicas."""
    if problem := misfit(model, at, axes):
        raise BadArgument(f"mesh {axes}: {problem}")
    layers = ceil(model.layers / axes.pp)
    along, calls = _along(model, at, axes, layers)
    shared = at.itemsize * stage(model, layers, axes.pp, axes.tp)
    experts = at.itemsize * layers * model.experts * model.mlp / axes.ep
    a, m = _activation(model, at, axes), microbatches(at, axes)
    piped = axes.pp > 1
    held = kept(
        layers,
        kept_in_block(model, axes.tp),
        a,
        recompute=at.recompute,
        in_flight=min(m, axes.pp) / m if piped else 1.0,
        at_once=1 / m if piped else 1.0,
    )
    tokens = 0.0 if piped else _rows(at, axes) * at.length / axes.cp
    words = logits(model, tokens, at.itemsize, axes.tp)
    block = at.itemsize * sharded_block(model, axes.tp)
    k = at.optimizer
    same_experts = axes.dp * axes.cp
    for estimate in data_parallel(shared, at, axes.replicas, block, layers, held):
        if estimate.strategy != "ddp" and (axes.pp > 1 or model.experts):
            return
        sent = {"average": estimate.sent + all_reduce(same_experts, experts), **along}
        yield replace(
            estimate,
            parameters=estimate.parameters + experts,
            gradients=estimate.gradients + experts,
            optimizer=estimate.optimizer + k * experts,
            logits=words,
            sent=sum(sent.values()),
            calls=estimate.calls + calls,
            axes={axis: value for axis, value in sent.items() if value},
        )


def misfit(model: ModelShape, at: Setting, axes: Axes) -> str:
    """Why the model cannot be trained on such a mesh; empty if it can."""
    shaped = model.hidden and at.length
    problems = {
        f"it has {axes.n} ranks, there are {at.n}": axes.n != at.n,
        f"tp and cp need the shape of {model.name}, as in gpt:layers=12,hidden=768": (
            not shaped and axes.tp * axes.cp > 1
        ),
        f"hidden = {model.hidden} cannot be divided by tp": model.hidden % axes.tp,
        f"the width of keys, {_kv_width(model)}, cannot be divided by tp": (
            _kv_width(model) % axes.tp
        ),
        f"{model.layers} layers are too few for pp": model.layers < axes.pp,
        f"{at.length} tokens cannot be divided into 2 cp blocks": (
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
        "experts are not sharded by tp": model.experts and axes.tp > 1,
    }
    return next((problem for problem, wrong in problems.items() if wrong), "")


def meshes(model: ModelShape, at: Setting) -> Iterator[Axes]:
    """Every mesh of n ranks that the model fits on."""
    for tp in _divisors(at.n):
        for pp in _divisors(at.n // tp):
            for cp in _divisors(at.n // tp // pp):
                for ep in _divisors(at.n // tp // pp // cp):
                    axes = Axes(at.n // tp // pp // cp // ep, tp, pp, cp, ep)
                    if not misfit(model, at, axes):
                        yield axes


def best_mesh(
    model: ModelShape, at: Setting, memory: float
) -> tuple[Axes, Estimate] | None:
    """Of meshes that need no more than this, the one on which a rank sends least.

    Pipelines that idle for more than a quarter of the time are left out.
    """
    fitting = [
        (estimate.sent, _axes_used(axes), axes, estimate)
        for axes in meshes(model, at)
        if idle(at, axes) <= MOST_IDLE
        for estimate in on_mesh(model, at, axes)
        if estimate.needed <= memory
    ]
    if not fitting:
        return None
    *_, axes, estimate = min(fitting, key=lambda candidate: candidate[:2])
    return axes, estimate


def microbatches(at: Setting, axes: Axes) -> int:
    """The number of micro-batches of a pipeline."""
    return at.microbatches or min(4 * axes.pp, _rows(at, axes))


def idle(at: Setting, axes: Axes) -> float:
    """The part of the time in which a stage of the pipeline waits."""
    m = microbatches(at, axes)
    return (axes.pp - 1) / (m + axes.pp - 1)


def _rows(at: Setting, axes: Axes) -> int:
    """Sequences of the batch that a rank has a part of."""
    return at.batch // (axes.dp * axes.ep)


def _activation(model: ModelShape, at: Setting, axes: Axes) -> float:
    """Bytes of one activation of a rank's part of the batch."""
    return _rows(at, axes) * at.length / axes.cp * model.hidden * at.itemsize


def _kv_width(model: ModelShape) -> int:
    return model.kv_width if model.hidden else 0


def _axes_used(axes: Axes) -> int:
    return sum(size > 1 for size in asdict(axes).values())


def _along(
    model: ModelShape, at: Setting, axes: Axes, layers: int
) -> tuple[dict[str, float], int]:
    """Bytes of activations sent on each axis by the busiest rank, and the calls.

    That is a rank of the last stage for tp, one in the middle for pp.
    """
    a, sent, calls = _activation(model, at, axes), {}, 0
    turns = microbatches(at, axes) if axes.pp > 1 else 1
    if axes.tp > 1:
        sums = 4 * layers + (2 if axes.pp == 1 else 1)
        loss = all_reduce(axes.tp, 3 * a / model.hidden)
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
