"""What an engine for CUDA arrays must do: every call, compared with the right result.

    python -m unisono.testing.engines -n 2          NCCL, on two GPUs of this host
    python -m unisono.testing.engines --engine unisono

All collectives with even and uneven counts, in place and not, every element type and
reduction, on given streams and beside them. Numbers are small and whole, so that every
order of a sum has the same result; means are compared to the precision of their type.
Every call is made by the engine, and some also by unisono's own kernel.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono import _native, reductions
from unisono.devices.arrays import DeviceArray
from unisono.dtypes import DTYPES, OPS, check_op, numpy_dtype
from unisono.errors import BadArgument, UnisonoError
from unisono.launch.spawn import spawn
from unisono.runtime.communicator import Communicator
from unisono.schedule.collective import REDUCING, ROOTED

COPYING = ("broadcast", "all_gather", "gather", "scatter", "all_to_all")
WHOLE = ("all_reduce", "reduce", "broadcast")
SIZES = (1, 1000, 70_000)
WAYS = ("plain", "stream", "async")
_MEAN = {"float16": 1e-2, "bfloat16": 1e-1, "float32": 1e-5, "complex64": 1e-5}
_LIMIT_S = 120
Array = NDArray[Any]


@dataclass(frozen=True)
class EngineCase:
    """One call; `counts` are the elements of each rank, or of each pair of ranks."""

    what: str
    counts: tuple[int, ...]
    dtype: str = "float32"
    op: str = "sum"
    root: int = 0
    in_place: bool = False
    way: str = "plain"
    even: bool = False

    def given(self, rank: int, n: int) -> Array:
        """What a rank has before."""
        count = sum(self.counts)
        if self.what in ("all_gather", "gather"):
            count = self.counts[rank]
        elif self.what == "all_to_all":
            count = sum(self.counts[rank * n : rank * n + n])
        random = np.random.default_rng([rank, count])
        numbers = random.integers(0, 4, count)
        return numbers.astype(numpy_dtype(self.dtype))

    def expected(self, rank: int, n: int) -> Array | None:
        """What it has after; None if it gets nothing."""
        if self.what in ("reduce", "gather") and rank != self.root:
            return None
        given = [self.given(r, n) for r in range(n)]
        begin = np.cumsum([0, *self.counts])
        mine = slice(begin[rank], begin[rank + 1]) if len(begin) > rank + 1 else None
        if self.what in REDUCING:
            total = reductions.reduce(np.empty_like(given[0]), given, self.op)
            return total[mine] if self.what == "reduce_scatter" else total
        if self.what == "broadcast":
            return given[self.root]
        if self.what == "scatter":
            return given[self.root][mine]
        if self.what in ("all_gather", "gather"):
            return np.concatenate(given)
        parts = []
        for r in range(n):
            row = np.cumsum([0, *self.counts[r * n : r * n + n]])
            parts.append(given[r][row[rank] : row[rank + 1]])
        return np.concatenate(parts)

    def is_right(self, found: Array | None, wanted: Array | None) -> bool:
        """Whether a result is right; None is no result."""
        if found is None or wanted is None:
            return found is wanted
        if self.op != "mean" or self.what not in REDUCING:
            return found.tobytes() == wanted.tobytes()
        within = _MEAN.get(self.dtype, 1e-12)
        one, two = (x.astype(np.complex128) for x in (found, wanted))
        return bool(np.allclose(one, two, rtol=within, atol=within))


def cases(n: int) -> Iterator[EngineCase]:
    """All calls for n ranks."""
    for size in SIZES:
        for what in (*REDUCING, *COPYING):
            for root in {0, n - 1} if what in ROOTED else {0}:
                yield from _of_size(what, size, root, n)
    yield from _of_types(n)


def _of_size(what: str, size: int, root: int, n: int) -> Iterator[EngineCase]:
    pairs = n * n if what == "all_to_all" else n
    even = (size,) * (1 if what in WHOLE else pairs)
    for way in WAYS:
        yield EngineCase(what, even, root=root, way=way, even=True)
    if what != "all_to_all":
        yield EngineCase(what, even, root=root, in_place=True, even=True)
    if what not in WHOLE:
        uneven = tuple(i * size % 1013 for i in range(pairs))
        yield EngineCase(what, uneven, root=root)


def _of_types(n: int) -> Iterator[EngineCase]:
    for dtype, kind in DTYPES.items():
        for what in COPYING:
            pairs = n * n if what == "all_to_all" else n
            counts = (33,) * (1 if what in WHOLE else pairs)
            yield EngineCase(what, counts, dtype, even=True)
        for op in OPS:
            try:
                check_op(kind, op)
            except BadArgument:  # it has no meaning
                continue
            yield EngineCase("all_reduce", (33,), dtype, op)
            yield EngineCase("reduce_scatter", (33,) * n, dtype, op, even=True)


def check_engine(
    comm: Communicator,
    engine: str,
    ordinal: int,
    chosen: Sequence[EngineCase] | None = None,
) -> list[str]:
    """Make the calls on this rank's device, and say which went wrong.

    All ranks call it; `chosen` are the cases, the same on all, all if not given.
    """
    trial, own = comm.duplicate(), comm.duplicate()
    trial.engine, own.engine = engine, "unisono"
    wrong: list[str] = []
    for case in cases(comm.world_size) if chosen is None else chosen:
        wanted = case.expected(comm.rank, comm.world_size)
        for by in [trial, own] if _is_compared(case) else [trial]:
            try:
                found = _performed(by, case, ordinal)
            except UnisonoError as error:
                return [*wrong, f"rank {comm.rank}: {by.engine}: {case}: {error}"]
            if not case.is_right(found, wanted):
                wrong.append(f"rank {comm.rank}: {by.engine}: {case}: a wrong result")
    wrong += _check_order(trial, ordinal)
    trial.close()
    own.close()
    return wrong


def _is_compared(case: EngineCase) -> bool:
    """Whether the kernel makes the call, too: to compile it takes seconds a type."""
    return (case.dtype, case.op) in (("float32", "sum"), ("float32", "max"))


def _performed(comm: Communicator, case: EngineCase, ordinal: int) -> Array | None:
    """Make the call; its result on the host."""
    stream = _native.CudaStream(ordinal)
    x, out = _arrays(comm, case, ordinal)
    how: dict[str, Any] = {"timeout_s": _LIMIT_S, "stream": stream}
    if case.way == "async":
        how["async_op"] = True
    if case.what in ROOTED:
        how["root"] = case.root
    if case.what in REDUCING:
        how["op"] = case.op
    if not case.even and case.what == "all_to_all":
        n = comm.world_size
        how["send_counts"] = case.counts[comm.rank * n : comm.rank * n + n]
    elif not case.even and case.what not in WHOLE:
        how["counts"] = case.counts
    result = getattr(comm, case.what)(x, out=out, **how)
    if case.way == "async":
        work = result
        result = work.wait()
        work.synchronize(_LIMIT_S)
    comm.synchronize(_LIMIT_S)
    return None if result is None else np.asarray(result.numpy())


def _arrays(
    comm: Communicator, case: EngineCase, ordinal: int
) -> tuple[DeviceArray | None, DeviceArray | None]:
    """Input and output; in place they share memory."""
    rank, n = comm.rank, comm.world_size
    given = case.given(rank, n)
    has_input = rank == case.root or case.what not in ("broadcast", "scatter")
    has_output = rank == case.root or case.what not in ("reduce", "gather")
    size = len(given)
    if case.what in ("all_gather", "gather"):
        size = sum(case.counts)
    elif case.what in ("scatter", "reduce_scatter"):
        size = case.counts[rank]
    elif case.what == "all_to_all":
        size = sum(case.counts[r * n + rank] for r in range(n))
    if not has_input:
        given = np.zeros_like(given)
    if case.in_place:
        return _in_place(case, rank, ordinal, given, has_output=has_output)
    x = _on_device(given, ordinal) if has_input or case.what == "broadcast" else None
    empty = np.zeros(size, given.dtype)
    return x, _on_device(empty, ordinal) if has_output else None


def _in_place(
    case: EngineCase, rank: int, ordinal: int, given: Array, *, has_output: bool
) -> tuple[DeviceArray | None, DeviceArray | None]:
    if case.what in WHOLE:
        return _on_device(given, ordinal), None
    begin = sum(case.counts[:rank])
    mine = slice(begin, begin + case.counts[rank])
    if case.what in ("all_gather", "gather"):
        if not has_output:
            return _on_device(given, ordinal), None
        whole = np.zeros(sum(case.counts), given.dtype)
        whole[mine] = given
        out = _on_device(whole, ordinal)
        return out[mine], out
    x = _on_device(given, ordinal)
    if case.what == "scatter" and rank != case.root:
        return None, x[mine]
    return x, x[mine]


def _on_device(x: Array, ordinal: int) -> DeviceArray:
    made = DeviceArray(x.shape, x.dtype.name, ordinal)
    made.copy_from(x)
    return made


def _check_order(comm: Communicator, ordinal: int) -> list[str]:
    """Calls on several streams run in the order in which they are made."""
    streams = [_native.CudaStream(ordinal) for _ in range(3)]
    x = _on_device(np.ones(5000, np.float64), ordinal)
    for i in range(9):
        comm.all_reduce(x, stream=streams[i % 3], timeout_s=_LIMIT_S)
    comm.synchronize(_LIMIT_S)
    wanted = float(comm.world_size) ** 9
    if (x.numpy() == wanted).all():
        return []
    return [f"rank {comm.rank}: calls on several streams: a wrong result"]


def _rank(comm: Communicator, engine: str) -> list[str]:
    ordinal = comm.rank % _native.cuda_device_count()
    return check_engine(comm, engine, ordinal)


def main(words: Sequence[str] | None = None) -> int:
    """Check an engine on the GPUs of this host; 1 if anything went wrong."""
    parser = argparse.ArgumentParser(prog="python -m unisono.testing.engines")
    parser.add_argument("-n", type=int, default=0, help="ranks; one for each GPU")
    parser.add_argument("--engine", choices=("nccl", "unisono"), default="nccl")
    given = parser.parse_args(words)
    gpus = _native.cuda_device_count()
    n = given.n or max(1, gpus)
    begun = time.monotonic()
    wrong = [text for texts in spawn(_rank, n, args=(given.engine,)) for text in texts]
    number = sum(1 for _ in cases(n))
    for text in wrong:
        sys.stdout.write(f"{text}\n")
    sys.stdout.write(
        f"{given.engine} on {n} ranks and {gpus} GPUs: {number} calls, "
        f"{len(wrong)} wrong, {time.monotonic() - begun:.1f} s\n"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
