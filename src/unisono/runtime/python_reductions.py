"""Reductions that run in Python: users' functions, and sums of scaled inputs.

A function needs every rank's input, so these are gathered first, by the same verified
schedules, and then folded in rank order. All ranks fold in the same order and get the
same result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from unisono.runtime.call import arguments
from unisono.runtime.call.buffers import Buffer, as_numpy, new_like, readable
from unisono.runtime.call.options import CallOptions
from unisono.runtime.call.reductions import Reduction, fold, scaled
from unisono.runtime.collectives import Collectives
from unisono.runtime.plan.plans import verified

_SUM = Reduction("sum")


def all_reduce(
    comm: Collectives, x: Any, out: Any, reduction: Reduction, how: CallOptions
) -> Any:
    """Every rank gets the result, in place or in `out`."""
    call = arguments.all_reduce(comm.core.position, x, out)
    return _reduced(comm, call, reduction, how)


def reduce(
    comm: Collectives,
    x: Any,
    out: Any,
    reduction: Reduction,
    root: int,
    how: CallOptions,
) -> Any:
    """The root gets the result."""
    call = arguments.reduce(comm.core.position, x, out, root)
    return _reduced(comm, call, reduction, how)


def reduce_scatter(
    comm: Collectives,
    x: Any,
    out: Any,
    reduction: Reduction,
    counts: Sequence[int] | None,
    how: CallOptions,
) -> Any:
    """Each rank gets its rows of the result."""
    call = arguments.reduce_scatter(comm.core.position, x, out, counts)
    return _reduced(comm, call, reduction, how)


def _reduced(
    comm: Collectives, call: arguments.Call, reduction: Reduction, how: CallOptions
) -> Any:
    call.refuse_device(f"{call.collective}: op = {reduction.name}")
    source = call.input
    assert source is not None
    reduction.check(source.dtype)
    if reduction.function is None:
        return _scaled(comm, call, source, reduction, how)
    how.refuse_codec(
        f"{call.collective} by {reduction.name}", "a function needs exact inputs"
    )
    everything = new_like(source.array, (comm.world_size * source.count,))
    flat = replace(source, shape=(source.count,))
    target = readable(everything, call.collective)
    gathered = arguments.Call("all_gather", target.count, flat, target, call.result)
    gathered.shape = call.shape  # the ranks must agree on the shape of the reduction
    gathered.finish = lambda result: _folded(comm, call, target, reduction, result)
    if how.algorithm:  # it is for the reduction, not for the gather; but must exist
        spec = comm.core.spec(how.algorithm)
        verified(call.collective, spec, comm.world_size, call.root)
    return comm.core.run(
        gathered, _SUM, how._replace(algorithm=None, reproducible=False)
    )


def _scaled(
    comm: Collectives,
    call: arguments.Call,
    source: Buffer,
    reduction: Reduction,
    how: CallOptions,
) -> Any:
    assert reduction.factor is not None
    product = scaled(as_numpy(source), reduction.factor)
    call.input = readable(np.ascontiguousarray(product), call.collective)
    return comm.core.run(call, _SUM, how)


def _folded(
    comm: Collectives,
    call: arguments.Call,
    target: Buffer,
    reduction: Reduction,
    result: Any,
) -> Any:
    assert reduction.function is not None
    assert call.input is not None
    parts = as_numpy(target).reshape(comm.world_size, *call.input.shape)
    total = fold(reduction.function, list(parts))
    if call.output is None:
        return result
    wanted = as_numpy(call.output)
    if call.collective == "reduce_scatter":
        first = _first_row(comm, call)
        total = total[first : first + call.output.rows]
    wanted[...] = total.reshape(wanted.shape)
    return result if call.finish is None else call.finish(result)


def _first_row(comm: Collectives, call: arguments.Call) -> int:
    assert call.input is not None
    if isinstance(call.counts, int):
        return comm.rank * call.input.rows // comm.world_size
    return sum(call.counts[: comm.rank]) // max(call.input.row, 1)
