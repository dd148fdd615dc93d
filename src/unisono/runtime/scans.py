"""Prefix reductions: rank r gets the reduction of the ranks up to r, or before it.

Each rank reduces one share of the elements for all ranks: an all_to_all brings it
every rank's input, another returns the prefixes. So a rank sends twice its buffer,
whatever the number of ranks, and contributions are added in the order of ranks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.errors import BadArgument
from unisono.reductions import reduce
from unisono.runtime.call import arguments
from unisono.runtime.call.buffers import as_numpy
from unisono.runtime.call.notes import shape_text
from unisono.runtime.call.options import CallOptions, Options
from unisono.runtime.call.reductions import Reduction, as_reduction
from unisono.runtime.collectives import Collectives
from unisono.runtime.stages import StagedWork, Stages

Array = NDArray[Any]


def scan(
    comm: Collectives,
    x: Any,
    out: Any,
    op: Any,
    how: CallOptions,
    *,
    inclusive: bool,
) -> Any:
    """See `Communicator.scan` and `Communicator.exscan`."""
    name, reduction = "scan" if inclusive else "exscan", as_reduction(op)
    call = arguments.all_reduce(comm.core.position, x, out)
    call.refuse_device(name)
    _refuse_misfits(name, reduction, how)
    reduction.check(call.dtype)
    comm.core.check_usable(name)
    # The shares are flat, so the ranks compare shape and operation by the label.
    shape = shape_text(call.shape)
    label = f"{name} {reduction.op} {call.dtype.name}{shape} {how.label}".rstrip()
    work = StagedWork(
        _stages(comm, call, reduction.op, inclusive, label, how.timeout_s),
        call.result,
        name,
    )
    return work if how.async_op else work.wait()


def _stages(
    comm: Collectives,
    call: arguments.Call,
    op: str,
    inclusive: bool,
    label: str,
    timeout_s: float | None,
) -> Stages:
    assert call.input is not None
    assert call.output is not None
    n, count = comm.world_size, call.input.count
    share = -(-count // n)
    mine = np.zeros((n, share), as_numpy(call.input).dtype)
    mine.reshape(-1)[:count] = as_numpy(call.input).reshape(-1)
    theirs = np.empty_like(mine)
    limit: Options = {"async_op": True, "label": label, "timeout_s": timeout_s}
    yield comm.all_to_all(mine, out=theirs, **limit)
    prefixes = np.empty_like(mine)
    for rank in range(n):
        last = rank + inclusive
        if not last:
            prefixes[rank] = identity(op, mine.dtype)
        elif last == 1 or call.dtype.accumulates_in_float32:  # rounded once, at the end
            reduce(prefixes[rank], list(theirs[:last]), op)
        else:
            reduce(prefixes[rank], [prefixes[rank - 1], theirs[last - 1]], op)
    yield comm.all_to_all(prefixes, out=mine, **limit)
    target = as_numpy(call.output)
    target[...] = mine.reshape(-1)[:count].reshape(target.shape)
    if call.finish is not None:
        call.finish(call.result)


def identity(op: str, dtype: np.dtype[Any]) -> Any:
    """What changes nothing when it is reduced with: what rank 0 gets of an exscan."""
    if op in ("sum", "bor", "bxor"):
        return dtype.type(0)
    if op == "prod":
        return dtype.type(1)
    if op == "band":
        return dtype.type(True) if dtype == np.bool_ else ~dtype.type(0)
    highest = op == "min"  # nothing is higher, so every other wins
    if dtype == np.bool_:
        return dtype.type(highest)
    if np.issubdtype(dtype, np.integer):
        about = np.iinfo(dtype)
        return dtype.type(about.max if highest else about.min)
    infinity = np.array(np.inf if highest else -np.inf).astype(dtype)
    return infinity[()]


def _refuse_misfits(name: str, reduction: Reduction, how: CallOptions) -> None:
    if reduction.in_python or reduction.op == "mean":
        raise BadArgument(
            f"{name}: op = {reduction.name}: expected sum, prod, min, max, band, bor "
            "or bxor"
        )
    if odd := how.first_beyond("async_op", "label", "timeout_s"):
        raise BadArgument(
            f"{name}: it consists of two collectives, so {odd}= has no meaning; "
            "leave it out"
        )
