"""What a step of training needs and sends, by strategy: arithmetic, without a rank.

The formulas are those at the head of each strategy's file, which the tests hold against
what the ranks really send. n ranks train on one batch in all: strategies that cut it
(ddp, zero, fsdp) have 1/n of the batch each, the others all of it and a part of the
model or of the sequence.

    P      bytes of all parameters (gradients as many, optimizer state K times as many)
    A      bytes of one activation of the whole batch: sequences · tokens · width
    17 A   what a transformer's block keeps for backward, with attention that keeps no
           scores: inputs of two norms, of two pairs of layers, q, k, v, and the wide
           ones between
    (9 + 10 k) A   if k of its experts work on each token instead

Estimates leave out what is small: buffers, a few numbers per token, buckets in flight.
`layout` puts them together for meshes.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path

from unisono.errors import BadArgument, MissingExtra, whole_number

BUCKET = 25 << 20
WHOLE, INNER = 4, 13
"""Of a block's 17 activations: what tensor parallelism leaves whole, what it cuts."""


@dataclass(frozen=True)
class Model:
    """A transformer by its shape, or only a number of parameters (width 0)."""

    name: str
    parameters: int
    layers: int = 1
    width: int = 0
    words: int = 0
    experts: int = 0
    top_k: int = 2

    @property
    def block(self) -> int:
        """Parameters of one block: what FSDP gathers at a time."""
        if not self.width:
            return self._even
        w = self.width
        if self.experts:  # and a gate that scores them
            return 4 * w**2 + 8 * w + (self.expert + w + 1) * self.experts
        return 12 * w**2 + 13 * w

    @property
    def expert(self) -> int:
        """Parameters of one expert: two layers, the inner one four times as wide."""
        return 8 * self.width**2 + 5 * self.width

    @property
    def kept(self) -> int:
        """Activations that a block keeps for backward."""
        return 9 + 10 * self.top_k if self.experts else WHOLE + INNER

    @property
    def _even(self) -> int:
        return ceil(self.parameters / self.layers)


@dataclass(frozen=True)
class Setting:
    """How it is trained: ranks, one batch for all of them, bytes, optimizer."""

    n: int
    batch: int = 1
    length: int = 0
    itemsize: int = 4
    optimizer: float = 2.0
    microbatches: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
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
    """What is sent along each axis of a mesh."""

    @property
    def memory(self) -> float:
        """All of it."""
        return self.parameters + self.gradients + self.optimizer + self.activations


def gpt(
    name: str = "gpt",
    *,
    layers: int,
    width: int,
    words: int,
    length: int,
    experts: int = 0,
    top_k: int = 2,
) -> Model:
    """A transformer with an embedding of words and of places, and a head of its own.

    With `experts`, each block has so many in place of its two wide layers, and `top_k`
    of them work on a token.
    """
    for key, value in (("layers", layers), ("width", width), ("words", words)):
        if whole_number(f"plan: {key}", value) < 1:
            raise BadArgument(f"plan: {key} = {value}: at least one")
    if experts and not 1 <= whole_number("plan: top_k", top_k) <= experts:
        raise BadArgument(f"plan: top_k = {top_k}: expected 1..{experts}, the experts")
    shape = Model(name, 0, layers, width, words, experts, top_k)
    count = layers * shape.block + (2 * words + length + 2) * width
    return replace(shape, parameters=count)


def counted(text: str) -> Model:
    """The module that file.py:Name makes, without memory for its parameters."""
    path, _, name = text.rpartition(":")
    try:
        import torch
    except ModuleNotFoundError as missing:
        raise MissingExtra("torch", "a plan for a torch module") from missing
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None or not Path(path).is_file():
        raise BadArgument(f"model {text}: there is no file {path}")
    file = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(file)
    make = getattr(file, name, None)
    if not callable(make):
        raise BadArgument(f"model {text}: {path} has no class or function {name}")
    with torch.device("meta"):
        module = make()
    if not isinstance(module, torch.nn.Module):
        raise BadArgument(f"model {text}: {name}() is no torch module")
    lists = [m for m in module.modules() if isinstance(m, torch.nn.ModuleList)]
    layers = max(sum(len(one) for one in lists), 1)
    return Model(text, sum(p.numel() for p in module.parameters()), layers)


def estimates(model: Model, at: Setting) -> Iterator[Estimate]:
    """Every strategy that the model's description is enough for."""
    yield from _of_weights(model, at)
    if model.width and at.length and not model.experts:
        yield from _of_activations(model, at)


def all_gather(n: int, nbytes: float) -> float:
    """What a rank sends in an all_gather or a reduce_scatter of so many in all."""
    return (n - 1) / n * nbytes


def all_reduce(n: int, nbytes: float) -> float:
    """The same twice."""
    return 2 * all_gather(n, nbytes)


def _of_weights(model: Model, at: Setting) -> Iterator[Estimate]:
    """Those that send weights and gradients: each rank has 1/n of the batch."""
    p = model.parameters * at.itemsize
    kept = model.kept * model.layers * activation(model, at) / at.n
    yield from sharded(p, at, at.n, model.block * at.itemsize, model.layers, kept)


def sharded(
    p: float, at: Setting, n: int, block: float, layers: int, kept: float
) -> Iterator[Estimate]:
    """Of p bytes of parameters that n ranks have alike: more and more is sharded."""
    k = at.optimizer
    buckets, units = ceil(p / BUCKET), layers + 1
    yield Estimate("ddp", p, p, k * p, kept, all_reduce(n, p), buckets)
    twice = 2 * all_gather(n, p)
    yield Estimate("zero1", p, p + p / n, k * p / n, kept, twice, 2 * buckets)
    yield Estimate("zero2", p, p / n, k * p / n, kept, twice, 2 * buckets)
    thrice = 3 * all_gather(n, p)
    # Whole are the unit at work, and the next.
    mine = p / n + (2 * block if n > 1 else 0)
    yield Estimate("fsdp", mine, p / n, k * p / n, kept, thrice, 3 * units)


def _of_activations(model: Model, at: Setting) -> Iterator[Estimate]:
    """Those that send activations: each rank has a part of the model or sequence."""
    n, k, size = at.n, at.optimizer, at.itemsize
    p, a = model.parameters * size, activation(model, at)
    layers, width = model.layers, model.width
    mine = stage(model, layers, 1, n) * size
    states = mine, mine, k * mine
    tokens = at.batch * at.length
    pairs = (2 * layers + 1) * 2  # in each direction, and the embedding and the head
    loss = all_reduce(n, 3 * tokens * size)
    sent = pairs * all_reduce(n, a) + loss
    kept = layers * (WHOLE + INNER / n) * a
    yield Estimate("tensor", *states, kept, sent, pairs + 2)
    norms = (6 * layers + 2) * width * size
    kept = layers * (WHOLE / 2 + (WHOLE / 2 + INNER) / n) * a
    yield Estimate(
        "sequence",
        *states,
        kept,
        sent + all_reduce(n, norms),
        2 * pairs + 2 + 6 * layers + 2,
    )
    whole = p, p, k * p, 17 * layers * a / n
    ring = layers * (3 * n - 2) * 2 * a / n if n > 1 else 0.0
    swaps = layers * 2 * all_gather(n, 4 * a / n)
    average = all_reduce(n, p)
    buckets = ceil(p / BUCKET)
    yield Estimate("ring", *whole, ring + average, layers * (3 * n - 2) + buckets)
    yield Estimate("all_to_all", *whole, swaps + average, 8 * layers + buckets)
    if n <= layers:
        yield _pipeline(model, at)


def _pipeline(model: Model, at: Setting) -> Estimate:
    """The first stage, which keeps most: as many micro-batches as there are stages."""
    n, a = at.n, activation(model, at)
    m = at.microbatches or min(4 * n, at.batch)
    layers = ceil(model.layers / n)
    mine = stage(model, layers, n) * at.itemsize
    kept = model.kept * layers * a * min(m, n) / m
    sent = (2 if n > 2 else 1) * a if n > 1 else 0.0
    calls = (2 if n > 2 else 1) * m if n > 1 else 0
    return Estimate("pipeline", mine, mine, at.optimizer * mine, kept, sent, calls)


def stage(model: Model, layers: int, pp: int, tp: int = 1) -> float:
    """Parameters that a rank of the first stage has, experts aside."""
    if not model.width:
        return model.parameters / pp
    words = model.words * model.width
    places = model.parameters - model.layers * model.block - 2 * words
    ends = 2 * words / tp + places
    if pp > 1:  # the head and its norm are on the last stage
        ends -= words / tp + 2 * model.width
    return layers * cut_block(model, tp) + ends


def cut_block(model: Model, tp: int = 1) -> float:
    """Parameters that a rank has of one block, experts aside."""
    whole = 6 * model.width  # norms, and what is added after the sums
    shared = model.block - model.experts * model.expert
    return whole + (shared - whole) / tp


def activation(model: Model, at: Setting) -> float:
    """A: bytes of one activation of the whole batch."""
    return at.batch * at.length * model.width * at.itemsize


def first_that_fits(model: Model, at: Setting, memory: float) -> Estimate | None:
    """The simplest strategy that needs no more than this, in the order above."""
    return next((e for e in estimates(model, at) if e.memory <= memory), None)
