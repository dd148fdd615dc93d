"""Calls with a codec: what they may be, and how wrong they may get.

    comm.all_reduce(x, codec="fp8")                    between all ranks
    comm.all_reduce(x, codec="int8:block=64@hosts")    only between hosts
    comm.all_reduce(x, codec="fp8@hosts", error_bound=0.05)

The codec is part of what is lowered, so the error of the result follows from the
programs, before anything runs. Each encoding adds its own; an algorithm that encodes at
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
from unisono.runtime.plan.select import (
    SHARED_OUT_FROM,
    Choice,
    by_variable,
    choose,
    quickest,
)
from unisono.schedule.coding import Scope
from unisono.transports.session import WINDOW

BOUND = 4.0
"""Without `error_bound`: how many times the error of encoding once is accepted."""

DTYPES = "float32", "bfloat16", "float16"
REDUCING = "all_reduce", "reduce_scatter", "reduce"
FLAT_UP_TO = 32
"""Above so many ranks a direct algorithm has too many messages."""
LEAST_MESSAGE = 16 << 10
"""Between hosts calls that need their windows more than once are cut into segments of
so many bytes, so that some are encoded and added up while others are on their way."""
_TWO_LEVELS = {
    "all_reduce": ("direct/direct",),
    "reduce_scatter": ("direct/direct",),
    "reduce": ("naive/naive",),
}
_BETTER = "direct", "naive", "direct+direct"


def as_coding(codec: Any, coded: str | None = None) -> Coding:
    """What is meant by `codec=`, and by `coded=`, which is the old way to say where."""
    told = None
    if isinstance(codec, str):
        codec, at, told = codec.partition("@")
        told = told if at else None
    if told is not None and coded is not None and told != coded:
        raise BadArgument(
            f"codec={codec}@{told}, coded={coded!r}: they contradict each other; "
            "give one of them"
        )
    if coded is not None:
        warn_renamed(f"coded={coded!r}", f'codec="{codec}@{coded}"', level=6)
    if is_scheme(codec):
        raise BadArgument(
            f"codec {codec}: it chooses what to send, and only all_reduce can do that; "
            "expected a dense codec here, such as fp8"
        )
    found = get(codec)
    scope = told if told is not None else coded if coded is not None else Scope.ALL
    if scope not in list(Scope):
        raise unknown("scope of a codec", str(scope), list(Scope))
    return Coding(found, Scope(scope))


def refuse_misfits(
    where: str, coding: Coding, dtype: DType, reduction: Reduction
) -> None:
    """Raise BadArgument unless such elements and such a reduction can be encoded."""
    if where == "barrier":
        raise BadArgument("barrier: it moves no values, so codec= has no meaning")
    if dtype.name not in DTYPES:
        advice = (
            "convert to float32, or leave codec= out"
            if dtype.kind == "f"
            else "leave codec= out: these travel as they are"
        )
        raise BadArgument(
            f"{where}: codec {coding} encodes {', '.join(DTYPES[:-1])} and "
            f"{DTYPES[-1]}, got {dtype.name}; {advice}"
        )
    if reduction.op not in ("sum", "mean"):
        raise BadArgument(
            f"{where}: codec {coding} goes with op='sum', 'mean' or premul_sum, got "
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
) -> Choice:
    """The algorithm for a call of `nbytes` values, if its caller does not say.

    What only copies is chosen as without a codec, for the bytes of the codes. What adds
    goes straight to the rank that adds it up, and so is encoded but twice; and over two
    levels between hosts, or where there are many ranks.
    """
    small = coding.codec.nbytes(nbytes // itemsize)
    if named or collective not in REDUCING:
        return choose(
            *(collective, small, n),
            named=named,
            reproducible=False,
            hosts=hosts or None,
        )
    if chosen := by_variable(collective):
        return chosen
    if hosts and len(set(hosts)) < n:
        return quickest(collective, small, hosts, _TWO_LEVELS[collective])
    segments = WINDOW // (n * LEAST_MESSAGE)
    if hosts and small > WINDOW and segments > 1 and collective != "reduce":
        by = f"hierarchical:{telling(hosts)},by=direct/direct,segments={segments}"
        why = "each value is encoded once, and each sum once, while others are sent"
        return Choice(by, why, "direct")
    if n > FLAT_UP_TO and collective != "reduce":
        why = f"{n} ranks, above {FLAT_UP_TO}: two levels need fewer messages"
        return Choice("hierarchical:by=direct/direct", why, "direct")
    if collective == "reduce" and small < SHARED_OUT_FROM:
        return Choice("naive", "each value is encoded once", "direct+direct")
    best = "direct+direct" if collective == "reduce" else "direct"
    runner_up = "naive" if collective == "reduce" else "halving_doubling"
    return Choice(best, "each value is encoded once, and each sum once", runner_up)


def predicted_error(
    collective: str,
    algorithm: str | Spec,
    n: int,
    root: int,
    coding: Coding,
    hosts: tuple[int, ...] = (),
) -> float:
    """The relative error of the result, of inputs that are alike but independent."""
    made = lowered(collective, algorithm, n, root, 0, hosts, coding.scope)
    assert made.noise is not None
    return made.noise.factor * coding.codec.error


def refuse_too_wrong(
    collective: str,
    algorithm: str | Spec,
    n: int,
    root: int,
    coding: Coding,
    hosts: tuple[int, ...] = (),
    bound: float | None = None,
) -> None:
    """Raise BadArgument if the result would be further off than the caller accepts.

    Also if a rule of the algorithm itself does not allow codes.
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
    if _by_chance_in_many_places(key):
        raise BadArgument(
            f"{collective} by {algorithm}: ranks make the same sums each for itself, "
            f"and {coding.codec.name}:stochastic would round them differently; use "
            f"{coding.codec.name}, or algorithm='direct'"
        )
    if found > bound:
        raise BadArgument(
            f"{collective} by {algorithm} in {coding}: its predicted relative error "
            f"is {found:.2%}, the bound {bound:.2%}; "
            + _better(collective, n, root, coding, hosts, bound)
        )


def _by_chance_in_many_places(key: Any) -> bool:
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
    """What would do, in words."""
    for algorithm in _BETTER:
        try:
            found = predicted_error(collective, algorithm, n, root, coding, hosts)
        except UnisonoError:  # no such algorithm here
            continue
        if found <= bound:
            return f"use algorithm={algorithm!r}, which has {found:.2%}"
        return (
            f"even {algorithm} has {found:.2%}: use a codec that is more exact, "
            "or give a larger error_bound"
        )
    return "use a codec that is more exact, or give a larger error_bound"
