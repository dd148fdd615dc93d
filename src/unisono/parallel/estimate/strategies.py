"""Memory and traffic of a training step by strategy: arithmetic, without ranks.

The formulas are those at the head of each strategy's file; the tests compare them with
what ranks send and keep. n ranks train on one batch in total: with strategies that
split it (ddp, zero, fsdp) each rank has 1/n of the batch, with the others all of it and
a part of the model or of the sequence.

    P      bytes of all parameters (gradients as many, optimizer state K times as many)
    A      bytes of one activation of the whole batch: sequences · tokens · hidden
    17 A   what a block of a gpt keeps for backward, with attention that keeps no
           scores: inputs and outputs of two norms; queries, keys, values and the output
           of attention in two layouts; both wide activations of the MLP
    (9 + 10 k) A   with k experts per token instead of the MLP

Other families keep more or less (`ModelShape.kept`). Estimates leave out what is small:
buffers, a few numbers per token, buckets in flight. `meshes` combines them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import ceil

from unisono.errors import BadArgument, whole_number
from unisono.models import KEPT_BETWEEN, ModelShape

BUCKET = 25 << 20


@dataclass(frozen=True)
class Setting:
    """How it is trained: ranks, one batch for all of them, bytes, optimizer state."""

    n: int
    batch: int = 1
    length: int = 0
    itemsize: int = 4
    optimizer: float = 2.0
    microbatches: int = 0

    def __post_init__(self) -> None:
        """Refuse sizes below one."""
        for name in ("n", "batch"):
            if whole_number(name, getattr(self, name)) < 1:
                raise BadArgument(f"plan: {name} = {getattr(self, name)}: at least one")


@dataclass(frozen=True)
class Estimate:
    """One strategy: bytes per rank, and what it sends per step in how many calls."""

    strategy: str
    parameters: float
    gradients: float
    optimizer: float
    activations: float
    sent: float
    calls: int
    axes: dict[str, float] = field(default_factory=dict)
    """Bytes sent along each axis of a mesh."""

    @property
    def memory(self) -> float:
        """Bytes of all of these."""
        return self.parameters + self.gradients + self.optimizer + self.activations


def estimates(model: ModelShape, at: Setting) -> Iterator[Estimate]:
    """Every strategy that can be estimated from the model's description."""
    yield from _of_weights(model, at)
    if model.hidden and at.length and not model.experts:
        yield from _of_activations(model, at)


def all_gather(n: int, nbytes: float) -> float:
    """What a rank sends in an all_gather or reduce_scatter of this size in total."""
    return (n - 1) / n * nbytes


def all_reduce(n: int, nbytes: float) -> float:
    """What a rank sends in an all_reduce: both of these."""
    return 2 * all_gather(n, nbytes)


def _of_weights(model: ModelShape, at: Setting) -> Iterator[Estimate]:
    """Strategies that send weights and gradients: each rank has 1/n of the batch."""
    p = model.parameters * at.itemsize
    kept = kept_in_block(model) * model.layers * activation(model, at) / at.n
    yield from data_parallel(p, at, at.n, model.block * at.itemsize, model.layers, kept)


def data_parallel(
    p: float, at: Setting, n: int, block: float, layers: int, kept: float
) -> Iterator[Estimate]:
    """DDP, ZeRO and FSDP of p bytes of parameters on n data parallel ranks."""
    k = at.optimizer
    buckets, units = ceil(p / BUCKET), layers + 1
    yield Estimate("ddp", p, p, k * p, kept, all_reduce(n, p), buckets)
    twice = 2 * all_gather(n, p)
    yield Estimate("zero1", p, p + p / n, k * p / n, kept, twice, 2 * buckets)
    yield Estimate("zero2", p, p / n, k * p / n, kept, twice, 2 * buckets)
    thrice = 3 * all_gather(n, p)
    # Full parameters of the unit in use, and of the next.
    mine = p / n + (2 * block if n > 1 else 0)
    yield Estimate("fsdp", mine, p / n, k * p / n, kept, thrice, 3 * units)


def the_other_way(model: ModelShape, at: Setting) -> list[Estimate]:
    """DDP with the collectives of FSDP, and FSDP with that of DDP.

    - ddp by reduce_scatter and all_gather of gradients: an all_reduce in two calls.
    - ddp that gathers parameters as fsdp does, though it has them.
    - fsdp by all_reduce of gradients: a rank gets all sums, and uses those of its
      shard.
    """
    rows = {row.strategy: row for row in _of_weights(model, at)}
    ddp, fsdp = rows["ddp"], rows["fsdp"]
    once = all_gather(at.n, model.parameters * at.itemsize)
    return [
        replace(ddp, strategy="ddp, gathers gradients", calls=2 * ddp.calls),
        replace(
            ddp, strategy="ddp, gathers parameters", sent=3 * once, calls=fsdp.calls
        ),
        replace(fsdp, strategy="fsdp, all_reduce", sent=4 * once),
    ]


def _of_activations(model: ModelShape, at: Setting) -> Iterator[Estimate]:
    """Strategies that send activations: each rank has a part of model or sequence."""
    n, k, size = at.n, at.optimizer, at.itemsize
    p, a = model.parameters * size, activation(model, at)
    layers = model.layers
    mine = stage(model, layers, 1, n) * size
    states = mine, mine, k * mine
    tokens = at.batch * at.length
    pairs = (2 * layers + 1) * 2  # each direction, with the embedding and the head
    loss = all_reduce(n, 3 * tokens * size)
    sent = pairs * all_reduce(n, a) + loss
    kept = layers * (KEPT_BETWEEN + model.kept_inside / n) * a
    yield Estimate("tensor", *states, kept, sent, pairs + 2)
    replicated = (model.replicated * layers + model.final_norm) * size
    tensors = model.replicated_tensors * layers + model.norm_tensors
    half = KEPT_BETWEEN / 2  # the outputs of norms are gathered
    kept = layers * (half + (half + model.kept_inside) / n) * a
    yield Estimate(
        "sequence",
        *states,
        kept,
        sent + all_reduce(n, replicated),
        2 * pairs + 2 + tensors,
    )
    full = p, p, k * p, model.kept * layers * a / n
    ring = layers * (3 * n - 2) * 2 * a / n if n > 1 else 0.0
    swaps = layers * 2 * all_gather(n, 4 * a / n)
    average = all_reduce(n, p)
    buckets = ceil(p / BUCKET)
    yield Estimate("ring", *full, ring + average, layers * (3 * n - 2) + buckets)
    yield Estimate("all_to_all", *full, swaps + average, 8 * layers + buckets)
    if n <= layers:
        yield _pipeline(model, at)


def _pipeline(model: ModelShape, at: Setting) -> Estimate:
    """The first stage, which keeps most: activations of n micro-batches."""
    n, a = at.n, activation(model, at)
    m = at.microbatches or min(4 * n, at.batch)
    layers = ceil(model.layers / n)
    mine = stage(model, layers, n) * at.itemsize
    kept = kept_in_block(model) * layers * a * min(m, n) / m
    sent = (2 if n > 2 else 1) * a if n > 1 else 0.0
    calls = (2 if n > 2 else 1) * m if n > 1 else 0
    return Estimate("pipeline", mine, mine, at.optimizer * mine, kept, sent, calls)


def stage(model: ModelShape, layers: int, pp: int, tp: int = 1) -> float:
    """Parameters that a rank of the first stage has, without experts."""
    if not model.hidden:
        return model.parameters / pp
    words = model.vocabulary * model.hidden / tp
    ends = words + model.places * model.hidden
    if pp == 1:  # otherwise the head and its norm are on the last stage
        ends += (0 if model.tied else words) + model.final_norm + model.pooler
    return layers * sharded_block(model, tp) + ends


def sharded_block(model: ModelShape, tp: int = 1) -> float:
    """Parameters that a rank has of one block, without experts."""
    if not model.hidden:
        return model.block / tp
    replicated = model.replicated
    shared = model.block - model.experts * model.mlp
    return replicated + (shared - replicated) / tp


def kept_in_block(model: ModelShape) -> float:
    """Activations that a block keeps for backward; 0 if the shape is not known."""
    return model.kept if model.hidden else 0.0


def activation(model: ModelShape, at: Setting) -> float:
    """A: bytes of one activation of the whole batch."""
    return at.batch * at.length * model.hidden * at.itemsize


def first_that_fits(model: ModelShape, at: Setting, memory: float) -> Estimate | None:
    """The first strategy, in the order of `estimates`, that needs no more memory."""
    return next((e for e in estimates(model, at) if e.memory <= memory), None)
