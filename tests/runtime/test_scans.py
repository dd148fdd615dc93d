"""Prefix reductions, held to NumPy's."""

import numpy as np
import pytest

from unisono import BadArgument, CollectiveMismatch, ReduceOp
from unisono.reductions import reduce
from unisono.testing import world

OPS = ("sum", "prod", "min", "max", "band", "bor", "bxor")


def contribution(rank, count, dtype):
    values = np.random.default_rng([rank, count]).integers(0, 5, count)
    return values.astype(dtype)


def prefix(op, parts, like):
    out = np.empty_like(like)
    return reduce(out, parts, op) if parts else None


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("count", [0, 1, 2, 13, 100])
@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_scan_and_exscan_reduce_in_rank_order(n, count, op):
    def rank(comm):
        x = contribution(comm.rank, count, np.int32)
        return comm.scan(x.copy(), op=op), comm.exscan(x, op=op)

    parts = [contribution(r, count, np.int32) for r in range(n)]
    for r, (upto, before) in enumerate(world(n).run(rank)):
        assert (upto == prefix(op, parts[: r + 1], parts[0])).all()
        if r:
            assert (before == prefix(op, parts[:r], parts[0])).all()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_scan_has_the_bits_of_one_reduction_over_the_prefix(dtype):
    parts = [np.random.default_rng(r).normal(size=100).astype(dtype) for r in range(5)]
    found = world(5).run(lambda comm: comm.scan(parts[comm.rank].copy()))
    for r, prefix_sum in enumerate(found):
        wanted = prefix("sum", parts[: r + 1], parts[0])
        assert prefix_sum.tobytes() == wanted.tobytes()


IDENTITIES = {
    ("sum", "float32"): 0,
    ("prod", "float64"): 1,
    ("min", "float32"): np.inf,
    ("max", "float16"): -np.inf,
    ("min", "int8"): 127,
    ("max", "uint8"): 0,
    ("band", "int16"): -1,
    ("bor", "int64"): 0,
    ("min", "bool"): True,
    ("max", "bool"): False,
    ("band", "bool"): True,
}


@pytest.mark.parametrize(("op", "dtype"), IDENTITIES)
def test_exscan_gives_rank_0_the_identity(op, dtype):
    def rank(comm):
        return comm.exscan(np.ones(3, dtype), op=op)

    first, second = world(2).run(rank)
    assert first.dtype == np.dtype(dtype)
    assert (first == IDENTITIES[op, dtype]).all()
    assert (second == np.ones(3, dtype)).all()


def test_scan_writes_to_out_and_runs_async():
    def rank(comm):
        x = np.full((2, 3), comm.rank + 1.0)
        out = np.empty_like(x)
        work = comm.scan(x, out=out, async_op=True, label="mine")
        assert work.wait() is out
        assert work.is_completed()
        assert (x == comm.rank + 1.0).all()
        return out[1, 2]

    assert world(4).run(rank) == [1.0, 3.0, 6.0, 10.0]


def test_scan_adds_bfloat16_in_float32_and_rounds_once():
    ml_dtypes = pytest.importorskip("ml_dtypes")

    def rank(comm):
        x = np.full(1, [256.0, 1.0, 1.0][comm.rank], ml_dtypes.bfloat16)
        return float(comm.scan(x)[0])

    assert world(3).run(rank) == [256.0, 256.0, 258.0]  # 257 is none, 258 is


@pytest.mark.parametrize("op", ["mean", "avg", np.add])
def test_scan_refuses_other_reductions(op):
    def rank(comm):
        with pytest.raises(BadArgument, match="expected sum, prod"):
            comm.scan(np.ones(3), op=op)
        with pytest.raises(BadArgument, match="codec= has no meaning"):
            comm.exscan(np.ones(3), codec="fp8")

    world(2).run(rank)


def test_scan_and_exscan_do_not_match():
    def rank(comm):
        call = comm.scan if comm.rank else comm.exscan
        with pytest.raises(CollectiveMismatch, match="exscan sum"):
            call(np.ones(3), timeout_s=30)

    world(2).run(rank)


def test_scan_takes_constants():
    assert world(2).run(lambda c: c.scan(np.ones(1), op=ReduceOp.MAX)[0]) == [1, 1]
