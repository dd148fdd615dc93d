"""The memory that training takes on a rank, by what it is for.

    parameters, gradients, optimizer   what the strategy keeps of the model
    activations   what blocks keep for backward; with recomputation the input of each
                  block, and all of the one block that is being computed again
    logits        the output of the head, and its gradient
    buckets       gradients on their way, besides those that are kept
    fragmentation an allowance of a tenth for what an allocator cannot use, and for the
                  libraries' own memory

`unisono plan` and `unisono simulate train` count with these formulas.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from unisono.models import KEPT_BETWEEN, ModelShape

FRAGMENTATION = 0.1
"""The part of what is counted that is added for fragmentation."""


@dataclass(frozen=True)
class MemoryUse:
    """Bytes on one rank."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float = 0.0
    logits: float = 0.0
    buckets: float = 0.0

    @property
    def counted(self) -> float:
        """All of these, without an allowance."""
        states = self.parameters + self.gradients + self.optimizer
        return states + self.activations + self.logits + self.buckets

    @property
    def fragmentation(self) -> float:
        """The allowance."""
        return FRAGMENTATION * self.counted

    @property
    def total(self) -> float:
        """What a device must have."""
        return self.counted + self.fragmentation

    def as_dict(self) -> dict[str, float]:
        """Plain data, for JSON."""
        return {**asdict(self), "fragmentation": self.fragmentation}


def kept_in_block(model: ModelShape, tp: int = 1, scores_of: int = 0) -> float:
    """Activations that a block keeps for backward; 0 if the shape is not known.

    With `scores_of` also the scores of plain attention, of sequences so long.
    """
    if not model.hidden:
        return 0.0
    return KEPT_BETWEEN + (model.kept_inside + model.kept_scores(scores_of)) / tp


def kept(
    layers: int,
    block: float,
    activation: float,
    *,
    recompute: bool,
    edge: float = 1.0,
    in_flight: float = 1.0,
    at_once: float = 1.0,
) -> float:
    """Bytes that so many blocks keep for backward.

    `block` is what a block keeps and `edge` what its input is, in activations;
    `in_flight` the part of the batch that is kept, `at_once` the part that is computed
    at a time.
    """
    if not recompute or not block:
        return layers * block * activation * in_flight
    return (layers * edge * in_flight + block * at_once) * activation


def logits(model: ModelShape, tokens: float, itemsize: int, tp: int = 1) -> float:
    """Bytes of the output of the head for so many tokens, and of its gradient."""
    return 2.0 * tokens * model.vocabulary * itemsize / tp
