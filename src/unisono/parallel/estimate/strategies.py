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

Other families keep more or less (`ModelShape.kept`). With recomputation a block keeps
its input, and one block at a time has all. Estimates leave out what is small: buffers,
a few numbers per token. `meshes` combines them, `memory_use` says what is counted.

Buckets: with ddp and zero1 gradients lie in them; with zero2 two are under way at a
time, with fsdp the gradients of one unit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import ceil

from unisono.errors import BadArgument, whole_number
from unisono.memory_use import MemoryUse, kept, kept_in_block, logits
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
    recompute: bool = False

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
    logits: float = 0.0
    buckets: float = 0.0

    @property
    def use(self) -> MemoryUse:
        """The memory of a rank, by what it is for."""
        states = self.parameters, self.gradients, self.optimizer
        return MemoryUse(*states, self.activations, self.logits, self.buckets)

    @property
    def memory(self) -> float:
        """Bytes of all of these."""
        return self.use.counted

    @property
    def needed(self) -> float:
        """What a device must have: these bytes, and an allowance for fragmentation."""
        return self.use.total


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
    layers, a = model.layers, activation(model, at) / at.n
    held = kept(layers, kept_in_block(model), a, recompute=at.recompute)
    words = logits(model, at.batch * at.length / at.n, at.itemsize)
    block = model.block * at.itemsize
    for estimate in data_parallel(p, at, at.n, block, layers, held):
        yield replace(estimate, logits=words)


def data_parallel(
    p: float, at: Setting, n: int, block: float, layers: int, held: float
) -> Iterator[Estimate]:
    """DDP, ZeRO and FSDP of p bytes of parameters on n data parallel ranks."""
    k = at.optimizer
    buckets, units = ceil(p / BUCKET), layers + 1
    moving = min(2.0 * BUCKET, p) if n > 1 else 0.0
    yield Estimate("ddp", p, p, k * p, held, all_reduce(n, p), buckets)
    twice = 2 * all_gather(n, p)
    yield Estimate("zero1", p, p + p / n, k * p / n, held, twice, 2 * buckets)
    sharded = Estimate("zero2", p, p / n, k * p / n, held, twice, 2 * buckets)
    yield replace(sharded, buckets=moving)
    thrice = 3 * all_gather(n, p)
    # Full parameters of the unit in use, and of the next; gradients of one.
    mine, moving = p / n + (2 * block if n > 1 else 0), block if n > 1 else 0.0
    sharded = Estimate("fsdp", mine, p / n, k * p / n, held, thrice, 3 * units)
    yield replace(sharded, buckets=moving)


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
    again, block = at.recompute, kept_in_block(model, n)
    held, words = (
        kept(layers, block, a, recompute=again),
        logits(model, tokens, size, n),
    )
    yield Estimate("tensor", *states, held, sent, pairs + 2, logits=words)
    replicated = (model.replicated * layers + model.final_norm) * size
    tensors = model.replicated_tensors * layers + model.norm_tensors
    half = KEPT_BETWEEN / 2  # the outputs of norms are gathered
    block = half + (half + model.kept_inside) / n
    yield Estimate(
        "sequence",
        *states,
        kept(layers, block, a, recompute=again, edge=1 / n),
        sent + all_reduce(n, replicated),
        2 * pairs + 2 + tensors,
        logits=words,
    )
    full = p, p, k * p, kept(layers, model.kept, a / n, recompute=again)
    ring = layers * (3 * n - 2) * 2 * a / n if n > 1 else 0.0
    swaps = layers * 2 * all_gather(n, 4 * a / n)
    average = all_reduce(n, p)
    buckets = ceil(p / BUCKET)
    calls = layers * (3 * n - 2) + buckets
    yield Estimate("ring", *full, ring + average, calls, logits=words)
    calls = 8 * layers + buckets
    yield Estimate("all_to_all", *full, swaps + average, calls, logits=words)
    if n <= layers:
        yield _pipeline(model, at)


def _pipeline(model: ModelShape, at: Setting) -> Estimate:
    """The first stage, which keeps most: activations of n micro-batches."""
    n, a = at.n, activation(model, at)
    m = at.microbatches or min(4 * n, at.batch)
    layers = ceil(model.layers / n)
    mine = stage(model, layers, n) * at.itemsize
    held = kept(
        layers,
        kept_in_block(model),
        a,
        recompute=at.recompute,
        in_flight=min(m, n) / m,
        at_once=1 / m,
    )
    words = logits(model, at.batch * at.length / m, at.itemsize) if n == 1 else 0.0
    sent = (2 if n > 2 else 1) * a if n > 1 else 0.0
    calls = (2 if n > 2 else 1) * m if n > 1 else 0
    states = mine, mine, at.optimizer * mine
    return Estimate("pipeline", *states, held, sent, calls, logits=words)


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


def activation(model: ModelShape, at: Setting) -> float:
    """A: bytes of one activation of the whole batch."""
    return at.batch * at.length * model.hidden * at.itemsize


def first_that_fits(model: ModelShape, at: Setting, memory: float) -> Estimate | None:
    """The first strategy, in the order of `estimates`, that needs no more memory."""
    return next((e for e in estimates(model, at) if e.needed <= memory), None)
