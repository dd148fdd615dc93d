"""all_reduce with a scheme that chooses what to send: `codec="topk:0.01"` and such.

Nothing is remembered from call to call, so what is not sent is lost; in training take
`unisono.parallel`, whose error feedback sends it later. As it is, top-k is exact for
tensors that are sparse already.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from unisono.codecs.options import Scheme, scheme
from unisono.codecs.powersgd import PowerSGD
from unisono.codecs.randomk import RandomK
from unisono.errors import BadArgument
from unisono.runtime import calls
from unisono.runtime.base import How
from unisono.runtime.buffers import Buffer, as_numpy
from unisono.runtime.low_rank import LowRankSum
from unisono.runtime.operations import Reduction
from unisono.runtime.sparse import RandomKSum, TopKSum
from unisono.runtime.stages import Staged, Stages
from unisono.runtime.summing import Summing

if TYPE_CHECKING:
    from unisono.runtime.communicator import Communicator

FLOATS = "float32", "bfloat16", "float16"


def all_reduce(
    comm: Communicator, x: Any, out: Any, reduction: Reduction, how: How
) -> Any:
    """The sum or mean of what each rank sends of its x, in place or in `out`."""
    told = scheme(how.codec)
    call = calls.all_reduce(comm._at, x, out)
    _refuse_misfits(str(how.codec), call, reduction, how)
    comm._refuse_unusable("all_reduce")
    assert call.input is not None
    way = _summing(comm, told, call.input)
    mean = reduction.op == "mean"
    work = Staged(_stages(way, call, mean, how.label), call.result, "all_reduce")
    return work if how.async_op else work.wait()


def _stages(way: Summing, call: calls.Call, mean: bool, label: str) -> Stages:
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


def _summing(comm: Communicator, told: Scheme, source: Buffer) -> Summing:
    if isinstance(told, PowerSGD):
        return LowRankSum(comm, told, [source.shape], feedback=False)
    if isinstance(told, RandomK):
        return RandomKSum(comm, told, source.count, feedback=False)
    return TopKSum(comm, told, source.count, feedback=False)


def _refuse_misfits(
    spec: str, call: calls.Call, reduction: Reduction, how: How
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
