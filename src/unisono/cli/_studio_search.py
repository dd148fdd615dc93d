"""The studio's answers about searches: what can be asked for, and what was found."""

from __future__ import annotations

from collections.abc import Mapping

from unisono.cli._search import COLUMNS, cells
from unisono.errors import unknown
from unisono.search import Found, Plan, search
from unisono.units import format_bytes

MODELS = ("7B", "13B", "70B")
TOPOLOGIES = tuple(f"dgx-h100:{hosts}" for hosts in (1, 2, 4, 8, 16))
BATCHES = ("64", "256", "1024")
_TOKENS = 4096
_TOP = 12


def searchable(parameters: Mapping[str, str]) -> dict[str, object]:
    """What can be asked for: names alone, none that would open a file."""
    for word in parameters:
        raise unknown("choice", word, ())
    return {"models": MODELS, "topologies": TOPOLOGIES, "batches": BATCHES}


def answer(parameters: Mapping[str, str]) -> dict[str, object]:
    """The quickest plans that fit, as a table: what is shown, and how it is sorted."""
    offered = {"model": MODELS, "topology": TOPOLOGIES, "batch": BATCHES}
    for word in parameters:
        if word not in offered:
            raise unknown("choice", word, tuple(offered))
    asked = {word: parameters.get(word, some[0]) for word, some in offered.items()}
    for word, value in asked.items():
        if value not in offered[word]:
            raise unknown(word, value, offered[word])
    batch = int(asked["batch"])
    ranks = {"batch": batch, "sequence": _TOKENS, "top": _TOP}
    found = search(asked["model"], asked["topology"], **ranks)  # type: ignore[arg-type]
    title = (
        f"{asked['model']} on {asked['topology']}, {batch} sequences of {_TOKENS} "
        f"tokens per step: {found.fitting} of {found.considered} choices fit into "
        f"{format_bytes(found.job.memory)}"
    )
    return {
        "title": title,
        "heads": COLUMNS,
        "rows": [_row(found, plan) for plan in found.plans],
        "lines": list(found.assumptions) if found.plans else ["Nothing fits."],
    }


def _row(found: Found, plan: Plan) -> list[dict[str, object]]:
    choice = plan.choice
    numbers = {
        "step": plan.time,
        "tokens/s": found.tokens_per_second(plan),
        "of peak": found.utilisation(plan),
        "memory": plan.use.total,
        "zero": choice.zero,
        "micro-batches": choice.microbatches,
        "chunks": choice.chunks,
        "bucket": choice.bucket,
    }
    shown = zip(COLUMNS, cells(found, plan), strict=True)
    return [{"text": text, "value": numbers.get(head, text)} for head, text in shown]


ANSWERS = {"/api/searchable": searchable, "/api/search": answer}
