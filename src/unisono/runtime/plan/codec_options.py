"""Codec options of calls, the choice of algorithm with a codec, and error bounds.

    comm.all_reduce(x, codec="fp8")                    between all ranks
    comm.all_reduce(x, codec="int8:block=64@hosts")    only between hosts
    comm.all_reduce(x, codec="fp8@hosts", error_bound=0.05)

The codec is part of the lowered programs, so the error of the result is predicted from
them, before anything runs. Each encoding adds an error; an algorithm that encodes at
every hop, as a ring does, adds many, and is refused above `error_bound`, by default
four times the error of encoding once.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from unisono.algorithms import Spec
from unisono.algorithms.hierarchical import telling
from unisono.codecs import get
from unisono.codecs.options import is_scheme
from unisono.deprecation import warn_renamed
from unisono.dtypes import DType
from unisono.errors import BadArgument, UnisonoError, unknown
from unisono.runtime.call.coding import Coding
from unisono.runtime.call.reductions import Reduction
from unisono.runtime.plan.plans import lowered
from unisono.runtime.plan.predict import MODEL, CostModel
from unisono.runtime.plan.select import (
    SHARED_OUT_FROM,
    AlgorithmChoice,
    by_variable,
    choose,
    quickest,
)
from unisono.schedule.coding import Scope
from unisono.schedule.collective import REDUCING
from unisono.transports.session import WINDOW

BOUND = 4.0
"""The default of `error_bound`, as a multiple of the error of encoding once."""

DTYPES = "float32", "bfloat16", "float16"
FLAT_UP_TO = 32
"""Above this many ranks a direct algorithm has too many messages."""
LEAST_MESSAGE = 16 << 10
"""Between hosts, calls larger than a window are cut into segments of this many bytes,
so that some are encoded and reduced while others are sent."""
_TWO_LEVELS = {
    "all_reduce": ("direct/direct",),
    "reduce_scatter": ("direct/direct",),
    "reduce": ("naive/naive",),
}
_BETTER = "direct", "naive", "direct+direct"


def as_coding(codec: Any, coded: str | None = None) -> Coding:
    """The coding that `codec=` gives, and `coded=`, the old name of its scope."""
    suffix = None
    if isinstance(codec, str):
        codec, at, suffix = codec.partition("@")
        suffix = suffix if at else None
    if suffix is not None and coded is not None and suffix != coded:
        raise BadArgument(
            f"codec={codec}@{suffix}, coded={coded!r}: they contradict each other; "
            "give one of them"
        )
    if coded is not None:
        warn_renamed(f"coded={coded!r}", f'codec="{codec}@{coded}"', level=6)
    if is_scheme(codec):
        raise BadArgument(
            f"codec {codec}: a sparsifying codec, which only all_reduce supports; "
            "expected a dense codec here, such as fp8"
        )
    found = get(codec)
    scope = suffix if suffix is not None else coded if coded is not None else Scope.ALL
    if scope not in list(Scope):
        raise unknown("scope of a codec", str(scope), list(Scope))
    return Coding(found, Scope(scope))


def refuse_unsupported(
    where: str, coding: Coding, dtype: DType, reduction: Reduction
) -> None:
    """Raise BadArgument unless this type and reduction can be encoded."""
    if where == "barrier":
        raise BadArgument("barrier: it sends no values, so it takes no codec")
    if dtype.name not in DTYPES:
        advice = (
            "convert to float32, or leave codec= out"
            if dtype.kind == "f"
            else "leave codec= out: these are not encoded"
        )
        raise BadArgument(
            f"{where}: codec {coding} encodes {', '.join(DTYPES[:-1])} and "
            f"{DTYPES[-1]}, got {dtype.name}; {advice}"
        )
    if reduction.op not in ("sum", "mean"):
        raise BadArgument(
            f"{where}: codec {coding} supports op='sum', 'mean' and premul_sum, got "
            f"{reduction.name}; leave codec= out for others"
        )


def choose_coded(
    collective: str,
    nbytes: int,
    n: int,
    coding: Coding,
    *,
    itemsize: int,
    named: str | None = None,
    hosts: tuple[int, ...] = (),
    model: CostModel | None = None,
) -> AlgorithmChoice:
    """The algorithm for a call of `nbytes` values, unless its caller named one.

    Copies are chosen as without a codec, for the size of the codes. Values to reduce
    are sent directly to the rank that reduces them, so each is encoded only twice; on
    two levels between hosts, or with many ranks.
    """
    small = coding.codec.nbytes(nbytes // itemsize)
    if named or collective not in REDUCING:
        return choose(
            *(collective, small, n),
            named=named,
            reproducible=False,
            hosts=hosts or None,
            model=model,
        )
    if chosen := by_variable(collective):
        return chosen
    if hosts and len(set(hosts)) < n:
        by_two = _TWO_LEVELS[collective]
        return quickest(collective, small, hosts, by_two, model or MODEL)
    segments = WINDOW // (n * LEAST_MESSAGE)
    if hosts and small > WINDOW and segments > 1 and collective != "reduce":
        by = f"hierarchical:{telling(hosts)},by=direct/direct,segments={segments}"
        why = "each value is encoded once, and each sum once, overlapped with sending"
        return AlgorithmChoice(by, why, "direct")
    if n > FLAT_UP_TO and collective != "reduce":
        why = f"{n} ranks, above {FLAT_UP_TO}: two levels need fewer messages"
        return AlgorithmChoice("hierarchical:by=direct/direct", why, "direct")
    if collective == "reduce" and small < SHARED_OUT_FROM:
        return AlgorithmChoice("naive", "each value is encoded once", "direct+direct")
    best = "direct+direct" if collective == "reduce" else "direct"
    runner_up = "naive" if collective == "reduce" else "halving_doubling"
    return AlgorithmChoice(
        best, "each value is encoded once, and each sum once", runner_up
    )


def predicted_error(
    collective: str,
    algorithm: str | Spec,
    n: int,
    root: int,
    coding: Coding,
    hosts: tuple[int, ...] = (),
) -> float:
    """The relative error of the result, for independent inputs of one distribution."""
    made = lowered(collective, algorithm, n, root, 0, hosts, coding.scope)
    assert made.noise is not None
    return made.noise.factor * coding.codec.error


def refuse_large_error(
    collective: str,
    algorithm: str | Spec,
    n: int,
    root: int,
    coding: Coding,
    hosts: tuple[int, ...] = (),
    bound: float | None = None,
) -> None:
    """Raise BadArgument if the predicted error is above the caller's bound.

    Also if stochastic rounding would make ranks differ.
    """
    once = coding.codec.error
    if bound is None:
        bound = BOUND * once
    if isinstance(bound, bool) or not isinstance(bound, int | float) or not bound > 0:
        raise BadArgument(
            f"error_bound = {bound!r}: expected a relative error above 0, such as 0.1"
        )
    key = collective, algorithm, n, root, coding, hosts
    found = predicted_error(*key)
    if _rounds_differently(key):
        raise BadArgument(
            f"{collective} by {algorithm}: several ranks compute the same sums, and "
            f"{coding.codec.name}:stochastic would round them differently; use "
            f"{coding.codec.name}, or algorithm='direct'"
        )
    if found > bound:
        raise BadArgument(
            f"{collective} by {algorithm} in {coding}: its predicted relative error "
            f"is {found:.2%}, the bound {bound:.2%}; "
            + _better(collective, n, root, coding, hosts, bound)
        )


def _rounds_differently(key: Any) -> bool:
    collective, algorithm, n, root, coding, hosts = key
    made = lowered(collective, algorithm, n, root, 0, hosts, coding.scope)
    return coding.codec.stochastic and made.replicated


@lru_cache(maxsize=256)
def _better(
    collective: str,
    n: int,
    root: int,
    coding: Coding,
    hosts: tuple[int, ...],
    bound: float,
) -> str:
    """Advice: an algorithm or option with a smaller error."""
    for algorithm in _BETTER:
        try:
            found = predicted_error(collective, algorithm, n, root, coding, hosts)
        except UnisonoError:  # no such algorithm here
            continue
        if found <= bound:
            return f"use algorithm={algorithm!r}, which has {found:.2%}"
        return (
            f"even {algorithm} has {found:.2%}: use a more accurate codec, "
            "or give a larger error_bound"
        )
    return "use a more accurate codec, or give a larger error_bound"
