"""A call of a communicator as calls of NCCL: which functions, with which arguments.

Collectives that only copy are of bytes, so they serve every element type. A complex
number is two floats, which is right for sums; of truth values, which are bytes 0 and 1,
"or" is the maximum and "and" is the minimum.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

from unisono.devices.nccl import AVG, MAX, MIN, PROD, SUM, TYPES
from unisono.dtypes import DType
from unisono.runtime.call.arguments import Call
from unisono.runtime.call.options import CallOptions
from unisono.schedule.collective import REDUCING

_OPS = {"sum": SUM, "prod": PROD, "max": MAX, "min": MIN, "mean": AVG}
_OF_BOOL = {
    **dict.fromkeys(("sum", "max", "bor"), MAX),
    **dict.fromkeys(("prod", "min", "band"), MIN),
}
_PARTS = {"complex64": "float32", "complex128": "float64"}


class Function(NamedTuple):
    """A function of NCCL's, and its arguments but the communicator and the stream."""

    name: str
    arguments: tuple[int, ...]


class Elements(NamedTuple):
    """What NCCL is told of the elements: its type, its operation, how many for one."""

    type: int
    op: int
    times: int


def lacks(collective: str, dtype: DType, op: str, how: CallOptions) -> str:
    """Why NCCL cannot carry out a call; "" if it can."""
    if how.algorithm is not None:
        return f"algorithm={how.algorithm!r} is one of unisono's"
    if collective not in REDUCING:
        return ""
    if how.reproducible:
        return "reproducible=True: the order of NCCL's sums is not known"
    if _elements(collective, dtype, op) is not None:
        return ""
    return f"NCCL has no {op} of {dtype.name}"


def functions(call: Call, op: str, rank: int, n: int) -> list[Function]:
    """The functions of a call, which are one group; none if it moves nothing."""
    found = _elements(call.collective, call.dtype, op)
    assert found is not None
    if call.total == 0:
        return []
    return _MAKERS[call.collective](_Place(call, found, rank, n))


def _elements(collective: str, dtype: DType, op: str) -> Elements | None:
    if collective not in REDUCING:
        return Elements(TYPES["uint8"], SUM, dtype.itemsize)
    if dtype.kind == "b":
        number = _OF_BOOL.get(op)
        return None if number is None else Elements(TYPES["uint8"], number, 1)
    if dtype.kind in "iu" and op == "mean":
        return None  # which way it is rounded is not said
    if dtype.kind == "c" and op not in ("sum", "mean"):
        return None
    kind = TYPES.get(_PARTS.get(dtype.name, dtype.name))
    number = _OPS.get(op)
    if kind is None or number is None:
        return None
    return Elements(kind, number, 2 if dtype.kind == "c" else 1)


class _Place:
    """A call on one rank: addresses and numbers of NCCL's elements."""

    def __init__(self, call: Call, found: Elements, rank: int, n: int) -> None:
        self.rank, self.n, self.root = rank, n, call.root
        self.type, self.op = found.type, found.op
        self.input, self.output = call.addresses
        counts = call.counts
        self.total = call.total * found.times
        each = [counts // n] * n if isinstance(counts, int) else list(counts)
        self.counts = [count * found.times for count in each]
        self.is_even = len(set(each)) == 1
        self.has_pairs = call.collective == "all_to_all" and not isinstance(counts, int)
        self._bytes = call.dtype.itemsize // found.times

    def after(self, address: int, elements: int) -> int:
        """The address so many elements behind another."""
        return address + elements * self._bytes

    def send(self, address: int, count: int, to: int) -> Function:
        return Function("ncclSend", (address, count, self.type, to))

    def receive(self, address: int, count: int, source: int) -> Function:
        return Function("ncclRecv", (address, count, self.type, source))

    def starts(self) -> list[tuple[int, int, int]]:
        """Ranks, the begin of their elements, and how many; of those that have any."""
        begins = accumulate(self.counts, initial=0)
        return [
            (r, begin, count)
            for r, (begin, count) in enumerate(zip(begins, self.counts, strict=False))
            if count
        ]


def _all_reduce(at: _Place) -> list[Function]:
    arguments = at.input, at.output, at.total, at.type, at.op
    return [Function("ncclAllReduce", arguments)]


def _reduce(at: _Place) -> list[Function]:
    arguments = at.input, at.output, at.total, at.type, at.op, at.root
    return [Function("ncclReduce", arguments)]


def _broadcast(at: _Place) -> list[Function]:
    arguments = at.input or at.output, at.output, at.total, at.type, at.root
    return [Function("ncclBroadcast", arguments)]


def _all_gather(at: _Place) -> list[Function]:
    if at.is_even:
        arguments = at.input, at.output, at.counts[0], at.type
        return [Function("ncclAllGather", arguments)]
    made = []
    for r, begin, count in at.starts():
        to = at.after(at.output, begin)
        source = at.input if r == at.rank else to
        made.append(Function("ncclBroadcast", (source, to, count, at.type, r)))
    return made


def _reduce_scatter(at: _Place) -> list[Function]:
    if at.is_even:
        arguments = at.input, at.output, at.counts[0], at.type, at.op
        return [Function("ncclReduceScatter", arguments)]
    made = []
    for r, begin, count in at.starts():
        source = at.after(at.input, begin)
        to = at.output if r == at.rank else 0
        made.append(Function("ncclReduce", (source, to, count, at.type, at.op, r)))
    return made


def _gather(at: _Place) -> list[Function]:
    made = []
    own = at.counts[at.rank]
    places = {r: at.after(at.output, begin) for r, begin, _ in at.starts()}
    in_place = at.rank == at.root and places.get(at.rank) == at.input
    if own and not in_place:
        made.append(at.send(at.input, own, at.root))
    if at.rank == at.root:
        made += [
            at.receive(places[r], count, r)
            for r, _, count in at.starts()
            if not (in_place and r == at.rank)
        ]
    return made


def _scatter(at: _Place) -> list[Function]:
    made = []
    own = at.counts[at.rank]
    places = {r: at.after(at.input, begin) for r, begin, _ in at.starts()}
    in_place = at.rank == at.root and places.get(at.rank) == at.output
    if at.rank == at.root:
        made += [
            at.send(places[r], count, r)
            for r, _, count in at.starts()
            if not (in_place and r == at.rank)
        ]
    if own and not in_place:
        made.append(at.receive(at.output, own, at.root))
    return made


def _all_to_all(at: _Place) -> list[Function]:
    n, me = at.n, at.rank
    rows = _rows(at.counts, n) if at.has_pairs else [at.counts] * n
    sent, received = rows[me], [row[me] for row in rows]
    sends = zip(range(n), accumulate(sent, initial=0), sent, strict=False)
    receives = zip(range(n), accumulate(received, initial=0), received, strict=False)
    return [
        *(at.send(at.after(at.input, b), c, r) for r, b, c in sends if c),
        *(at.receive(at.after(at.output, b), c, r) for r, b, c in receives if c),
    ]


def _rows(flat: list[int], n: int) -> list[list[int]]:
    return [flat[i * n : (i + 1) * n] for i in range(n)]


_MAKERS = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
}
