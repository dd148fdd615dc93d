"""Reductions by name, by factor and by function."""

import functools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from unisono.dtypes import DTYPES, OPS, REDUCTIONS, check_op, numpy_dtype
from unisono.errors import BadArgument
from unisono.runtime.call.reductions import (
    Reduction,
    as_reduction,
    fold,
    premul_sum,
    scaled,
)

SMALL = ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]


def combine(a, b):
    return a - b


@pytest.mark.parametrize("op", OPS)
def test_named_reduction_has_name_and_code(op):
    reduction = as_reduction(op)
    assert reduction.name == op
    code, is_mean = reduction.native
    assert code == REDUCTIONS["sum" if op == "mean" else op]
    assert is_mean == (op == "mean")


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", DTYPES)
def test_named_reduction_is_checked_against_the_type(op, name):
    def outcome(check):
        try:
            check()
        except BadArgument as error:
            return str(error)

    dtype = DTYPES[name]
    ours = outcome(lambda: as_reduction(op).check(dtype))
    assert ours == outcome(lambda: check_op(dtype, op))


@pytest.mark.parametrize(
    ("factor", "shown"),
    [
        (0.5, "premul_sum(0.5)"),
        (3, "premul_sum(3)"),
        (1j, "premul_sum(1j)"),
        (np.float64(0.25), "premul_sum(0.25)"),
        (np.float32(0.25), "premul_sum(0.25)"),
        (np.int16(7), "premul_sum(7)"),
        (np.complex64(2j), "premul_sum(2j)"),
        (np.array([[2.5]]), "premul_sum(2.5)"),
        (np.array(4), "premul_sum(4)"),
    ],
)
def test_factor_is_a_number_or_one_element(factor, shown):
    reduction = premul_sum(factor)
    assert reduction.name == shown
    assert type(reduction.factor) in (int, float, complex)
    assert as_reduction(reduction) is reduction
    assert reduction.native == (REDUCTIONS["sum"], False)
    assert reduction == premul_sum(factor)
    hash(reduction)


def test_factor_may_be_a_small_float_or_a_tensor():
    torch = pytest.importorskip("torch")
    assert premul_sum(numpy_dtype("bfloat16").type(0.5)).factor == 0.5
    assert premul_sum(torch.tensor([0.125])).factor == 0.125
    with pytest.raises(BadArgument, match=r"a Tensor.*one element"):
        premul_sum(torch.ones(2))


@pytest.mark.parametrize("factor", [True, "2", None, [2], np.ones(2), np.array(True)])
def test_other_factors_are_refused(factor):
    with pytest.raises(BadArgument, match=r"premul_sum\(.*expected a number"):
        premul_sum(factor)


@pytest.mark.parametrize(
    ("factor", "name", "message"),
    [
        (0.5, "int32", r"premul_sum\(0.5\): int32 needs an integer"),
        (float("inf"), "uint8", "integer"),
        (float("nan"), "uint8", "integer"),
        (1j, "float32", "complex factor needs complex"),
        (1j, "int8", "complex"),
        (2, "bool", "not defined for bool"),
        (10**400, "float64", "the factor overflows float64"),
    ],
)
def test_factor_of_an_unsuitable_type_is_refused(factor, name, message):
    with pytest.raises(BadArgument, match=message):
        premul_sum(factor).check(DTYPES[name])
    with pytest.raises(BadArgument, match=message):
        scaled(np.ones(2, name), factor)


@pytest.mark.parametrize(
    ("factor", "name"),
    [(2.0, "int8"), (-3, "uint64"), (0.5, "bfloat16"), (2, "float16")],
)
def test_factor_of_a_suitable_type_is_accepted(factor, name):
    premul_sum(factor).check(DTYPES[name])
    premul_sum(1 + 1j).check(DTYPES["complex64"])


@pytest.mark.parametrize(
    ("op", "message"),
    [
        ("summ", "unknown reduction 'summ'; nearest: sum"),
        ("sums", "nearest:"),
        (3, "op: got a int, expected one of sum, prod"),
        (None, "premul_sum"),
        ("premul_sum", "a factor is needed"),
        (premul_sum, "a factor is needed"),
        (sum, "op='sum'"),
        (max, "op='max'"),
    ],
)
def test_invalid_op_is_refused(op, message):
    with pytest.raises(BadArgument, match=message):
        as_reduction(op)


def test_array_as_op_is_refused():
    with pytest.raises(BadArgument, match="expected one of"):
        as_reduction(np.ones(3))


class Callable:
    def __call__(self, a, b):
        return a


@pytest.mark.parametrize(
    ("op", "shown"),
    [
        (combine, "function combine"),
        (np.logaddexp, "function logaddexp"),
        (lambda a, b: a, "function <lambda>"),
        (functools.partial(combine), "function partial"),
        (Callable(), "function Callable"),
    ],
)
def test_any_function_is_a_reduction_for_any_type(op, shown):
    reduction = as_reduction(op)
    assert reduction == Reduction("function", function=op)
    assert reduction.name == shown
    for dtype in DTYPES.values():
        reduction.check(dtype)
    with pytest.raises(BadArgument, match="runs in Python"):
        _ = reduction.native


@given(
    st.lists(
        hnp.arrays(np.int64, (3,), elements=st.integers(-9, 9)), min_size=1, max_size=6
    )
)
def test_fold_goes_from_the_left(parts):
    kept = [p.copy() for p in parts]
    total = fold(lambda a, b: 2 * a - b, parts)
    assert (total == functools.reduce(lambda a, b: 2 * a - b, kept)).all()
    assert all((p == k).all() for p, k in zip(parts, kept, strict=True))
    assert not any(np.may_share_memory(total, p) for p in parts)


def in_place(a, b):
    a += b
    b[...] = 0
    return a


def the_second(a, b):
    return b


SHARED = np.zeros(4)


def into_a_buffer_of_its_own(a, b):
    SHARED[...] = 0
    SHARED[...] += a
    SHARED[...] += b
    return SHARED


@pytest.mark.parametrize(
    ("function", "expected"),
    [(in_place, 6), (the_second, 3), (into_a_buffer_of_its_own, 6)],
)
def test_function_may_modify_its_arguments(function, expected):
    parts = [np.full(4, float(i)) for i in (1, 2, 3)]
    for p in parts:
        p.flags.writeable = False
    total = fold(function, parts)
    assert (total == expected).all()
    assert [p[0] for p in parts] == [1, 2, 3]
    assert total is not SHARED
    assert total.flags.writeable


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_fold_keeps_type_and_shape(name, shape):
    x = np.ones(shape, numpy_dtype(name))
    total = fold(np.maximum if DTYPES[name].kind != "c" else np.add, [x, x])
    assert isinstance(total, np.ndarray)
    assert (total.dtype, total.shape) == (x.dtype, x.shape)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda a, b: None, r"function <lambda> returned None, expected float32\[3\]"),
        (lambda a, b: [1, 2, 3], "returned a list"),
        (lambda a, b: (a + b).astype(np.float64), r"returned float64\[3\]"),
        (lambda a, b: (a + b)[:2], r"returned float32\[2\]"),
        (lambda a, b: np.dot(a, b), r"returned float32\[\]"),
    ],
)
def test_function_that_changes_shape_or_type_is_refused(function, message):
    x = np.ones(3, np.float32)
    with pytest.raises(BadArgument, match=message):
        fold(function, [x, x])


def test_fold_of_nothing_is_refused_and_of_one_is_a_copy():
    with pytest.raises(BadArgument, match="at least one"):
        fold(combine, [])
    x = np.arange(3)
    total = fold(combine, [x])
    assert (total == x).all()
    assert total is not x


def test_function_exception_is_raised():
    def broken(a, b):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fold(broken, [np.ones(1), np.ones(1)])


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("factor", [0.3, -2, 1e30, float("nan")])
def test_small_floats_are_multiplied_in_float32_and_rounded_once(name, factor):
    dtype = numpy_dtype(name)
    x = np.arange(1 << 8 * dtype.itemsize, dtype=f"u{dtype.itemsize}").view(dtype)
    out = scaled(x, factor)
    with np.errstate(all="ignore"):
        exact = (x.astype(np.float32) * np.float32(factor)).astype(dtype)
    assert out.dtype == dtype
    same = out.view(f"u{dtype.itemsize}") == exact.view(f"u{dtype.itemsize}")
    assert (same | np.isnan(exact.astype(np.float32))).all()


@given(
    st.sampled_from([d for d in DTYPES if DTYPES[d].kind in "iu"]),
    st.integers(-(1 << 70), 1 << 70),
    st.data(),
)
def test_integers_wrap(name, factor, data):
    dtype = np.dtype(name)
    x = data.draw(hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=2)))
    out = scaled(x, factor)
    assert (out.dtype, out.shape) == (x.dtype, x.shape)
    modulus = 1 << 8 * dtype.itemsize
    for a, b in zip(x.ravel().tolist(), out.ravel().tolist(), strict=True):
        assert (a * factor - b) % modulus == 0


def test_whole_floats_are_whole_factors():
    assert scaled(np.array([3, -3], np.int8), 2.0).tolist() == [6, -6]


def test_floats_and_complex_numbers_are_scaled():
    assert scaled(np.array([1.5, -0.0], np.float32), 3).tolist() == [4.5, -0.0]
    assert scaled(np.float64([1.5]), 0.1)[0] == 1.5 * 0.1
    assert scaled(np.ones(1, np.float32), 10**300)[0] == np.inf
    z = np.array([1 + 2j, complex(np.inf, 1)], np.complex64)
    assert scaled(z, 2).tolist() == [2 + 4j, complex(np.inf, 2)]
    assert scaled(z[:1], 1j).tolist() == [-2 + 1j]
    for x in (np.ones((4, 4))[::2, 1::2], np.array(2.0, np.complex128), np.ones(0)):
        out = scaled(x, 0.5)
        assert isinstance(out, np.ndarray)
        assert (out.dtype, out.shape) == (x.dtype, x.shape)
        assert (out == x * 0.5).all()
        assert not np.may_share_memory(out, x) or x.size == 0
