"""Which bits a sum has: rounded once, in rank order, whatever else changes."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conformance import Case, bits, check, perform
from processes import on_processes
from unisono.dtypes import numpy_dtype
from unisono.errors import BadArgument
from unisono.runtime.plan import plans
from unisono.testing import world

SMALL = ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]


def numbers(rank, count, dtype="float32"):
    """Large and small ones together, so that every order of a sum rounds otherwise."""
    random = np.random.default_rng(rank)
    wide = random.standard_normal(count) * 10.0 ** random.integers(-3, 4, count)
    if DTYPE_LIMITS.get(dtype):
        wide = np.clip(wide, -DTYPE_LIMITS[dtype], DTYPE_LIMITS[dtype])
    return wide.astype(np.float32).astype(numpy_dtype(dtype))


DTYPE_LIMITS = {"float8_e4m3fn": 40.0, "float8_e5m2": 5000.0}


def in_rank_order(n, count, dtype="float32"):
    total = numbers(0, count, dtype).astype(np.float32)
    for rank in range(1, n):
        total = total + numbers(rank, count, dtype).astype(np.float32)
    return total.astype(numpy_dtype(dtype))


def reduced(comm, sizes, dtype="float32", **how):
    return [comm.all_reduce(numbers(comm.rank, s, dtype), **how) for s in sizes]


@pytest.mark.quick(n=[3])
@pytest.mark.parametrize("dtype", SMALL)
@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_small_floats_are_rounded_once_from_the_float32_sum(worlds, n, dtype):
    sizes = [1, 100, 3000, 40_000]
    for results in worlds(n).run(reduced, sizes, dtype):
        for count, found in zip(sizes, results, strict=True):
            assert (bits(found) == bits(in_rank_order(n, count, dtype))).all()


@pytest.mark.sweep
def test_reproducible_sums_are_the_same_on_processes():
    for results in on_processes(reduced, 3, ([5, 70_000], "bfloat16")):
        for found in results:
            wanted = in_rank_order(3, found.size, "bfloat16")
            assert (bits(found) == bits(wanted)).all()


SIZES = [1, 2, 7, 64, 1000, 1025, 9000, 30_000]


@pytest.mark.quick(n=[3])
@pytest.mark.parametrize("window", [256, 1024, 5000, 1 << 18])
@pytest.mark.parametrize("n", [3, 6])
def test_reproducible_sums_do_not_depend_on_windows(n, window):
    with world(n, window=window) as w:
        for results in w.run(lambda c: reduced(c, SIZES, reproducible=True)):
            for found in results:
                assert (bits(found) == bits(in_rank_order(n, found.size))).all()


@pytest.mark.sweep
def test_reproducible_sums_do_not_depend_on_processes_and_zero_copy():
    for results in on_processes(everywhere, 3):
        for found in results:
            assert (bits(found) == bits(in_rank_order(3, found.size))).all()


def everywhere(comm):
    found = reduced(comm, SIZES, reproducible=True)
    for count in SIZES:
        exposed = comm.empty(count)
        exposed[:] = numbers(comm.rank, count)
        found.append(comm.all_reduce(exposed, reproducible=True).copy())
    return found


@settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.integers(2, 5),
    st.integers(1, 12_000),
    st.data(),
    st.sampled_from(["float32", "bfloat16"]),
)
def test_part_reduced_alone_has_the_bits_of_the_whole(worlds, n, count, data, dtype):
    start = data.draw(st.integers(0, count - 1))
    end = data.draw(st.integers(start, count))

    def both(comm):
        x = numbers(comm.rank, count, dtype)
        part = comm.all_reduce(x[start:end].copy(), reproducible=True)
        whole = comm.all_reduce(x, reproducible=True)
        return bits(part), bits(whole[start:end])

    for part, whole in worlds(n).run(both):
        assert (part == whole).all()


@pytest.mark.parametrize("op", ["sum", "mean", "prod"])
@pytest.mark.parametrize("what", ["all_reduce", "reduce", "reduce_scatter"])
def test_every_reduction_can_be_reproducible(worlds, what, op):
    record = {"reproducible": True}
    sizes = (4, 4000, 40_000)
    cases = [Case(what, None, 4, size, op=op, more=record) for size in sizes]
    check(cases, worlds(4).run(perform, cases))


def test_reproducible_calls_lower_no_programs_of_others(monkeypatch):
    """To make all ranks' programs in Python would be most of a first call of many."""
    plans._lowered.cache_clear()
    monkeypatch.setattr(plans, "lower", lambda *_, **__: pytest.fail("all are lowered"))

    def run(comm):
        with pytest.raises(BadArgument, match="reduces in another order"):
            comm.all_reduce(np.ones(9), algorithm="ring", reproducible=True)
        return comm.all_reduce(np.ones(1), algorithm="direct", reproducible=True)[0]

    with world(3) as w:
        assert w.run(run) == [3.0] * 3


@pytest.mark.parametrize("algorithm", ["ring", "tree", "recursive_doubling", "swing"])
def test_algorithms_with_other_orders_are_refused(worlds, algorithm):
    def refused(comm):
        with pytest.raises(BadArgument, match="reduces in another order"):
            comm.all_reduce(np.ones(9), algorithm=algorithm, reproducible=True)
        return comm.all_reduce(np.ones(1), algorithm=algorithm)[0]

    assert worlds(3).run(refused) == [3] * 3


@pytest.mark.parametrize("algorithm", ["ring", "tree", "recursive_doubling", "direct"])
def test_two_ranks_have_only_one_order(worlds, algorithm):
    how = {"algorithm": algorithm, "reproducible": True}
    for results in worlds(2).run(lambda c: reduced(c, SIZES, **how)):
        for found in results:
            assert (bits(found) == bits(in_rank_order(2, found.size))).all()


def test_environment_does_not_change_the_order(worlds, monkeypatch):
    monkeypatch.setenv("UNISONO_ALGORITHM", "ring")
    for results in worlds(3, 512).run(lambda c: reduced(c, SIZES, reproducible=True)):
        for found in results:
            assert (bits(found) == bits(in_rank_order(3, found.size))).all()


def test_same_bits_on_all_ranks_by_any_algorithm(worlds):
    for name in ("ring", "tree", "swing", "rabenseifner", "double_tree"):
        results = worlds(5).run(lambda c, by: reduced(c, SIZES, algorithm=by), name)
        for of_ranks in zip(*results, strict=True):
            assert len({bits(found).tobytes() for found in of_ranks}) == 1
