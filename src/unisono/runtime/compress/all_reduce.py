"""all_reduce with a scheme that chooses what to send: `codec="topk:0.01"` and such.

Nothing is remembered from call to call, so what is not sent is lost; in training take
`unisono.parallel`, whose error feedback sends it later. As it is, top-k is exact for
tensors that are sparse already.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from unisono.codecs.options import Scheme, scheme
from unisono.codecs.powersgd import PowerSGD
from unisono.codecs.randomk import RandomK
from unisono.codecs.topk import PAIR_BYTES
from unisono.errors import BadArgument
from unisono.runtime.call import arguments
from unisono.runtime.call.buffers import Buffer, as_numpy
from unisono.runtime.call.notes import shape_text
from unisono.runtime.call.options import How
from unisono.runtime.call.reductions import Reduction
from unisono.runtime.collectives import Collectives
from unisono.runtime.compress.powersgd import LowRankSum
from unisono.runtime.compress.sparse import RandomKSum, TopKSum
from unisono.runtime.compress.sums import Summing
from unisono.runtime.stages import Staged, Stages
from unisono.units import format_bytes

FLOATS = "float32", "bfloat16", "float16"


def all_reduce(
    comm: Collectives, x: Any, out: Any, reduction: Reduction, how: How
) -> Any:
    """The sum or mean of what each rank sends of its x, in place or in `out`."""
    told = scheme(how.codec)
    call = arguments.all_reduce(comm.core.position, x, out)
    _refuse_misfits(str(how.codec), call, reduction, how)
    comm.core.check_usable("all_reduce")
    assert call.input is not None
    way = _summing(comm, told, call.input)
    mean = reduction.op == "mean"
    # What is sent is flat, so the ranks compare the shape by the label.
    label = f"{how.label} {call.dtype.name}{shape_text(call.shape)}".lstrip()
    work = Staged(_stages(way, call, mean, label), call.result, "all_reduce")
    return work if how.async_op else work.wait()


def explain(comm: Collectives, x: Any, how: How) -> str:
    """What such a call would send, in a few lines; nothing is run."""
    told, n = scheme(how.codec), comm.world_size
    call = arguments.all_reduce(comm.core.position, x, None)
    _refuse_misfits(str(how.codec), call, Reduction("sum"), how)
    assert call.input is not None
    what, least, most = _sent(told, call.input, n)
    whole = 2 * call.input.nbytes * (n - 1) // n
    near = format_bytes(least)
    told_bytes = near if least == most else f"{near} to {format_bytes(most)}"
    lines = [
        f"all_reduce of {format_bytes(call.input.nbytes)} on {n} ranks as {how.codec}",
        f"  sends      {what}",
        f"  costs      {told_bytes} from each rank, {format_bytes(whole)} without",
        "  error      depends on the values; what is not sent is lost, unless error "
        "feedback sends it later (unisono.parallel)",
    ]
    return "\n".join(lines)


def _sent(told: Scheme, source: Buffer, n: int) -> tuple[str, int, int]:
    """What is chosen, and the least and the most that a rank sends, on average."""
    count = source.count
    if isinstance(told, PowerSGD):
        sizes = told.sizes(source.shape)
        if sizes is None:
            numbers, what = count, "everything, since thin factors would be more"
        else:
            a, b, r = sizes
            numbers = r * (a + b)
            what = f"a matrix of {a} by {b} as two of rank {r}"
    elif isinstance(told, RandomK):
        numbers = told.count(count)
        what = f"{numbers} of {count} elements, drawn by lot, the same on all ranks"
    else:
        return _sent_pairs(told.count(count), count, n)
    nbytes = 8 * numbers * (n - 1) // n
    return what, nbytes, nbytes


def _sent_pairs(k: int, count: int, n: int) -> tuple[str, int, int]:
    if 2 * k >= count:
        nbytes = 8 * count * (n - 1) // n
        return f"plain numbers: {k} with their places would be more", nbytes, nbytes
    what = f"{k} of {count} elements from each rank, with their places"
    fixed = 16 * n * (n - 1)
    split = PAIR_BYTES * k * (n - 1) // n
    most = min(PAIR_BYTES * k * n, 4 * count) * (n - 1) // n
    return what, fixed + 2 * split, fixed + split + most


def _stages(way: Summing, call: arguments.Call, mean: bool, label: str) -> Stages:
    assert call.input is not None
    assert call.output is not None
    flat = as_numpy(call.input).astype(np.float32).reshape(-1)
    yield from way.reduce(flat, label=label)
    if mean:
        flat /= np.float32(way.comm.world_size)
    target = as_numpy(call.output)
    with np.errstate(over="ignore"):  # to an infinity, as any cast does
        target[...] = flat.reshape(target.shape).astype(target.dtype)
    if call.finish is not None:
        call.finish(call.result)


def _summing(comm: Collectives, told: Scheme, source: Buffer) -> Summing:
    if isinstance(told, PowerSGD):
        return LowRankSum(comm, told, [source.shape], feedback=False)
    if isinstance(told, RandomK):
        return RandomKSum(comm, told, source.count, feedback=False)
    return TopKSum(comm, told, source.count, feedback=False)


def _refuse_misfits(
    spec: str, call: arguments.Call, reduction: Reduction, how: How
) -> None:
    if call.dtype.name not in FLOATS:
        raise BadArgument(
            f"all_reduce: codec {spec} is for {', '.join(FLOATS[:-1])} and "
            f"{FLOATS[-1]}, got {call.dtype.name}; leave codec= out"
        )
    if reduction.op not in ("sum", "mean") or reduction.in_python:
        raise BadArgument(
            f"all_reduce: codec {spec} goes with op='sum' or 'mean', got "
            f"{reduction.name}; leave codec= out for others"
        )
    plain = How(codec=how.codec, async_op=how.async_op, label=how.label)
    odd = [
        name for name, mine in how._asdict().items() if mine != plain._asdict()[name]
    ]
    if odd:
        raise BadArgument(
            f"all_reduce: codec {spec} takes several collectives of its own making, so "
            f"{odd[0]}= has no meaning; leave it out"
        )
