"""An array that is divided among the ranks in one way, divided in another.

    from          to            by
    a dimension   another       all_to_all
    a dimension   the same      all_to_all, where parts of other sizes become even
    a dimension   replicated    all_gather
    replicated    a dimension   nothing is sent
    partial       a dimension   reduce_scatter
    partial       replicated    all_reduce

Each is one collective on flat arrays, in which the parts for or from the ranks lie one
after the other. Before that ranks tell each other the sizes of their parts, unless the
caller gives the whole shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from unisono.devices.arrays import is_on_device, is_tensor
from unisono.errors import BadArgument, whole_number
from unisono.runtime.call import arguments
from unisono.runtime.call.buffers import copy_back, new_like, readable
from unisono.runtime.call.options import CallOptions
from unisono.runtime.call.reductions import Reduction, as_reduction
from unisono.runtime.call.work import Work
from unisono.runtime.collectives import Collectives
from unisono.runtime.cuts import (
    PARTIAL,
    Cut,
    Division,
    along,
    as_cut,
    is_dimension,
    is_partial,
)
from unisono.runtime.device.work import written_here

_COPIES = Reduction("sum")
_WRONG = -1  # what a rank with a wrong argument tells the others as its size


def redistribute(
    comm: Collectives,
    x: Any,
    from_: Any,
    to: Any,
    shape: Sequence[int] | None,
    sizes: Sequence[int] | None,
    op: Any,
    how: CallOptions,
) -> Any:
    """See `Communicator.redistribute`."""
    array = _array(x)
    reduction = _reduction(from_, op)
    comm.core.check_usable("redistribute")
    if is_dimension(from_) and shape is None:
        old, new, whole, division = _told(comm, array, from_, to, how)
    else:
        old, new = _cuts(array, from_, to)
        whole = tuple(array.shape) if shape is None else _numbers("shape", shape)
        _refuse_other_dims(array, whole)
        division = _division(whole, old, None, comm.world_size)
        _refuse_other_shape(array, division.part(comm.rank) if division else whole)
    wanted = _division(whole, new, sizes, comm.world_size)
    how = how._replace(label=f"redistribute {old} to {new} {how.label}".rstrip())
    if division is not None:
        return _of_parts(comm, array, division, wanted, how)
    if old == PARTIAL:
        return _of_summands(comm, array, wanted, reduction, how)
    mine = array if wanted is None else array[wanted.index(comm.rank)]
    return _ready(comm, mine, how)


def _told(
    comm: Collectives, array: Any, from_: Any, to: Any, how: CallOptions
) -> tuple[Cut, Cut, tuple[int, ...], Division | None]:
    """The cuts, and how the ranks have cut, who tell each other the sizes of parts."""
    wrong, dim, size = None, 0, _WRONG
    try:
        old, new = _cuts(array, from_, to)
        assert isinstance(old, int)
        dim, size = old, array.shape[old]
    except BadArgument as error:  # takes part, so that the others do not wait
        wrong = error
    sizes: list[int] = comm.all_gather(
        np.array([size], np.int64),
        label=f"redistribute, sizes {how.label}".rstrip(),
        timeout_s=how.timeout_s,
    ).tolist()
    if wrong is not None:
        raise wrong
    if bad := [rank for rank, told in enumerate(sizes) if told < 0]:
        raise BadArgument(
            f"redistribute: rank {bad[0]} gave a wrong argument, which it has raised; "
            "all ranks give the same from_ and to"
        )
    whole = (*array.shape[:dim], sum(sizes), *array.shape[dim + 1 :])
    return old, new, whole, Division(whole, dim, tuple(sizes))


def _of_parts(
    comm: Collectives,
    array: Any,
    old: Division,
    new: Division | None,
    how: CallOptions,
) -> Any:
    """From parts along a dimension: all_gather or all_to_all."""
    at = comm.core.position
    if new is None:
        counts = _uneven(old.elements)
        call = arguments.all_gather(at, array.reshape(-1), None, counts)
        call.finish = lambda flat: _unpacked(flat, old.shape, old.dim, old.sizes)
    elif new == old:
        return _ready(comm, array, how)
    else:
        there, here, elements = old.shared_with(new)
        matrix = None if (elements == elements[0, 0]).all() else elements.tolist()
        sent = None if matrix is None else matrix[at.rank]
        flat = _packed(array, new.dim, here[at.rank].tolist())
        call = arguments.all_to_all(at, flat, None, sent, matrix)
        part, sizes = new.part(at.rank), there[:, at.rank].tolist()
        call.finish = lambda flat: _unpacked(flat, part, old.dim, sizes)
    call.shape = old.shape
    return comm.core.run(call, _COPIES, how)


def _of_summands(
    comm: Collectives,
    array: Any,
    new: Division | None,
    reduction: Reduction,
    how: CallOptions,
) -> Any:
    """From summands of the whole: all_reduce or reduce_scatter."""
    at = comm.core.position
    if new is None:
        call = arguments.all_reduce(at, _copy(array), None)
    else:
        flat = _packed(array, new.dim, new.sizes)
        call = arguments.reduce_scatter(at, flat, None, _uneven(new.elements))
        part, call.shape = new.part(at.rank), new.shape
        call.finish = lambda flat: flat.reshape(part)
    return comm.core.run(call, reduction, how)


def _ready(comm: Collectives, result: Any, how: CallOptions) -> Any:
    """A copy of what this rank has already, or its Work: no other rank takes part."""
    if is_on_device(result):
        return written_here("redistribute", _copy(result), how, comm.core.check_usable)
    how.refuse_stream("redistribute")
    copy = _copy(result)
    return Work(None, copy, call="redistribute") if how.async_op else copy


def _copy(array: Any) -> Any:
    made = new_like(array, tuple(array.shape))
    copy_back(made, array)
    return made


def _packed(array: Any, dim: int, sizes: Sequence[int]) -> Any:
    """The slices along a dimension, flat and one after the other."""
    if dim == 0:
        return array.reshape(-1)
    flat = new_like(array, (int(np.prod(array.shape)),))
    for piece, place in _pieces(flat, tuple(array.shape), dim, sizes):
        copy_back(piece, array[place])
    return flat


def _unpacked(flat: Any, shape: tuple[int, ...], dim: int, sizes: Sequence[int]) -> Any:
    """The inverse: an array of this shape, of flat slices along a dimension."""
    if dim == 0:
        return flat.reshape(shape)
    array = new_like(flat, shape)
    for piece, place in _pieces(flat, shape, dim, sizes):
        copy_back(array[place], piece)
    return array


def _pieces(
    flat: Any, shape: tuple[int, ...], dim: int, sizes: Sequence[int]
) -> list[tuple[Any, tuple[slice, ...]]]:
    """Each slice as a piece of the flat array, and its index in the other."""
    division, found, begin, first = Division(shape, dim, tuple(sizes)), [], 0, 0
    for rank, (size, count) in enumerate(zip(sizes, division.elements, strict=True)):
        piece = flat[begin : begin + count].reshape(division.part(rank))
        found.append((piece, along(dim, first, first + size)))
        begin, first = begin + count, first + size
    return found


def _uneven(counts: list[int]) -> list[int] | None:
    """The counts as a collective takes them: None where they are all the same."""
    return None if len(set(counts)) == 1 else counts


def _array(x: Any) -> Any:
    """The array itself, or a contiguous copy of it."""
    if is_on_device(x) and not is_tensor(x):
        raise BadArgument(
            "redistribute: on a CUDA device only torch tensors are supported; make one "
            "with torch.as_tensor(x, device='cuda')"
        )
    return readable(x, "redistribute").array


def _cuts(array: Any, from_: Any, to: Any) -> tuple[Cut, Cut]:
    old, new = (
        as_cut(name, cut, len(array.shape))
        for name, cut in (("from_", from_), ("to", to))
    )
    if new == PARTIAL:
        raise BadArgument(
            "redistribute: to = 'partial': there is no one way to make summands; give "
            "the number of a dimension, or None for the whole on every rank"
        )
    return old, new


def _reduction(from_: Any, op: Any) -> Reduction:
    reduction = as_reduction(op)
    if reduction.in_python:
        raise BadArgument(
            f"redistribute: op = {reduction.name}: expected the name of a reduction; "
            "all_reduce and reduce_scatter take functions and factors"
        )
    if reduction.op != "sum" and not is_partial(from_):
        raise BadArgument(
            f"redistribute: op = {reduction.name}: nothing is reduced from {from_!r}; "
            "leave op= out, or give from_='partial'"
        )
    return reduction


def _numbers(name: str, given: Sequence[int]) -> tuple[int, ...]:
    return tuple(whole_number(f"redistribute: {name}", number) for number in given)


def _division(
    whole: tuple[int, ...], cut: Cut, sizes: Sequence[int] | None, n: int
) -> Division | None:
    """The parts, by the library's rule or as given; None if there are none."""
    if sizes is None:
        return Division.by_rule(whole, cut, n) if isinstance(cut, int) else None
    numbers = _numbers("sizes", sizes)
    if not isinstance(cut, int):
        raise BadArgument(
            f"redistribute: sizes = {list(numbers)}: a whole has no parts; leave "
            "sizes= out, or give the number of a dimension as `to`"
        )
    right = len(numbers) == n and min(numbers) >= 0
    if not right or sum(numbers) != whole[cut]:
        raise BadArgument(
            f"redistribute: sizes = {list(numbers)}: expected {n} numbers, none "
            f"negative, that add up to {whole[cut]}, the size of dimension {cut}"
        )
    return Division(whole, cut, numbers)


def _refuse_other_dims(array: Any, whole: tuple[int, ...]) -> None:
    if len(whole) != len(array.shape):
        raise BadArgument(
            f"redistribute: shape = {list(whole)} has {len(whole)} dimensions, x has "
            f"{len(array.shape)}; shape= is that of the whole, with all dimensions"
        )


def _refuse_other_shape(array: Any, wanted: tuple[int, ...]) -> None:
    if tuple(array.shape) != wanted:
        raise BadArgument(
            f"redistribute: x is {list(array.shape)}, by shape= this rank has "
            f"{list(wanted)}; without shape= ranks tell each other what they have"
        )
