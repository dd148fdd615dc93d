"""Which optimizers and parameter groups a strategy can wrap, and which it refuses."""

from __future__ import annotations

from typing import Any

from torch import nn

from unisono.errors import BadArgument, UsageError

_NOT_ELEMENTWISE = ("LBFGS", "Adafactor", "Muon", "SparseAdam")


def refuse_closure(closure: object, where: str) -> None:
    """A closure would run forward and backward a different number of times per rank."""
    if closure is not None:
        raise UsageError(
            f"{where}.step(closure): closures are not supported, since every rank must "
            "run forward and backward equally often; call them yourself, then step()"
        )


def refuse_not_elementwise(optimizer: object, where: str) -> None:
    """Some optimizers need all elements of a parameter at once."""
    name = getattr(optimizer, "__name__", type(optimizer).__name__)
    if name in _NOT_ELEMENTWISE:
        raise BadArgument(
            f"{where}: {name} needs full parameters, and a rank has shards of their "
            "elements; use one that works element by element, such as AdamW or SGD"
        )


def refuse_other_parameters(
    groups: list[dict[str, Any]], named: list[tuple[str, nn.Parameter]], where: str
) -> None:
    """Groups contain the module's own trainable parameters only."""
    known = {param for _, param in named}
    others = [p for g in groups for p in g["params"] if p not in known]
    if others:
        raise BadArgument(
            f"{where}: groups have {len(others)} tensors that are not trainable "
            "parameters of the module"
        )


def is_comparable(value: object) -> bool:
    """Whether the text of an option is the same on ranks that pass the same option."""
    parts = value if isinstance(value, tuple) else (value,)
    return all(isinstance(part, bool | int | float | str) for part in parts)
