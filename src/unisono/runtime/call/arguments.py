"""Arguments of collectives, checked and brought into one form: one function for each.

Each finds the input array, the output array, and each rank's number of elements. What a
rank contributes or gets are consecutive rows: whole slices along the first axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from unisono.dtypes import DType
from unisono.errors import BadArgument, whole_number
from unisono.runtime.call.buffers import (
    HOST,
    Buffer,
    buffer_of,
    copy_back,
    new_like,
    overlap,
    readable,
    writable,
)


@dataclass(frozen=True)
class Position:
    """The rank that calls, and the number of ranks."""

    rank: int
    n: int


@dataclass(slots=True)
class Call:
    """One call: input, output, and the caller's result.

    `shape` must be the same on all ranks: the array's shape where all have the same, or
    that of all ranks' rows together. A scalar has the shape of an array of one element.
    None if the caller gives only a number of elements.
    """

    collective: str
    counts: int | tuple[int, ...]
    input: Buffer | None
    output: Buffer | None
    result: Any
    finish: Callable[[Any], Any] | None = None
    root: int = 0
    shape: tuple[int, ...] | None = None

    @property
    def dtype(self) -> DType:
        """The element type."""
        buffer = self.input or self.output
        assert buffer is not None
        return buffer.dtype

    @property
    def addresses(self) -> tuple[int, int]:
        """Where input and output begin; 0 for one that this rank does not have."""
        return (
            0 if self.input is None else self.input.address,
            0 if self.output is None else self.output.address,
        )

    @property
    def device(self) -> int:
        """The CUDA device that its arrays are on, or HOST; all are on the same."""
        found = {b.device for b in (self.input, self.output) if b is not None}
        if len(found) > 1:
            raise BadArgument(
                f"{self.collective}: x is on {_place(self.input)}, out on "
                f"{_place(self.output)}; both must be on the same device"
            )
        return found.pop() if found else HOST

    @property
    def is_on_device(self) -> bool:
        """Whether an array of it is in the memory of a CUDA device."""
        x, out = self.input, self.output
        return (x is not None and x.device != HOST) or (
            out is not None and out.device != HOST
        )

    def refuse_device(self, what: str) -> None:
        """Raise BadArgument if it is on a device; `what` runs on the host alone."""
        if self.is_on_device:
            raise BadArgument(
                f"{what} is not supported on CUDA arrays; copy the array to the host"
            )

    def finished(self) -> Any:
        """The result, once the output is written."""
        return self.result if self.finish is None else self.finish(self.result)

    @property
    def total(self) -> int:
        """Elements of the largest buffer that any rank holds."""
        return self.counts if isinstance(self.counts, int) else sum(self.counts)


def _place(buffer: Buffer | None) -> str:
    if buffer is None or buffer.device == HOST:
        return "the host"
    return f"cuda:{buffer.device}"


def all_reduce(at: Position, x: Any, out: Any) -> Call:
    """Every rank's x, reduced, into x or out."""
    source, target, result, finish = _same_shape("all_reduce", x, out)
    return _alike("all_reduce", source, source, target, result, finish)


def reduce(at: Position, x: Any, out: Any, root: int) -> Call:
    """Every rank's x, reduced, into the root's x or out."""
    root = _root("reduce", at, root)
    if at.rank != root:
        source = readable(x, "reduce")
        return _alike("reduce", source, source, None, None, None, root)
    source, target, result, finish = _same_shape("reduce", x, out)
    return _alike("reduce", source, source, target, result, finish, root)


def broadcast(at: Position, x: Any, out: Any, root: int) -> Call:
    """The root's x, into every rank's x or out."""
    root = _root("broadcast", at, root)
    if at.rank == root:
        source, target, result, finish = _same_shape("broadcast", x, out)
        return _alike("broadcast", source, source, target, result, finish, root)
    wanted = x if out is None else out
    target, finish = target_of(wanted, "broadcast")
    return _alike("broadcast", target, None, target, wanted, finish, root)


def all_gather(at: Position, x: Any, out: Any, counts: Sequence[int] | None) -> Call:
    """All ranks' rows, concatenated, on every rank."""
    source, rows = _own_rows("all_gather", at, x, counts)
    return _gathering("all_gather", at, source, rows, out, counts)


def gather(
    at: Position, x: Any, out: Any, root: int, counts: Sequence[int] | None
) -> Call:
    """All ranks' rows, concatenated, on the root."""
    root = _root("gather", at, root)
    source, rows = _own_rows("gather", at, x, counts)
    if at.rank == root:
        return _gathering("gather", at, source, rows, out, counts, root)
    elements = _elements(rows, source.row, even=counts is None)
    shape = _rows_of_all(rows, source)
    return Call("gather", elements, source, None, None, None, root, shape)


def reduce_scatter(
    at: Position, x: Any, out: Any, counts: Sequence[int] | None
) -> Call:
    """Every rank's x, reduced; each rank keeps its rows."""
    source = readable(x, "reduce_scatter")
    return _scattering("reduce_scatter", at, source, out, counts)


def scatter(
    at: Position, x: Any, out: Any, root: int, counts: Sequence[int] | None
) -> Call:
    """Each rank gets its rows of the root's x."""
    root = _root("scatter", at, root)
    if at.rank == root:
        source = readable(x, "scatter")
        return _scattering("scatter", at, source, out, counts, root)
    if out is None:
        out = _like_rows(at, x, counts)
    target, finish = target_of(out, "scatter")
    rows = _rows("scatter", at, counts, target.rows * at.n)
    if target.rows != rows[at.rank]:
        raise BadArgument(
            f"scatter: out has {target.rows} rows, counts say {rows[at.rank]}"
        )
    elements = _elements(rows, target.row, even=counts is None)
    shape = _rows_of_all(rows, target)
    return Call("scatter", elements, None, target, out, finish, root, shape)


def _like_rows(at: Position, x: Any, counts: Sequence[int] | None) -> Any:
    """An array for this rank's rows of a root's x that is as large as the x here."""
    if x is None:
        raise BadArgument(
            f"scatter on rank {at.rank}: out= is required on ranks that are not the "
            "root, an array for this rank's rows; or an x that is as large as the "
            "root's and of its type"
        )
    like = readable(x, "scatter")
    rows = _rows("scatter", at, counts, like.rows)
    return new_like(like.array, (rows[at.rank], *like.shape[1:]))


def all_to_all(
    at: Position,
    x: Any,
    out: Any,
    send: Sequence[int] | None,
    matrix: Sequence[Sequence[int]] | None,
) -> Call:
    """Rank i's j-th rows go to rank j, as its i-th. `matrix` has all ranks' counts."""
    source = readable(x, "all_to_all")
    mine = _rows("all_to_all", at, send, source.rows)
    if sum(mine) != source.rows:
        raise BadArgument(
            f"all_to_all: x has {source.rows} rows, send_counts add up to {sum(mine)}"
        )
    received = mine if matrix is None else [row[at.rank] for row in matrix]
    shape = (sum(received), *source.shape[1:])
    result = new_like(x, shape) if out is None else out
    target, finish = target_of(result, "all_to_all")
    _fits("all_to_all", target, shape, source)
    if overlap(source, target) is not None:  # rows change places: send from a copy
        copy = new_like(x, source.shape)
        copy_back(copy, source.array)
        source = buffer_of(copy, "all_to_all")
    flat = [mine] * at.n if matrix is None else matrix
    elements = tuple(count * source.row for row in flat for count in row)
    counts = elements[0] * at.n if matrix is None else elements
    whole = _rows_of_all([c for row in flat for c in row], source)
    return Call("all_to_all", counts, source, target, result, finish, 0, whole)


def barrier(nothing: Any) -> Call:
    """No element of an empty array."""
    moved = readable(nothing, "barrier")
    return Call("barrier", 0, moved, moved, None)


def _alike(
    where: str,
    agreed: Buffer,
    source: Buffer | None,
    target: Buffer | None,
    result: Any,
    finish: Callable[[Any], Any] | None,
    root: int = 0,
) -> Call:
    """A call for which all ranks have arrays of one shape, that of `agreed`."""
    shape = agreed.shape or (1,)
    return Call(where, agreed.count, source, target, result, finish, root, shape)


def _rows_of_all(rows: Sequence[int], some: Buffer) -> tuple[int, ...]:
    """The shape of all ranks' rows together, given one rank's buffer."""
    return (sum(rows), *some.shape[1:])


def _root(name: str, at: Position, root: int) -> int:
    root = whole_number("root", root)
    if not 0 <= root < at.n:
        raise BadArgument(f"{name}: root = {root}: ranks are 0..{at.n - 1}")
    return root


def target_of(array: Any, where: str) -> tuple[Buffer, Callable[[Any], Any] | None]:
    """The buffer that a result is written to, and how it gets to `array`."""
    target, is_copy = writable(array, where)
    if not is_copy:
        return target, None

    def finish(result: Any) -> Any:
        copy_back(array, target.array)
        return result

    return target, finish


def _same_shape(
    where: str, x: Any, out: Any
) -> tuple[Buffer, Buffer, Any, Callable[[Any], Any] | None]:
    """Input and output of one shape: the same array, or two that do not overlap."""
    if out is None or out is x:
        target, finish = target_of(x, where)
        return target, target, x, finish
    source = readable(x, where)
    target, finish = target_of(out, where)
    _fits(where, target, source.shape, source)
    if overlap(source, target):
        raise BadArgument(
            f"{where}: x and out overlap partly; give the same array twice, "
            "or two that do not overlap"
        )
    return source, target, out, finish


def _fits(where: str, target: Buffer, shape: tuple[int, ...], source: Buffer) -> None:
    wanted = f"{source.dtype.name}{list(shape)}"
    if target.dtype != source.dtype or target.shape != shape:
        got = f"{target.dtype.name}{list(target.shape)}"
        raise BadArgument(f"{where}: out is {got}, the result is {wanted}")


def _rows(
    where: str, at: Position, counts: Sequence[int] | None, rows: int
) -> list[int]:
    """Rows per rank: as given, or `rows` divided evenly."""
    if counts is None:
        if rows % at.n:
            raise BadArgument(
                f"{where}: {rows} rows cannot be divided evenly among {at.n} ranks; "
                "give each rank's number with counts="
            )
        return [rows // at.n] * at.n
    numbers = [whole_number("counts", c) for c in counts]
    if len(numbers) != at.n or min(numbers, default=0) < 0:
        raise BadArgument(
            f"{where}: counts = {list(counts)}: expected {at.n} numbers, none negative"
        )
    return numbers


def _elements(rows: Sequence[int], row: int, *, even: bool) -> int | tuple[int, ...]:
    return sum(rows) * row if even else tuple(r * row for r in rows)


def _own_rows(
    where: str, at: Position, x: Any, counts: Sequence[int] | None
) -> tuple[Buffer, list[int]]:
    source = readable(x, where)
    rows = _rows(where, at, counts, source.rows * at.n)
    if rows[at.rank] != source.rows:
        raise BadArgument(
            f"{where}: x has {source.rows} rows, "
            f"counts say {rows[at.rank]} for rank {at.rank}"
        )
    return source, rows


def _gathering(
    where: str,
    at: Position,
    source: Buffer,
    rows: list[int],
    out: Any,
    counts: Sequence[int] | None,
    root: int = 0,
) -> Call:
    shape = (sum(rows), *source.shape[1:])
    result = new_like(source.array, shape) if out is None else out
    target, finish = target_of(result, where)
    _fits(where, target, shape, source)
    before = sum(rows[: at.rank]) * source.row * source.dtype.itemsize
    if overlap(target, source) not in (None, before):
        raise BadArgument(
            f"{where}: x overlaps out; it may only be this rank's own rows of out"
        )
    elements = _elements(rows, source.row, even=counts is None)
    whole = _rows_of_all(rows, source)
    return Call(where, elements, source, target, result, finish, root, whole)


def _scattering(
    where: str,
    at: Position,
    source: Buffer,
    out: Any,
    counts: Sequence[int] | None,
    root: int = 0,
) -> Call:
    rows = _rows(where, at, counts, source.rows)
    if sum(rows) != source.rows:
        raise BadArgument(
            f"{where}: x has {source.rows} rows, counts add up to {sum(rows)}"
        )
    shape = (rows[at.rank], *source.shape[1:])
    result = new_like(source.array, shape) if out is None else out
    target, finish = target_of(result, where)
    _fits(where, target, shape, source)
    before = sum(rows[: at.rank]) * source.row * source.dtype.itemsize
    if overlap(source, target) not in (None, before):
        raise BadArgument(
            f"{where}: out overlaps x; it may only be this rank's own rows of x"
        )
    elements = _elements(rows, source.row, even=counts is None)
    whole = _rows_of_all(rows, source)
    return Call(where, elements, source, target, result, finish, root, whole)
