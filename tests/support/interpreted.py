"""Cases of collectives on the interpreter for devices, run by threads of the CPU."""

import numpy as np

from conformance import REDUCING, Case, expected, numpy_dtype, prepare
from unisono import _native
from unisono.algorithms import read
from unisono.dtypes import DTYPES
from unisono.runtime.call.reductions import as_reduction
from unisono.runtime.plan.device_plans import device_plan
from unisono.runtime.plan.plans import CallKind
from unisono.runtime.plan.select import choose

MODES = range(4)
"""What all ranks expose."""
PACKETS = 4
"""Nothing is exposed: data travel as packets."""


def plans(case: Case, window: int) -> list[_native.Plan]:
    """What the ranks run; all make the same choice."""
    name = case.algorithm
    if name is None:
        total = case.counts if isinstance(case.counts, int) else sum(case.counts)
        nbytes = total * DTYPES[case.dtype].itemsize
        name = choose(
            case.what, nbytes, case.n, named=None, reproducible=False
        ).algorithm
    kind = CallKind(
        case.what,
        DTYPES[case.dtype],
        as_reduction(case.op if case.what in REDUCING else "sum"),
        case.root,
        case.counts,
        read(name),
    )
    return [device_plan(kind, case.n, r, window=window) for r in range(case.n)]


class InterpretedWorld:
    """Ranks whose programs the interpreter runs, each with its own threads."""

    def __init__(self, n: int, window: int = 4096) -> None:
        self.n = n
        self.window = window
        self.native = _native.InterpretedWorld(n, window)

    def fits_packets(self, case, blocks):
        """Whether so many blocks can send the data of a call as packets."""
        return all(
            self.native.fits_packets(plan, blocks) for plan in plans(case, self.window)
        )

    def run(self, case, mode, *, blocks=2, threads=2, offset=0, timeout_s=60.0):
        """The results of all ranks; `offset` elements are skipped in all buffers."""
        buffers = [buffers_of(case, r, offset) for r in range(case.n)]
        calls = [
            (plan, x.ctypes.data, out.ctypes.data, mode)
            for plan, (x, out) in zip(plans(case, self.window), buffers, strict=True)
        ]
        reported = self.native.run(calls, blocks, threads, int(timeout_s * 1e9))
        assert all(why == 0 for why, *_ in reported), (case, mode, reported)
        return [
            (out if case.has_result(r) and case.what != "barrier" else None, True)
            for r, (_, out) in enumerate(buffers)
        ]


def buffers_of(case: Case, rank: int, offset: int = 0):
    """Input and output of a rank, in the style of the case."""
    dtype = numpy_dtype(case.dtype)
    given = case.given(rank)
    after = case.size(rank, after=True) if case.has_result(rank) else 0
    before = 0 if given is None else given.size

    def make(count: int) -> np.ndarray:
        return np.zeros(count + offset, dtype)[offset:]

    if case.style == "in place" and case.what in ("all_reduce", "broadcast", "reduce"):
        whole = make(max(before, after, case.size(rank, after=True)))
        if given is not None:
            whole[:before] = given
        return whole, whole
    x = make(before)
    if given is not None:
        x[:] = given
    return x, make(after)


def with_block_that_gives_up(mode: int) -> tuple[np.ndarray, np.ndarray]:
    """What rank 0 has when the second of two blocks waited in vain; what it should be.

    An all_reduce of 256 values: tiles of 64 belong to the blocks in turn.
    """
    world = InterpretedWorld(2, 1 << 16)
    case = Case("all_reduce", "direct", 2, 256)
    prepare([case])
    world.native.set_generation_of_block(0, 1, 5)
    buffers = [buffers_of(case, r) for r in range(2)]
    calls = [
        (plan, x.ctypes.data, out.ctypes.data, mode)
        for plan, (x, out) in zip(plans(case, 1 << 16), buffers, strict=True)
    ]
    reported = world.native.run(calls, 2, 2, int(0.3e9))
    assert reported[0][0] != 0, reported
    wanted = expected(case)[0]
    assert wanted is not None
    return buffers[0][1].reshape(4, 64), wanted.reshape(4, 64)
