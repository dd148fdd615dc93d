"""`unisono plan --search`: the quickest ways of training that fit."""

from __future__ import annotations

from dataclasses import asdict, fields

from unisono.cli._progress import Progress
from unisono.cli.output import print_json, print_row, print_text
from unisono.errors import BadArgument
from unisono.parallel.estimate import Axes
from unisono.search import Found, Limits, Plan, explain, search
from unisono.search.explain import MEANING
from unisono.units import format_bytes, format_seconds

COLUMNS = (
    *("step", "tokens/s", "of peak", "memory", "mesh", "placement", "zero"),
    *("recompute", "micro-batches", "chunks", "bucket", "codec", "waits for"),
)
"""The heads of the table."""
DEFAULT_TOPOLOGY = "dgx-h100:8"
_WIDTHS = (-9, -11, -7, -9, 22, 12, 4, 9, 13, -6, 8, 6, 40)


def refuse_with_search(**given: object) -> None:
    """Refuse options that a search does not have."""
    for name, value in given.items():
        if value:
            raise BadArgument(
                f"plan: --{name} is not for --search: -t says the ranks, and "
                "micro-batches are searched"
            )


def refuse_without_search(**given: object) -> None:
    """Refuse options that only a search has."""
    for name, value in given.items():
        if value:
            raise BadArgument(f"plan: --{name} is for --search; add that")


def limits_of(mesh: str, zero: str, recompute: str, codecs: str) -> Limits:
    """What may be chosen, as options say it."""
    known = tuple(axis.name for axis in fields(Axes))
    axes: dict[str, int] = {}
    for part in mesh.split(",") if mesh else ():
        axis, _, size = part.partition("=")
        if axis not in known or axis in axes or not size.isdecimal():
            raise BadArgument(
                f"--mesh {mesh}: {part!r}: expected some of {', '.join(known)}, with a "
                "number, as in tp=8,cp=1; the others are searched"
            )
        axes[axis] = int(size)
    stages = zero.split(",") if zero else ["0", "1", "2", "3"]
    if not all(stage.isdecimal() for stage in stages):
        raise BadArgument(f"--zero {zero}: expected stages from 0 to 3, as in 0,1")
    kinds = {"recompute": tuple(recompute.split(","))} if recompute else {}
    coded = tuple(dict.fromkeys(["none", *filter(None, codecs.split(","))]))
    return Limits(axes, tuple(map(int, stages)), codecs=coded, **kinds)


def run_search(
    model: str,
    topology: str,
    limits: Limits,
    *,
    batch: int,
    tokens: int,
    peak: float,
    efficiency: float | None,
    memory: int,
    attention: str,
    top: int,
    explained: bool,
    json: bool,
) -> int:
    """Search, and print a table or a JSON document; 1 if nothing fits."""
    topology = topology or DEFAULT_TOPOLOGY
    progress = Progress("searching")
    progress.what = f"{model} on {topology}"
    found = search(
        model,
        topology,
        batch=batch,
        sequence=tokens,
        peak=peak,
        efficiency=efficiency,
        memory=memory,
        attention=attention,
        limits=limits,
        top=top,
        progress=progress,
    )
    progress.clear()
    if json:
        print_json(_as_data(found, explained=explained))
    else:
        _print(found, explained=explained)
    return 0 if found.plans else 1


def _print(found: Found, *, explained: bool) -> None:
    job = found.job
    print_text(
        f"# {job.model.name}: {job.model.parameters:,} parameters on {found.topology}, "
        f"{job.batch} x {job.sequence} tokens per step; {found.considered} choices, "
        f"{found.fitting} of them fit into {format_bytes(job.memory)} and were costed"
    )
    if not found.plans:
        print_text(
            "Nothing fits: use more ranks, a smaller batch or shorter sequences, or "
            "allow more (--zero, --recompute, --mesh)"
        )
        return
    print_row(COLUMNS, _WIDTHS)
    for plan in found.plans:
        print_row(cells(found, plan), _WIDTHS)
    for line in explain(found) if explained else ():
        print_text(line)
    for line in found.assumptions:
        print_text(f"# assumed: {line}")


def cells(found: Found, plan: Plan) -> tuple[str, ...]:
    """What a plan has in each column."""
    choice = plan.choice
    waits = [f"{name} {s / plan.time:.1%}" for name, s in plan.cost.waits[:3]]
    return (
        format_seconds(plan.time),
        f"{found.tokens_per_second(plan):,.0f}",
        f"{found.utilisation(plan):.1%}",
        format_bytes(plan.use.total),
        str(choice.axes),
        choice.placement,
        str(choice.zero),
        choice.recompute,
        f"{choice.microbatches} x {choice.microbatch}",
        str(choice.chunks),
        format_bytes(choice.bucket),
        choice.codec,
        ", ".join(waits),
    )


def _as_data(found: Found, *, explained: bool) -> dict[str, object]:
    job = found.job
    large = found.too_large
    return {
        "model": job.model.as_dict(),
        "topology": found.topology,
        "batch": job.batch,
        "sequence": job.sequence,
        "memory": job.memory,
        "peak": job.peak,
        "efficiency": None if job.device else job.efficiency,
        "considered": found.considered,
        "fitting": found.fitting,
        "plans": [_plan_data(found, plan) for plan in found.plans],
        "too_large": _plan_data(found, large) if large else None,
        "meaning": MEANING,
        "assumptions": list(found.assumptions),
        **({"explanation": list(explain(found))} if explained else {}),
    }


def _plan_data(found: Found, plan: Plan) -> dict[str, object]:
    return {
        **asdict(plan.choice),
        "placement": plan.choice.placement,
        "time": plan.time,
        "simulated": plan.simulated,
        "tokens_per_second": found.tokens_per_second(plan),
        "utilisation": found.utilisation(plan),
        "parts": plan.cost.parts,
        "memory": plan.use.total,
        "memory_use": plan.use.as_dict(),
    }
