"""`comm.explain` of a call with a codec: its bytes, its error, its predicted time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from unisono.dtypes import DTYPES, DType
from unisono.runtime.call.coding import Coding
from unisono.runtime.call.options import CallOptions
from unisono.runtime.call.reductions import Reduction
from unisono.runtime.observe.subject import ObservedCore
from unisono.runtime.plan.codec_options import (
    BOUND,
    as_coding,
    choose_coded,
    predicted_error,
    refuse_large_error,
    refuse_unsupported,
)
from unisono.runtime.plan.codec_plans import chunk_sizes, sent_bytes
from unisono.runtime.plan.plans import CallKind, lowered, verified
from unisono.runtime.plan.predict import MODEL, CostModel, predicted_coded, step_costs
from unisono.runtime.plan.select import choose
from unisono.schedule.coding import Scope
from unisono.schedule.collective import Holders, Ints
from unisono.schedule.program import Action, Home, Lowered
from unisono.units import format_bytes, format_seconds

_SUM = Reduction("sum")


@dataclass(frozen=True)
class CodecExplanation:
    """The algorithm and codec that would run, and the explanation."""

    algorithm: str
    codec: str
    lines: Sequence[str]


def explained(
    core: ObservedCore,
    collective: str,
    nbytes: int,
    dtype: DType | None,
    root: int,
    how: CallOptions,
) -> CodecExplanation:
    """A few readable lines; nothing is run, but a refused call raises here, too."""
    coding = as_coding(how.codec, how.coded)
    dtype = dtype or DTYPES["float32"]
    refuse_unsupported(collective, coding, dtype, _SUM)
    n, hosts = core.world_size, core.hosts_if_several
    model = core.session.links_between(core.world_ranks)
    choice = choose_coded(
        *(collective, nbytes, n, coding),
        itemsize=dtype.itemsize,
        named=how.algorithm,
        hosts=hosts,
        model=model,
    )
    spec = core.spec(choice.algorithm)
    key = collective, spec, n, root
    refuse_large_error(*key, coding, hosts, how.error_bound)
    count = nbytes // dtype.itemsize
    kind = CallKind(collective, dtype, _SUM, root, count, spec, coding=coding)
    steps = verified(*key).num_steps
    lines = [
        f"{collective} of {format_bytes(nbytes)} on {n} ranks by {choice.algorithm} "
        f"in {coding}",
        f"  why        {choice.why}",
        f"  codec      {_codec(coding, dtype, count)}",
        f"  costs      {steps} steps; {_wire(kind, n, hosts, nbytes)}",
        f"  error      {_error(kind, n, hosts, how.error_bound)}",
        f"  bits       {_bits(kind, n, hosts)}",
        f"  predicted  {_times(kind, n, hosts, nbytes, model or MODEL)}",
    ]
    return CodecExplanation(choice.algorithm, str(coding), lines)


def _codec(coding: Coding, dtype: DType, count: int) -> str:
    codec = coding.codec
    whole = max(codec.block, 128)
    each = codec.nbytes(whole) / whole
    where = "only between hosts" if coding.scope is Scope.HOSTS else "between all ranks"
    return (
        f"{codec}, {where}: {each:g} bytes for each {dtype.name}, "
        f"{dtype.itemsize / each:.2f} times less"
    )


def _wire(kind: CallKind, n: int, hosts: tuple[int, ...], nbytes: int) -> str:
    busiest = int(sent_bytes(kind, n, hosts).max(initial=0))
    plain = int(
        verified(kind.collective, kind.algorithm, n, kind.root).cost(nbytes).sent.max()
    )
    return (
        f"the busiest rank sends {format_bytes(busiest)}, as values it would be "
        f"{format_bytes(plain)}"
    )


def _error(kind: CallKind, n: int, hosts: tuple[int, ...], bound: float | None) -> str:
    assert kind.coding is not None
    key = kind.collective, kind.algorithm, n, kind.root
    found = predicted_error(*key, kind.coding, hosts)
    once = kind.coding.codec.error
    if bound is None:
        bound = BOUND * once
    times = found / once
    return (
        f"predicted {found:.2%} of the result, {times:.2f} times that of encoding "
        f"once ({once:.2%}); the bound is {bound:.2%}"
    )


def _bits(kind: CallKind, n: int, hosts: tuple[int, ...]) -> str:
    assert kind.coding is not None
    key = kind.collective, kind.algorithm, n, kind.root
    made = lowered(*key, 0, hosts, kind.coding.scope)
    if verified(*key).collective.after is not Holders.EVERYWHERE:
        return "values that are only copied are encoded once, by their source"
    return (
        "the same on all ranks; ranks read their own values as codes, too"
        if made.replicated
        else "the same on all ranks: the owner of a sum uses its decoded value, too"
    )


def _times(
    kind: CallKind, n: int, hosts: tuple[int, ...], nbytes: int, model: CostModel
) -> str:
    coded, plain, by = seconds(kind, n, hosts, nbytes, model)
    result = "faster" if coded < plain else "not faster here"
    return (
        f"{format_seconds(coded)}; without a codec {format_seconds(plain)} by {by}: "
        f"{result}, by the model"
    )


def seconds(
    kind: CallKind,
    n: int,
    hosts: tuple[int, ...],
    nbytes: int,
    model: CostModel = MODEL,
) -> tuple[float, float, str]:
    """Predicted times with the codec and without, and the algorithm without."""
    coding = kind.coding
    assert coding is not None
    placed = hosts or (0,) * n
    key = kind.collective, kind.algorithm, n, kind.root
    sizes = chunk_sizes(verified(*key).contract, kind.counts, coding.codec.block)
    coded = predicted_coded(
        step_costs(kind.collective, kind.algorithm, 1, placed, model),
        nbytes,
        coding.codec.nbytes(nbytes // kind.dtype.itemsize),
        _work(lowered(*key, 0, hosts, coding.scope), sizes, model),
        inside=coding.scope is Scope.ALL,
    )
    plain = choose(
        *(kind.collective, nbytes, n),
        named=None,
        reproducible=False,
        hosts=hosts or None,
        model=model,
    )
    costs = step_costs(kind.collective, plain.algorithm, 1, placed, model)
    return (
        coded,
        predicted_coded(costs, nbytes, nbytes, 0.0, inside=True),
        plain.algorithm,
    )


def _work(made: Lowered, sizes: Ints, model: CostModel) -> float:
    """The seconds that the busiest rank encodes and decodes."""
    busiest = 0.0
    for program in made.programs:
        mine = (
            float(sizes[a.chunk])
            * float(np.dot(_codings(a), (model.encoded, model.decoded)))
            for a in program.actions
        )
        busiest = max(busiest, sum(mine))
    return busiest


def _codings(action: Action) -> tuple[int, int]:
    """How many times an action encodes its chunk, and decodes it."""
    codes = sum(s.home in (Home.CODE, Home.STREAM) for s in action.sources)
    forwarded = codes == len(action.sources) == 1
    kept = action.output is not None or action.window is not None
    encodes = action.code is not None and not forwarded
    return int(encodes), (int(kept) if forwarded else codes) + int(action.back)
