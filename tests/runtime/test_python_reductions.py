"""Reductions with a part in Python: users' functions, and sums of scaled shares."""

import numpy as np
import pytest

import unisono
from conformance import MEANINGFUL, bits, same
from processes import on_processes
from unisono.dtypes import DTYPES, numpy_dtype
from unisono.errors import BadArgument
from unisono.reductions import reduce
from unisono.runtime.call.reductions import scaled

NUMBERS = [d for d in DTYPES if d != "bool"]


def given(rank, count=12, dtype="float64"):
    return (np.arange(count) % 5 + rank + 1).astype(numpy_dtype(dtype))


def affine(a, b):
    """Composes x → a[0] x + a[1] for every pair: associative, but not commutative."""
    pairs = a.reshape(-1, 2), b.reshape(-1, 2)
    first, second = pairs
    out = np.stack(
        [first[:, 0] * second[:, 0], first[:, 1] * second[:, 0] + second[:, 1]], axis=1
    )
    return out.reshape(a.shape).astype(a.dtype)


def folded(n, count=12, dtype="float64"):
    total = given(0, count, dtype)
    for rank in range(1, n):
        total = affine(total, given(rank, count, dtype))
    return total


def by_function(comm):
    """Every collective and every way to give the result."""
    n = comm.world_size
    root, total = n - 1, folded(n)
    x = given(comm.rank)
    assert comm.all_reduce(x, op=affine) is x
    assert (x == total).all()
    x, out = given(comm.rank), np.zeros(12)
    assert comm.all_reduce(x, op=affine, out=out) is out
    assert (out == total).all()
    assert (x == given(comm.rank)).all()
    strided = np.repeat(given(comm.rank), 2)[::2]
    assert (comm.all_reduce(strided, op=affine, async_op=True).wait() == total).all()
    assert (strided == total).all()
    x = given(comm.rank)
    found = comm.reduce(x, op=affine, root=root)
    if comm.rank == root:
        assert found is x
        assert (x == total).all()
    else:
        assert found is None
        assert (x == given(comm.rank)).all()
    mine = given(comm.rank, 12 * n)
    share = comm.reduce_scatter(mine, op=affine)
    assert (share == folded(n, 12 * n)[12 * comm.rank :][:12]).all()
    counts = [2 * r for r in range(n)]
    mine = given(comm.rank, sum(counts))
    share = comm.reduce_scatter(mine, op=affine, counts=counts)
    start = sum(counts[: comm.rank])
    assert (share == folded(n, sum(counts))[start : start + 2 * comm.rank]).all()
    nothing = comm.all_reduce(np.zeros((0, 3)), op=affine_of_nothing)
    assert nothing.shape == (0, 3)


def affine_of_nothing(a, b):
    return a


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_functions_are_folded_in_rank_order(worlds, n):
    worlds(n).run(by_function)


def test_python_reductions_are_the_same_on_processes():
    on_processes(by_function, 3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_functions_of_every_type(worlds, dtype):
    def larger(a, b):
        return np.where(a.astype(np.complex64) == 0, b, a)

    def reduced(comm):
        x = given(comm.rank, 7, dtype)
        return comm.all_reduce(x, op=larger)

    for found in worlds(3).run(reduced):
        assert same(found, given(0, 7, dtype))


ALGORITHMS = [
    *(("all_reduce", name) for name in ("ring", "tree", "naive", "ring+direct")),
    *(("reduce", name) for name in ("tree", "chain")),
    *(("reduce_scatter", name) for name in ("direct", "halving_doubling")),
]


@pytest.mark.parametrize(("what", "algorithm"), ALGORITHMS)
def test_any_algorithm_of_the_collective_may_be_named(worlds, what, algorithm):
    """Though functions are always folded in rank order."""

    def reduced(comm):
        x = given(comm.rank)
        with pytest.raises(BadArgument, match="unknown algorithm"):
            getattr(comm, what)(x, op=affine, algorithm="rong")
        return getattr(comm, what)(x, op=affine, algorithm=algorithm)

    for rank, found in enumerate(worlds(3).run(reduced)):
        if what == "reduce_scatter":
            assert (found == folded(3)[4 * rank :][:4]).all()
        elif what == "all_reduce" or rank == 0:
            assert (found == folded(3)).all()


def test_exception_of_a_function_is_raised(worlds):
    def fails(a, b):
        raise ZeroDivisionError("no")

    def reduced(comm):
        with pytest.raises(ZeroDivisionError, match="no"):
            comm.all_reduce(given(comm.rank), op=fails)
        with pytest.raises(BadArgument, match="returned None"):
            comm.all_reduce(given(comm.rank), op=lambda a, b: None)
        with pytest.raises(BadArgument, match="returned float64"):
            comm.all_reduce(given(comm.rank), op=lambda a, b: a[:2])
        return comm.all_reduce(np.ones(1))[0]

    assert worlds(3).run(reduced) == [3, 3, 3]


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("algorithm", [None, "ring", "recursive_doubling"])
def test_scaled_sums_of_every_type(worlds, dtype, algorithm):
    """With factors of their own on every rank, and in place or not."""
    n = 3
    parts = [scaled(given(r, 40, dtype), r + 2) for r in range(n)]
    how = {} if algorithm is None else {"algorithm": algorithm}

    def reduced(comm):
        op = unisono.premul_sum(comm.rank + 2)
        x, out = given(comm.rank, 40, dtype), np.zeros(40, numpy_dtype(dtype))
        comm.all_reduce(x, op=op, out=out, **how)
        assert (bits(x) == bits(given(comm.rank, 40, dtype))).all()
        assert comm.all_reduce(x, op=op, **how) is x
        assert (bits(x) == bits(out)).all()
        return x

    plain = worlds(n).run(lambda c: c.all_reduce(parts[c.rank].copy(), **how))
    for found, wanted in zip(worlds(n).run(reduced), plain, strict=True):
        assert same(found, wanted)


def test_scaled_sums_in_reduce_and_reduce_scatter(worlds):
    def reduced(comm):
        x = np.full(6, comm.rank + 1.0)
        at_root = comm.reduce(x.copy(), op=unisono.premul_sum(2), root=1)
        share = comm.reduce_scatter(x, op=unisono.premul_sum(0.5), counts=[1, 2, 3])
        later = comm.all_reduce(x, op=unisono.premul_sum(-1), async_op=True).wait()
        return None if at_root is None else at_root.tolist(), share.tolist(), later[0]

    found = worlds(3).run(reduced)
    assert [f[0] for f in found] == [None, [12.0] * 6, None]
    assert [f[1] for f in found] == [[3.0], [3.0] * 2, [3.0] * 3]
    assert [f[2] for f in found] == [-6.0] * 3


def test_every_reduction_is_tested():
    """The tables that conformance goes through hold what `reduce` can do."""
    for dtype, op in MEANINGFUL:
        x = given(0, 3, dtype)
        assert reduce(np.empty_like(x), [x, x], op).dtype == x.dtype
    assert len(MEANINGFUL) > 100
