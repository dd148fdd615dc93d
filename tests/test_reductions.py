"""Reductions: native and NumPy to the same bits, for every type and operation."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.dtypes import DTYPES, OPS, check_op, dtype_of, numpy_dtype
from unisono.errors import BadArgument
from unisono.reductions import reduce, ways

MEANINGFUL = []
for _dtype in DTYPES.values():
    for _op in OPS:
        try:
            check_op(_dtype, _op)
        except BadArgument:
            continue
        MEANINGFUL.append((_dtype.name, _op))

LINE = np.arange(20.0)
SMALL = ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]


def any_bits(rng, name, count):
    """Arrays of random bits: NaN, infinities and subnormals are all among them."""
    dtype = numpy_dtype(name)
    if name == "bool":
        return rng.integers(0, 2, count).astype(bool)
    return np.frombuffer(rng.bytes(count * dtype.itemsize), dtype=dtype).copy()


def same(a, b):
    """Equal bits; any NaN equals any other, since NumPy leaves their payload open."""
    raw = [x.view(np.uint8).reshape(x.size, x.itemsize) for x in (a, b)]
    equal = (raw[0] == raw[1]).all(axis=1)
    both_nan = np.isnan(a.astype(np.complex128)) & np.isnan(b.astype(np.complex128))
    return bool((equal | both_nan.ravel()).all())


def test_native_core_is_first_and_numpy_last():
    assert ways()[-2:] == ["base", "numpy"]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("name", "op"), MEANINGFUL)
def test_every_instruction_set_agrees_with_numpy_to_the_bit(name, op):
    rng = np.random.default_rng(1)
    for num_sources in (1, 2, 3, 4, 5, 8):
        for count in (0, 1, 7, 64, 1023, 1024, 1025, 3000):
            sources = [any_bits(rng, name, count) for _ in range(num_sources)]
            twin = reduce(np.empty_like(sources[0]), sources, op, by="numpy")
            for option in ways()[:-1]:
                out = reduce(np.empty_like(sources[0]), sources, op, by=option)
                assert same(out, twin), (option, num_sources, count)


@pytest.mark.parametrize("name", SMALL)
def test_small_floats_are_rounded_once_from_a_float32_sum(name):
    rng = np.random.default_rng(2)
    dtype = numpy_dtype(name)
    sources = [rng.normal(size=500).astype(np.float32).astype(dtype) for _ in range(9)]
    exact = np.sum([s.astype(np.float32) for s in sources], axis=0, dtype=np.float32)
    out = reduce(np.empty(500, dtype), sources)
    left = sources[0].astype(np.float32)
    for s in sources[1:]:
        left = left + s.astype(np.float32)
    assert (out == left.astype(dtype)).all()
    assert np.allclose(out.astype(np.float32), exact, rtol=0.13, atol=0.02)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    "name", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
)
def test_every_small_float_survives_conversion_to_float32_and_back(name):
    dtype = numpy_dtype(name)
    bits = np.arange(1 << (8 * dtype.itemsize), dtype=f"u{dtype.itemsize}")
    values = bits.view(dtype)
    assert same(reduce(np.empty_like(values), [values]), values)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", SMALL)
def test_rounding_is_that_of_ml_dtypes_at_every_boundary(name):
    """Sums of any two values, many of which fall on the midpoint of two others."""
    dtype = numpy_dtype(name)
    top = 1 << (8 * dtype.itemsize - 1)
    values = np.arange(top, dtype=f"u{dtype.itemsize}").view(dtype)
    finite = values[np.isfinite(values.astype(np.float32))]
    rng = np.random.default_rng(3)
    a, b = rng.choice(finite, 20_000), rng.choice(finite, 20_000)
    out = reduce(np.empty_like(a), [a, b])
    assert same(out, (a.astype(np.float32) + b.astype(np.float32)).astype(dtype))


@settings(max_examples=60)
@given(
    st.sampled_from(["float32", "int32", "bfloat16", "bool"]),
    st.integers(1, 9),
    st.integers(0, 2100),
    st.data(),
)
def test_result_may_be_any_of_the_sources(name, num_sources, count, data):
    rng = np.random.default_rng(count)
    ones = [
        rng.integers(0, 2, count).astype(numpy_dtype(name)) for _ in range(num_sources)
    ]
    expected = reduce(np.empty(count, numpy_dtype(name)), ones)
    which = data.draw(st.integers(0, num_sources - 1))
    reduce(ones[which], ones)
    assert same(ones[which], expected)


@pytest.mark.parametrize("op", ["sum", "prod", "min", "max", "mean"])
@pytest.mark.parametrize("num_sources", [1, 2, 8, 9])
def test_float16_by_vectors_has_the_bits_of_one_element_at_a_time(num_sources, op):
    """Of all codes, NaNs with any payload too; not aligned, and no whole vectors."""
    chance = np.random.default_rng(num_sources)
    count = 65536 + 7
    raw = [np.zeros(2 * count + 1, np.uint8) for _ in range(num_sources + 1)]
    out, *sources = (one[1:].view(np.float16) for one in raw)
    for source in sources:
        codes = np.resize(np.arange(65536, dtype=np.uint16), count)
        source.view(np.uint16)[:] = chance.permutation(codes)
        if op not in ("min", "max"):  # of two NaNs the first has the sign, or the other
            is_nan = np.isnan(source)
            source.view(np.uint16)[is_nan] &= 0x7FFF
    found = {}
    for way in ways()[:-1]:
        reduce(out, sources, op, by=way)
        found[way] = out.view(np.uint16).copy()
    for way, codes in found.items():
        np.testing.assert_array_equal(codes, found["base"], err_msg=way)


def all_pairs(name):
    """Codes of every value, beside others: of 8 bits every pair, of 16 bits some."""
    if numpy_dtype(name).itemsize == 1:
        codes = np.arange(256, dtype=np.uint8)
        return [(np.repeat(codes, 256), np.tile(codes, 256))]
    codes, chance = np.arange(65536, dtype=np.uint16), np.random.default_rng(5)
    others = [codes, np.roll(codes, 1), codes ^ 0x8000, chance.permutation(codes)]
    return [(codes, other) for other in others]


NANS = {"float16": 0x7E00, "bfloat16": 0x7FC0, "float8_e4m3fn": 127, "float8_e5m2": 126}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("op", ["min", "max"])
@pytest.mark.parametrize("name", SMALL)
def test_min_and_max_of_codes_have_the_bits_of_comparing_their_values(name, op):
    dtype, sign = numpy_dtype(name), 1 << (8 * numpy_dtype(name).itemsize - 1)
    for a, b in all_pairs(name):
        x, y = (codes.view(dtype).astype(np.float32) for codes in (a, b))
        first = (x < y if op == "min" else x > y) | np.isnan(x)
        expected = np.where(first, a, b)
        is_nan = np.isnan(np.where(first, x, y))
        expected[is_nan] = expected[is_nan] & sign | NANS[name]
        for way in ways()[:-1]:
            out = np.empty_like(a)
            reduce(out.view(dtype), [a.view(dtype), b.view(dtype)], op, by=way)
            np.testing.assert_array_equal(out, expected, err_msg=way)
            reduce(out.view(dtype), [a.view(dtype)] * 2 + [b.view(dtype)], op, by=way)
            np.testing.assert_array_equal(out, expected, err_msg=f"{way}, three")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("op", ["sum", "prod", "mean"])
@pytest.mark.parametrize("name", SMALL)
def test_all_pairs_of_small_floats_are_reduced_to_the_bits_of_numpy(name, op):
    dtype = numpy_dtype(name)
    for pair in all_pairs(name):
        sources = [codes.view(dtype) for codes in pair]
        twin = reduce(np.empty_like(sources[0]), sources, op, by="numpy")
        for way in ways()[:-1]:
            out = reduce(np.empty_like(sources[0]), sources, op, by=way)
            assert same(out, twin), way


def test_unaligned_memory_works():
    rng = np.random.default_rng(4)
    raw = np.frombuffer(rng.bytes(4 * 1000 + 1), dtype=np.uint8)[1:].copy()
    buffer = np.empty(raw.size + 1, np.uint8)
    buffer[1:] = raw
    shifted = buffer[1:].view(np.int32)
    assert (reduce(np.empty(1000, np.int32), [shifted, shifted]) == shifted * 2).all()


@pytest.mark.parametrize("op", ["min", "max"])
@pytest.mark.parametrize("order", [0, 1])
def test_nan_in_either_operand_gives_nan(op, order):
    pair = [np.array([np.nan], np.float32), np.array([1.0], np.float32)]
    sources = pair if order else pair[::-1]
    assert np.isnan(reduce(np.empty(1, np.float32), sources, op)[0])


@pytest.mark.parametrize("op", ["min", "max"])
@pytest.mark.parametrize("name", ["float64", "float32", *SMALL])
def test_min_and_max_of_signed_zeros_take_the_later(op, name):
    """They are equal; which one machines take by themselves depends on the machine."""
    zeros = np.tile(np.array([0.0, -0.0]).astype(numpy_dtype(name)), 20)
    for option in ways():
        for first, second in ((zeros, -zeros), (-zeros, zeros)):
            out = reduce(np.empty_like(first), [first, second], op, by=option)
            assert (np.signbit(out) == np.signbit(second)).all(), option


def test_integers_wrap_and_their_mean_is_towards_zero():
    top = np.array([127], np.int8)
    assert reduce(np.empty(1, np.int8), [top, np.array([1], np.int8)])[0] == -128
    odd = [np.array([-3], np.int32), np.array([0], np.int32)]
    assert reduce(np.empty(1, np.int32), odd, "mean")[0] == -1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: reduce(np.empty(2), []), "at least one"),
        (lambda: reduce(np.empty(2), [np.empty(3)]), "does not fit"),
        (lambda: reduce(np.empty(2), [np.empty(2, np.float32)]), "does not fit"),
        (lambda: reduce(np.empty(2), [np.empty(4)[::2]]), "contiguous"),
        (lambda: reduce(LINE[1:11], [LINE[:10], LINE[1:11]]), "overlaps"),
        (lambda: reduce([1, 2], [[1, 2]]), "expected arrays"),
        (lambda: reduce(np.empty(2), [np.empty(2)], by="sse9"), "unknown way"),
        (lambda: reduce(np.empty(2), [np.empty(2)], "summ"), "nearest: sum"),
        (lambda: reduce(np.empty(2), [np.empty(2)], "bxor"), "no meaning for float64"),
        (
            lambda: reduce(np.empty(2, "S1"), [np.empty(2, "S1")]),
            "unknown element type",
        ),
        (lambda: reduce(np.broadcast_to(1.0, 1), [np.ones(1)]), "cannot be written"),
    ],
)
def test_invalid_arguments_are_refused(make, message):
    with pytest.raises(BadArgument, match=message):
        make()


def test_torch_tensors_are_recognised_without_importing_torch():
    class Tensor:
        dtype = "torch.bfloat16"

    assert dtype_of(Tensor()).name == "bfloat16"
