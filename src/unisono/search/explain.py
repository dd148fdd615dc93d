"""Why the quickest plan won: what others wait for, and what did not fit."""

from __future__ import annotations

from collections.abc import Iterator

from unisono.search.api import Found, Plan
from unisono.units import format_bytes, format_seconds

MEANING = {
    "compute": "computing",
    "recompute": "computing activations again",
    "tensor": "the sums of tensor parallel ranks",
    "context": "keys and values of other ranks",
    "experts": "tokens on their way to experts and back",
    "sharding": "parameters that are gathered for each pass",
    "beside": "computing that is slowed by what is sent beside it",
    "pipeline": "other stages of the pipeline",
    "data": "gradients and parameters of replicas",
    "optimizer": "the optimizer",
}
_SMALL = 0.001
"""Differences that are a smaller part of the step are not mentioned."""


def explain(found: Found) -> Iterator[str]:
    """Lines that say why the runner-up lost, and what was too large."""
    best = found.best
    if best is None:
        return
    if len(found.plans) > 1:
        yield from _against(best, found.plans[1])
    large = found.too_large
    if large is not None:
        yield (
            f"Without the limit of memory {large.choice} would take "
            f"{format_seconds(large.time)} (by closed form), but it needs "
            f"{format_bytes(large.use.total)} of {format_bytes(found.job.memory)}."
        )


def _against(best: Plan, other: Plan) -> Iterator[str]:
    slower = other.time / best.time - 1
    yield (
        f"Why not {other.choice}? It takes {format_seconds(other.time - best.time)} "
        f"more a step ({slower:.1%})."
    )
    names = {*best.cost.parts, *other.cost.parts}
    differences = {
        name: other.cost.parts.get(name, 0.0) - best.cost.parts.get(name, 0.0)
        for name in names
    }
    small = _SMALL * best.time
    worse = sorted((-d, name) for name, d in differences.items() if d > small)
    better = sorted((d, name) for name, d in differences.items() if d < -small)
    for seconds, name in worse:
        yield f"  longer by {format_seconds(-seconds)}: {MEANING[name]}"
    for seconds, name in better:
        yield f"  shorter by {format_seconds(-seconds)}: {MEANING[name]}"
    if not worse and not better:
        yield "  Nothing differs by a thousandth of a step: take either."
