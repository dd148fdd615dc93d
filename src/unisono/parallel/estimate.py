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

Estimates leave out what is small: buffers, a few numbers per token, buckets in flight.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
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

    @property
    def block(self) -> int:
        """Parameters of one block: what FSDP gathers at a time."""
        return 12 * self.width**2 + 13 * self.width if self.width else self._even

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

    @property
    def memory(self) -> float:
        """All of it."""
        return self.parameters + self.gradients + self.optimizer + self.activations


def gpt(
    name: str = "gpt", *, layers: int, width: int, words: int, length: int
) -> Model:
    """A transformer with an embedding of words and of places, and a head of its own."""
    for key, value in (("layers", layers), ("width", width), ("words", words)):
        if whole_number(f"plan: {key}", value) < 1:
            raise BadArgument(f"plan: {key} = {value}: at least one")
    block = 12 * width**2 + 13 * width
    count = layers * block + (2 * words + length + 2) * width
    return Model(name, count, layers, width, words)


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
    if model.width and at.length:
        yield from _of_activations(model, at)


def _all_gather(n: int, nbytes: float) -> float:
    """What a rank sends in an all_gather or a reduce_scatter of so many in all."""
    return (n - 1) / n * nbytes


def _all_reduce(n: int, nbytes: float) -> float:
    return 2 * _all_gather(n, nbytes)


def _of_weights(model: Model, at: Setting) -> Iterator[Estimate]:
    """Those that send weights and gradients: each rank has 1/n of the batch."""
    n, k = at.n, at.optimizer
    p = model.parameters * at.itemsize
    kept = 17 * model.layers * _activation(model, at) / n
    buckets, units = ceil(p / BUCKET), model.layers + 1
    unit = 2 * model.block * at.itemsize  # the one at work, and the next
    yield Estimate("ddp", p, p, k * p, kept, _all_reduce(n, p), buckets)
    twice = 2 * _all_gather(n, p)
    yield Estimate("zero1", p, p + p / n, k * p / n, kept, twice, 2 * buckets)
    yield Estimate("zero2", p, p / n, k * p / n, kept, twice, 2 * buckets)
    thrice = 3 * _all_gather(n, p)
    mine = p / n + (unit if n > 1 else 0)
    yield Estimate("fsdp", mine, p / n, k * p / n, kept, thrice, 3 * units)


def _of_activations(model: Model, at: Setting) -> Iterator[Estimate]:
    """Those that send activations: each rank has a part of the model or sequence."""
    n, k, size = at.n, at.optimizer, at.itemsize
    p, a = model.parameters * size, _activation(model, at)
    layers, width = model.layers, model.width
    cut = (layers * 12 * width**2 + layers * 7 * width + 2 * model.words * width) * size
    mine = p - cut + cut / n
    states = mine, mine, k * mine
    tokens = at.batch * at.length
    pairs = (2 * layers + 1) * 2  # in each direction, and the embedding and the head
    loss = _all_reduce(n, 3 * tokens * size)
    sent = pairs * _all_reduce(n, a) + loss
    kept = layers * (WHOLE + INNER / n) * a
    yield Estimate("tensor", *states, kept, sent, pairs + 2)
    norms = (6 * layers + 2) * width * size
    kept = layers * (WHOLE / 2 + (WHOLE / 2 + INNER) / n) * a
    yield Estimate(
        "sequence",
        *states,
        kept,
        sent + _all_reduce(n, norms),
        2 * pairs + 2 + 6 * layers + 2,
    )
    whole = p, p, k * p, 17 * layers * a / n
    ring = layers * (3 * n - 2) * 2 * a / n if n > 1 else 0.0
    swaps = layers * 2 * _all_gather(n, 4 * a / n)
    average = _all_reduce(n, p)
    buckets = ceil(p / BUCKET)
    yield Estimate("ring", *whole, ring + average, layers * (3 * n - 2) + buckets)
    yield Estimate("all_to_all", *whole, swaps + average, 8 * layers + buckets)
    yield _pipeline(model, at)


def _pipeline(model: Model, at: Setting) -> Estimate:
    """The first stage, which keeps most: as many micro-batches as there are stages."""
    n, a = at.n, _activation(model, at)
    m = at.microbatches or 4 * n
    mine = model.parameters * at.itemsize / n
    kept = 17 * model.layers / n * a * min(m, n) / m
    sent = (2 if n > 2 else 1) * a if n > 1 else 0.0
    calls = (2 if n > 2 else 1) * m if n > 1 else 0
    return Estimate("pipeline", mine, mine, at.optimizer * mine, kept, sent, calls)


def _activation(model: Model, at: Setting) -> float:
    return at.batch * at.length * model.width * at.itemsize


def first_that_fits(model: Model, at: Setting, memory: float) -> Estimate | None:
    """The simplest strategy that needs no more than this, in the order above."""
    return next((e for e in estimates(model, at) if e.memory <= memory), None)
