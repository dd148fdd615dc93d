"""all_reduce with a compression scheme that selects what to send: `codec="topk:0.01"`.

Nothing is kept between calls, so what is not sent is lost; for training use
`unisono.parallel`, whose error feedback sends it later. Without it, top-k is exact for
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
from unisono.runtime.call.options import CallOptions
from unisono.runtime.call.reductions import Reduction
from unisono.runtime.collectives import Collectives
from unisono.runtime.compress.powersgd import LowRankSum
from unisono.runtime.compress.sparse import RandomKSum, TopKSum
from unisono.runtime.compress.sums import CompressedSum
from unisono.runtime.stages import StagedWork, Stages
from unisono.units import format_bytes

FLOATS = "float32", "bfloat16", "float16"


def all_reduce(
    comm: Collectives, x: Any, out: Any, reduction: Reduction, how: CallOptions
) -> Any:
    """The sum or mean of the compressed x of all ranks, in place or in `out`."""
    chosen = scheme(how.codec)
    call = arguments.all_reduce(comm.core.position, x, out)
    call.refuse_device(f"all_reduce: codec = {how.codec}")
    _refuse_unsupported(str(how.codec), call, reduction, how)
    comm.core.check_usable("all_reduce")
    assert call.input is not None
    compressed = _compressed_sum(comm, chosen, call.input)
    mean = reduction.op == "mean"
    # The data sent is flat, so the label has the shape, for ranks to compare.
    label = f"{how.label} {call.dtype.name}{shape_text(call.shape)}".lstrip()
    work = StagedWork(_stages(compressed, call, mean, label), call.result, "all_reduce")
    return work if how.async_op else work.wait()


def explain(comm: Collectives, x: Any, how: CallOptions) -> str:
    """A few readable lines on what such a call would send; nothing is run."""
    chosen, n = scheme(how.codec), comm.world_size
    call = arguments.all_reduce(comm.core.position, x, None)
    _refuse_unsupported(str(how.codec), call, Reduction("sum"), how)
    assert call.input is not None
    what, least, most = _sent(chosen, call.input, n)
    whole = 2 * call.input.nbytes * (n - 1) // n
    near = format_bytes(least)
    sent_text = near if least == most else f"{near} to {format_bytes(most)}"
    lines = [
        f"all_reduce of {format_bytes(call.input.nbytes)} on {n} ranks as {how.codec}",
        f"  sends      {what}",
        f"  costs      {sent_text} from each rank, {format_bytes(whole)} without",
        "  error      depends on the values; what is not sent is lost, unless error "
        "feedback sends it later (unisono.parallel)",
    ]
    return "\n".join(lines)


def _sent(chosen: Scheme, source: Buffer, n: int) -> tuple[str, int, int]:
    """What is selected, and the least and the most bytes a rank sends, on average."""
    count = source.count
    if isinstance(chosen, PowerSGD):
        sizes = chosen.sizes(source.shape)
        if sizes is None:
            numbers, what = count, "everything, since the factors would be larger"
        else:
            a, b, r = sizes
            numbers = r * (a + b)
            what = f"a matrix of {a} by {b} as two of rank {r}"
    elif isinstance(chosen, RandomK):
        numbers = chosen.count(count)
        what = f"{numbers} of {count} elements, drawn at random, the same on all ranks"
    else:
        return _sent_pairs(chosen.count(count), count, n)
    nbytes = 8 * numbers * (n - 1) // n
    return what, nbytes, nbytes


def _sent_pairs(k: int, count: int, n: int) -> tuple[str, int, int]:
    if 2 * k >= count:
        nbytes = 8 * count * (n - 1) // n
        return f"all values: {k} with their indices would be larger", nbytes, nbytes
    what = f"{k} of {count} elements from each rank, with their indices"
    fixed = 16 * n * (n - 1)
    split = PAIR_BYTES * k * (n - 1) // n
    most = min(PAIR_BYTES * k * n, 4 * count) * (n - 1) // n
    return what, fixed + 2 * split, fixed + split + most


def _stages(
    compressed: CompressedSum, call: arguments.Call, mean: bool, label: str
) -> Stages:
    assert call.input is not None
    assert call.output is not None
    flat = as_numpy(call.input).astype(np.float32).reshape(-1)
    yield from compressed.reduce(flat, label=label)
    if mean:
        flat /= np.float32(compressed.comm.world_size)
    target = as_numpy(call.output)
    with np.errstate(over="ignore"):  # to infinity, as in any cast
        target[...] = flat.reshape(target.shape).astype(target.dtype)
    if call.finish is not None:
        call.finish(call.result)


def _compressed_sum(comm: Collectives, chosen: Scheme, source: Buffer) -> CompressedSum:
    if isinstance(chosen, PowerSGD):
        return LowRankSum(comm, chosen, [source.shape], feedback=False)
    if isinstance(chosen, RandomK):
        return RandomKSum(comm, chosen, source.count, feedback=False)
    return TopKSum(comm, chosen, source.count, feedback=False)


def _refuse_unsupported(
    spec: str, call: arguments.Call, reduction: Reduction, how: CallOptions
) -> None:
    if call.dtype.name not in FLOATS:
        raise BadArgument(
            f"all_reduce: codec {spec} supports {', '.join(FLOATS[:-1])} and "
            f"{FLOATS[-1]}, got {call.dtype.name}; leave codec= out"
        )
    if reduction.op not in ("sum", "mean") or reduction.in_python:
        raise BadArgument(
            f"all_reduce: codec {spec} supports op='sum' and 'mean', got "
            f"{reduction.name}; leave codec= out for others"
        )
    if odd := how.first_beyond("codec", "async_op", "label"):
        raise BadArgument(
            f"all_reduce: codec {spec} consists of several collectives, so "
            f"{odd}= is not supported; leave it out"
        )
