"""`unisono plan`: what training a model needs on so many ranks, by strategy."""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from textwrap import fill
from typing import Annotated

from cyclopts import Parameter

from unisono.cli._search import (
    limits_of,
    refuse_with_search,
    refuse_without_search,
    run_search,
)
from unisono.cli.output import parse_world, print_json, print_row, print_text
from unisono.errors import BadArgument, unknown
from unisono.memory_use import FRAGMENTATION
from unisono.models import ModelShape, parse_model, usual_shape
from unisono.parallel.estimate import (
    Axes,
    Estimate,
    Setting,
    best_mesh,
    estimates,
    first_that_fits,
    idle,
    on_mesh,
    the_other_way,
)
from unisono.units import format_bytes, parse_bytes

_ITEMSIZES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2, "mixed": 2}
_MORE = (2, 4, 8, 16, 32, 64, 128)
"""How many times the ranks are tried where nothing fits."""
_OPTIMIZERS = {"adam": 2.0, "momentum": 1.0, "sgd": 0.0}
_COLUMNS = (
    "strategy",
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "memory",
    "sent/step",
    "calls",
    "",
)
_WIDTHS = (10, -10, -10, -10, -11, -10, -10, -6, 5)

_QUESTION = (
    "Why does data parallelism use all_reduce, and FSDP all_gather and reduce_scatter?"
)
_COMPARED = (
    ("", "ddp", "fsdp"),
    ("a rank steps", "all parameters", "its shard, 1/n"),
    ("so it needs", "the sum of all gradients", "the sum of its shard"),
    ("which is", "all_reduce", "reduce_scatter"),
    (
        "and before computing",
        "nothing, it has them",
        "all_gather, twice: they are freed",
    ),
)
_WINS = (
    ("wins when", "model states fit: it", "they do not: half as many"),
    ("", "sends least", "bytes again buy the memory"),
)
_COMPARED_WIDTHS = (20, 25, 33)
_ANSWER = """\
An all_reduce is a reduce_scatter and an all_gather. ddp gathers gradients, which every
rank then uses for the same step; fsdp (and zero) gathers the new parameters instead.
That costs the same once (zero), and half as much again where they are freed after
forward and gathered for backward (fsdp)."""

_OTHER_WAY = """\

Why not the other way round?
"""
_REASONS = (
    "ddp, reduce_scatter and all_gather of gradients: an all_reduce in two calls. It "
    "pays once a rank steps only its shard between them: that is zero.",
    "ddp, all_gather of parameters (twice) and reduce_scatter: bytes for parameters "
    "that every rank has; no memory is saved.",
    "fsdp, all_reduce of gradients: every rank gets all sums, and uses 1/n of them; no "
    "memory is saved.",
)
_FORMULAS = ("2(n-1)/n P", "3(n-1)/n P")
_OTHER_FORMULAS = ("2(n-1)/n P", "3(n-1)/n P", "4(n-1)/n P")


def plan(
    model: str = "gpt2",
    /,
    *,
    n: Annotated[str, Parameter(name=["-n", "--ranks"], metavar="N")] = "",
    mesh: str = "",
    batch: int = 8,
    tokens: int = 1024,
    dtype: str = "float32",
    optimizer: str = "adam",
    microbatches: int = 0,
    recompute: bool = False,
    memory: Annotated[str, Parameter(metavar="SIZE")] = "",
    compare: bool = False,
    search: bool = False,
    topology: Annotated[str, Parameter(name=["-t", "--topology"])] = "",
    zero: str = "",
    recomputing: str = "",
    codecs: str = "",
    peak: float = 0.0,
    efficiency: float | None = None,
    attention: str = "fused",
    top: int = 8,
    explain: bool = False,
    json: bool = False,
) -> int:
    """Memory per rank, and bytes sent per step, for each training strategy.

    Example: unisono plan gpt2-xl -n 8 --batch 16 --memory 24G

    Example: unisono plan gpt2-xl --mesh dp=2,tp=4 --batch 16 --memory 24G

    Example: unisono plan --search 70B -t dgx-h100:64 --batch 1024 --tokens 4096

    Parameters
    ----------
    model
        gpt2, gpt2-medium, gpt2-large, gpt2-xl, gpt3; llama2-7b, -13b, -70b, llama3-8b,
        -70b, -405b (or 7B, 8B, 13B, 70B, 405B; 1B); mixtral-8x7b; bert-base, -large;
        resnet50; gpt:layers=12,hidden=768,vocabulary=256 or layers=32,hidden=4096 (with
        experts=8,top_k=2 a mixture of experts); another number of parameters, as 3.5B;
        or file.py:Name, a torch module to count.
    n
        Number of ranks; 8 if there is no mesh.
    mesh
        Strategies combined, as dp=2,tp=2,pp=2: axes dp, tp, pp, cp and ep.
    batch
        Sequences in a step, of all ranks together.
    tokens
        Tokens in a sequence.
    dtype
        Of parameters, gradients, optimizer state and activations: float32, float64,
        bfloat16 or float16; or mixed, all in 2 bytes but the optimizer's state, which
        has 4 and a copy of the parameters in 4.
    optimizer
        adam, momentum or sgd.
    microbatches
        Of a pipeline; four times the ranks if not given.
    recompute
        Keep the input of each block alone, and compute the rest again in backward.
    memory
        Memory of a rank, as 24G: shows what fits, with a tenth more for fragmentation,
        and what to try if nothing does. If nothing does, the exit code is 1.
    compare
        Compare ddp and fsdp: what each sends, and why; and what the other way round,
        each with the collectives of the other, would cost.
    search
        Find the quickest ways of training on a topology that fit into memory: mesh,
        ZeRO, recomputing, micro-batches, chunks of a pipeline, placement and buckets.
        With --mesh only the other axes are searched. Training is mixed, with Adam.
    topology
        With --search: the machines, a preset as dgx-h100:64, or a .toml file.
    zero
        With --search: ZeRO stages that may be chosen, as 0,1; all by default.
    recomputing
        With --search: kinds that may be chosen: none, selective, full; all by default.
    codecs
        With --search: codecs of gradients that may be chosen, as bf16,fp8; they change
        results, so none by default.
    peak
        With --search: operations per second of a rank; known for dgx-h100, dgx-a100.
    efficiency
        With --search: the part of the peak that computing alone reaches; without it
        each class of kernels has its own, as far as the device is known (else 0.5).
    attention
        With --search: fused, in one kernel; or plain, one for each operation, whose
        scores pass through memory and are kept, as programs before 2022 had it.
    top
        With --search: how many meshes are simulated and shown.
    explain
        With --search: why the runner-up lost, and what was too large.
    json
        Print a JSON document.
    """
    if search:
        refuse_with_search(n=n, compare=compare, microbatches=microbatches)
        kinds = recomputing or ("full" if recompute else "")
        return run_search(
            model,
            topology,
            limits_of(mesh, zero, kinds, codecs),
            batch=batch,
            tokens=tokens,
            peak=peak,
            efficiency=efficiency,
            memory=parse_bytes(memory) if memory else 0,
            attention=attention,
            top=top,
            explained=explain,
            json=json,
        )
    refuse_without_search(
        topology=topology,
        zero=zero,
        recomputing=recomputing,
        codecs=codecs,
        peak=peak,
        attention="" if attention == "fused" else attention,
        explain=explain,
    )
    if dtype not in _ITEMSIZES:
        raise unknown("element type", dtype, _ITEMSIZES)
    if optimizer not in _OPTIMIZERS:
        raise unknown("optimizer", optimizer, _OPTIMIZERS)
    shape = parse_model(model)
    shape.check_length(tokens)
    axes = _axes(mesh) if mesh else None
    at = Setting(
        parse_world(n) if n else axes.n if axes else 8,
        batch,
        tokens,
        _ITEMSIZES[dtype],
        _state(optimizer, dtype),
        microbatches,
        recompute,
    )
    rows = list(estimates(shape, at) if axes is None else on_mesh(shape, at, axes))
    limit = parse_bytes(memory) if memory else 0
    if compare and axes is not None:
        raise BadArgument(
            "plan: --compare is about ddp and fsdp alone; leave out --mesh"
        )
    advice = _advice(shape, at, limit, rows) if limit else ""
    if json:
        other = the_other_way(shape, at)
        print_json(
            {
                "model": shape.as_dict(),
                "mesh": mesh,
                "strategies": _as_data(rows, limit),
                "fits": _any_fits(rows, limit),
                "advice": advice,
                **({"the_other_way": _as_data(other)} if compare else {}),
            }
        )
    elif compare:
        _print_comparison(shape, at, rows)
    else:
        _print_table(shape, at, rows, limit)
        if axes is not None:
            _print_axes(at, axes, rows)
        if advice:
            print_text(advice)
    return 1 if _any_fits(rows, limit) is False else 0


def _any_fits(rows: list[Estimate], limit: int) -> bool | None:
    """Whether a strategy fits into the memory; None if none was given."""
    return any(row.needed <= limit for row in rows) if limit else None


def _state(optimizer: str, dtype: str) -> float:
    """Bytes of the optimizer's state, in those of the parameters."""
    moments = _OPTIMIZERS[optimizer]
    return 2 * (moments + 1) if dtype == "mixed" else moments


def _axes(text: str) -> Axes:
    """Parse a mesh, as dp=2,tp=4."""
    known = [axis.name for axis in fields(Axes)]
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = part.partition("=")
        if axis not in known or axis in sizes or not size.isdecimal():
            raise BadArgument(
                f"--mesh {text}: {part!r}: expected each of {', '.join(known)} at most "
                "once, with a number, as in dp=2,tp=4"
            )
        sizes[axis] = int(size)
    return Axes(**sizes)


def _print_table(
    model: ModelShape, at: Setting, rows: list[Estimate], limit: int
) -> None:
    shape = f", {model.layers} layers of width {model.hidden}" if model.hidden else ""
    shape += ", the head tied to the embedding" if model.tied else ""
    print_text(
        f"# {model.name}: {model.parameters:,} parameters{shape}; {at.n} ranks, "
        f"{at.batch} x {at.length} tokens per step"
        + (f"; {FRAGMENTATION:.0%} more must fit, for fragmentation" if limit else "")
    )
    print_row(_COLUMNS, _WIDTHS)
    for row in rows:
        known = bool(model.hidden)
        fits = "" if not limit else "fits" if row.needed <= limit else "-"
        states = (row.parameters, row.gradients, row.optimizer)
        cells = [format_bytes(state) for state in states]
        cells += [format_bytes(row.activations + row.logits) if known else "?"]
        cells += [format_bytes(row.memory), format_bytes(row.sent), str(row.calls)]
        print_row((row.strategy, *cells, fits), _WIDTHS)
    if not model.hidden:
        print_text(
            f"# Without a shape activations are not known, and not included. "
            f"{model.layers} equal layers are assumed"
        )


def _print_comparison(model: ModelShape, at: Setting, rows: list[Estimate]) -> None:
    ddp, fsdp = (next(r for r in rows if r.strategy == s) for s in ("ddp", "fsdp"))
    counted = (
        ("memory", format_bytes(ddp.memory), format_bytes(fsdp.memory)),
        ("sent per step", format_bytes(ddp.sent), format_bytes(fsdp.sent)),
        ("as a formula", *_FORMULAS),
        ("calls per step", str(ddp.calls), str(fsdp.calls)),
    )
    print_text(f"{_QUESTION}\n")
    for cells in (*_COMPARED, *counted, *_WINS):
        print_row(cells, _COMPARED_WIDTHS)
    print_text(f"\n{_ANSWER}")
    _print_other_way(model, at, ddp, fsdp)
    batch = f"{at.batch} x {at.length} tokens per step"
    print_text(f"\n# {model.name}, {at.n} ranks, {batch}")


def _print_other_way(
    model: ModelShape, at: Setting, ddp: Estimate, fsdp: Estimate
) -> None:
    """What each would cost with the collectives of the other."""
    print_text(_OTHER_WAY)
    widths = (24, -10, -11, -6, 12)
    print_row(("", "memory", "sent/step", "calls", "  as a formula"), widths)
    rows = [ddp, fsdp, *the_other_way(model, at)]
    formulas = (*_FORMULAS, *_OTHER_FORMULAS)
    for row, formula in zip(rows, formulas, strict=True):
        sizes = format_bytes(row.memory), format_bytes(row.sent), str(row.calls)
        print_row((row.strategy, *sizes, f"  {formula}"), widths)
    print()
    for reason in _REASONS:
        print_text(fill(f"- {reason}", 88, subsequent_indent="  "))


def _as_data(rows: list[Estimate], limit: int = 0) -> list[dict[str, object]]:
    return [
        {
            **asdict(row),
            "memory": row.memory,
            "fragmentation": row.use.fragmentation,
            "needed": row.needed,
            "fits": row.needed <= limit if limit else None,
        }
        for row in rows
    ]


def _print_axes(at: Setting, axes: Axes, rows: list[Estimate]) -> None:
    """What is sent along each axis, and how long a pipeline idles."""
    for row in rows:
        sent = ", ".join(f"{k} {format_bytes(v)}" for k, v in row.axes.items())
        print_text(f"# {axes} {row.strategy} sends: {sent or 'nothing'}")
    if axes.pp > 1:
        print(f"# a stage of the pipeline idles {idle(at, axes):.0%} of the time")


def _advice(model: ModelShape, at: Setting, limit: int, rows: list[Estimate]) -> str:
    """What fits, or what to try next: a mesh, or more ranks."""
    room = format_bytes(limit)
    fits = next((row for row in rows if row.needed <= limit), None)
    if fits is not None:
        return f"{room}: use {fits.strategy}, the simplest that fits"
    if choice := _fitting(model, at, limit):
        return f"{room}: none of these fits on {at.n} ranks; {choice} does"
    for factor in _MORE:
        more = replace(at, n=at.n * factor)
        if choice := _fitting(model, more, limit):
            return (
                f"{room}: nothing fits on {at.n} ranks; {choice} does on "
                f"{more.n}. Or recompute activations, or use fewer bytes per number"
            )
    most = _MORE[-1] * at.n
    if not model.hidden and (choice := _shaped(model, at, limit)):
        return f"{room}: nothing fits on up to {most} ranks without a shape; {choice}"
    return f"{room}: nothing fits on up to {most} ranks; use a smaller model"


def _shaped(model: ModelShape, at: Setting, limit: int) -> str:
    """The mesh for a transformer of about this size: its layers can be divided."""
    shape = usual_shape(model, at.length)
    for factor in (1, *_MORE):
        more = replace(at, n=at.n * factor)
        if best := best_mesh(shape, more, limit):
            return (
                f"plan {shape.name}, of about this size, fits on {more.n}: --mesh "
                f"{best[0]} ({best[1].strategy})"
            )
    return ""


def _fitting(model: ModelShape, at: Setting, limit: int) -> str:
    """The simplest strategy that fits on these ranks; a mesh if no strategy does."""
    fits = first_that_fits(model, at, limit)
    if fits is not None:
        return fits.strategy
    best = best_mesh(model, at, limit)
    return f"--mesh {best[0]} ({best[1].strategy})" if best else ""
