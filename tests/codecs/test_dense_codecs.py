"""Dense codecs: sizes, errors, NaN and infinities, chance, and what is refused."""

import numpy as np
import pytest

from unisono import _native, codecs
from unisono.errors import BadArgument

MOST = np.finfo(np.float32).max
SCALED = [name for name in codecs.NAMES if name not in ("fp16", "bf16")]
ROUNDED = [name for name in codecs.NAMES if name != "onebit"]


def gaussian(count, seed=0):
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


def round_trip(codec, x, key=0):
    return codec.decode(codec.encode(x, key), x.size).reshape(x.shape)


def relative_error(codec, x, key=0):
    lost = round_trip(codec, x, key).astype(float) - x
    return np.sqrt(np.mean(lost**2) / np.mean(x.astype(float) ** 2))


# Sizes


@pytest.mark.parametrize(
    ("spec", "count", "nbytes"),
    [
        ("fp16", 1000, 2000),
        ("bf16", 1, 2),
        ("fp8", 128, 132),
        ("fp8", 129, 132 + 4 + 1),
        ("fp8", 1 << 20, (1 << 20) * 33 // 32),
        ("fp8:block=64", 640, 680),
        ("fp8_e5m2", 7, 11),
        ("mxfp8", 64, 66),
        ("mxfp8", 65, 68),
        ("int8", 256, 264),
        ("int4", 128, 68),
        ("int4", 129, 68 + 5),
        ("int4", 131, 68 + 6),
        ("onebit", 128, 20),
        ("onebit", 137, 20 + 6),
        ("onebit", 0, 0),
    ],
)
def test_code_sizes_are_exact(spec, count, nbytes):
    codec = codecs.get(spec)
    assert codec.nbytes(count) == nbytes
    assert codec.encode(np.ones(count, np.float32)).nbytes == nbytes


def test_both_sides_know_the_same_codecs_sizes_and_keys():
    assert tuple(_native.codec_names()) == codecs.NAMES
    for name in codecs.NAMES:
        codec = codecs.get(name)
        assert _native.codec_block(name) == codec.block
        for count in (0, 1, 31, 32, 127, 128, 1001):
            block = codec.block
            assert _native.codec_bytes(name, count, block) == codec.nbytes(count)
    for step, slot in [(0, 0), (0, 1), (1, 0), (7, 3), ((1 << 64) - 1, 1 << 63)]:
        assert _native.codec_key(step, slot) == codecs.key(step, slot)


def test_codec_name_is_parsed_and_written_unchanged():
    for spec in ("fp8", "fp8:block=64", "int8:stochastic", "int4:block=32,stochastic"):
        assert str(codecs.get(spec)) == spec
        assert codecs.get(spec) is codecs.get(spec)
        assert codecs.get(codecs.get(spec)) is codecs.get(spec)
    assert str(codecs.get("fp8:block=128")) == "fp8"
    assert codecs.get("fp8:block=128") == codecs.get("fp8")


# Errors


@pytest.mark.parametrize("name", codecs.NAMES)
def test_error_matches_the_prediction_for_gaussian_values(name):
    codec = codecs.get(name)
    assert relative_error(codec, gaussian(1 << 17, seed=1)) == pytest.approx(
        codec.error, rel=0.02
    )


@pytest.mark.parametrize(
    ("spec", "error"),
    [
        ("fp8", 0.026),
        ("fp8_e5m2", 0.051),
        ("mxfp8", 0.0265),
        ("int8", 0.0065),
        ("int4", 0.118),
        ("int4:block=32", 0.098),
        ("onebit", np.sqrt(1 - 2 / np.pi)),
    ],
)
def test_errors_are_those_of_the_theory(spec, error):
    assert codecs.get(spec).error == pytest.approx(error, rel=0.02)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_stochastic_rounding_error_is_larger_by_root_two(name):
    """Uniform errors: a twelfth of a squared step to nearest, a sixth by chance."""
    plain, chance = codecs.get(name), codecs.get(f"{name}:stochastic")
    assert chance.error == pytest.approx(plain.error * np.sqrt(2), rel=0.03)


@pytest.mark.parametrize(("name", "bits"), [("fp8", 4), ("mxfp8", 4), ("fp8_e5m2", 3)])
def test_small_float_error_is_at_most_the_last_bit(name, bits):
    x = gaussian(1 << 14)
    off = np.abs(round_trip(codecs.get(name), x) - x)
    largest = np.abs(x).reshape(-1, 32).max()
    assert (off <= np.abs(x) * 2.0**-bits * 1.0001 + largest * 2.0**-16).all()


@pytest.mark.parametrize(("name", "most"), [("int8", 127), ("int4", 7)])
def test_integer_codec_error_is_at_most_half_a_step(name, most):
    x = np.random.default_rng(2).standard_t(3, 1 << 14).astype(np.float32)
    off = np.abs(round_trip(codecs.get(name), x) - x).reshape(-1, 128)
    steps = np.abs(x).reshape(-1, 128).max(axis=1, keepdims=True) / most
    assert (off <= steps / 2 * 1.0001).all()


@pytest.mark.parametrize("name", ["bf16", *SCALED])
@pytest.mark.parametrize("exponent", [-100, -20, 20, 100])
def test_relative_error_does_not_depend_on_the_scale(name, exponent):
    codec, x = codecs.get(name), gaussian(4096)
    scaled = relative_error(codec, x * np.float32(2.0**exponent))
    assert scaled == pytest.approx(relative_error(codec, x), rel=1e-6)


@pytest.mark.parametrize("name", SCALED)
def test_largest_values_stay_finite(name):
    x = np.array([MOST, -MOST, 1.0, 0.0] * 40, np.float32)
    assert np.isfinite(round_trip(codecs.get(name), x)).all()
    assert np.isfinite(round_trip(codecs.get(name), x, key=3)).all()


@pytest.mark.parametrize("name", codecs.NAMES)
def test_zeros_stay_zeros(name):
    codec = codecs.get(name)
    assert (round_trip(codec, np.zeros(300, np.float32)) == 0).all()
    assert (round_trip(codec, np.zeros(300, np.float32), key=9) == 0).all()


@pytest.mark.parametrize("name", ["fp16", "bf16", "fp8", "fp8_e5m2", "mxfp8"])
def test_small_floats_keep_the_sign_of_zero(name):
    x = np.array([-0.0, 0.0, 1.0, -1.0], np.float32)
    assert (np.signbit(round_trip(codecs.get(name), x)) == np.signbit(x)).all()


# NaN and infinities


@pytest.mark.parametrize("key", [0, 4])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", codecs.NAMES)
def test_nonfinite_values_never_become_finite(name, bad, key):
    codec = codecs.get(name)
    for place in (0, 5, 127, 128, 299):
        x = gaussian(300)
        x[place] = bad
        found = round_trip(codec, x, key)
        assert not np.isfinite(found[place])
        into = np.zeros(300, np.float32)
        assert not np.isfinite(codec.add(into, codec.encode(x, key))[place])


@pytest.mark.parametrize(
    ("name", "infinity"),
    [
        ("fp16", np.inf),
        ("bf16", np.inf),
        ("fp8_e5m2", np.inf),
        ("fp8", np.nan),
        ("mxfp8", np.nan),
    ],
)
def test_small_floats_keep_nonfinite_values_in_place(name, infinity):
    """The others of the block are as they would be without."""
    codec, x = codecs.get(name), gaussian(300)
    x[[10, 20, 30]] = 0
    clean = round_trip(codec, x)
    x[[10, 20, 30]] = np.nan, np.inf, -np.inf
    clean[[10, 20, 30]] = np.nan, infinity, -infinity
    np.testing.assert_array_equal(round_trip(codec, x), clean)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["int8", "int4", "onebit"])
def test_nonfinite_values_make_integer_and_sign_blocks_nan(name, bad):
    codec, x = codecs.get(name), gaussian(300)
    clean = round_trip(codec, x)
    x[130] = bad
    clean[128:256] = np.nan
    np.testing.assert_array_equal(round_trip(codec, x), clean)


def test_scale_byte_255_is_nan():
    code = codecs.get("mxfp8").encode(np.ones(32, np.float32))
    code[0] = 255
    assert np.isnan(codecs.get("mxfp8").decode(code, 32)).all()


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_fp16_overflow_gives_infinity(name):
    x = np.array([MOST, -MOST], np.float32)
    np.testing.assert_array_equal(round_trip(codecs.get(name), x), [np.inf, -np.inf])


# Chance


@pytest.mark.parametrize("name", ROUNDED)
def test_stochastic_rounding_is_unbiased(name):
    codec, x = codecs.get(name), gaussian(256)
    trials = np.array([round_trip(codec, x, key) for key in range(1, 1001)], float)
    step = trials.max(axis=0) - trials.min(axis=0)
    off = np.abs(trials.mean(axis=0) - x)
    undecided = step > 0  # others are so near to a code that it was always the same
    assert undecided.sum() > 200
    assert (off <= 5 * step / 2 / np.sqrt(len(trials)))[undecided].all()


@pytest.mark.parametrize("name", ROUNDED)
def test_stochastic_rounding_takes_one_of_the_two_neighbours(name):
    codec, x = codecs.get(name), gaussian(256)
    trials = np.array([round_trip(codec, x, key) for key in range(1, 101)])
    assert max(len(np.unique(column)) for column in trials.T) == 2
    nearest = round_trip(codec, x)
    assert ((trials == nearest).any(axis=0)).mean() > 0.99


@pytest.mark.parametrize("name", ROUNDED)
def test_stochastic_rounding_depends_on_key_and_index_alone(name):
    codec, x = codecs.get(f"{name}:stochastic"), gaussian(1024)
    key = codecs.key(step=12, slot=3)
    code = codec.encode(x, key)
    assert (codec.encode(x.copy(), key) == code).all()
    assert (codec.encode(x[:512], key) == code[: codec.nbytes(512)]).all()
    assert (codec.encode(x, codecs.key(12, 4)) != code).any()
    assert (codec.encode(x, codecs.key(13, 3)) != code).any()


def test_keys_are_frozen_and_never_zero():
    """Changing them would change what stored steps of training did."""
    assert codecs.key(0, 0) == 1
    assert codecs.key(1, 2) == 0xA559650848DC2883
    keys = {codecs.key(step, slot) for step in range(100) for slot in range(100)}
    assert len(keys) == 10_000
    assert 0 not in keys


# What is refused


FP8 = codecs.get("fp8")
ONES = np.ones(128, np.float32)
CODE = FP8.encode(ONES)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: codecs.get("fp9"), "unknown codec 'fp9'; nearest: fp8"),
        (lambda: codecs.get(""), "unknown codec"),
        (lambda: codecs.get(8), "expected a name such as 'fp8'"),
        (lambda: codecs.get("fp8:size=3"), "unknown option 'size=3'"),
        (lambda: codecs.get("fp8:block"), "unknown option 'block'"),
        (lambda: codecs.get("fp8:stochastic=1"), "unknown option"),
        (lambda: codecs.get("fp8:block=many"), "expected a whole number"),
        (lambda: codecs.get("fp8:block=0"), "nearest: fp8:block=32"),
        (lambda: codecs.get("int8:block=-32"), "multiple of 32"),
        (lambda: codecs.get("int8:block=100"), "nearest: int8:block=96"),
        (lambda: codecs.get("int4:block=131072"), "nearest: int4:block=65536"),
        (lambda: codecs.get("mxfp8:block=64"), "its block is 32"),
        (lambda: codecs.get("bf16:block=32"), "it has no blocks"),
        (lambda: codecs.get("onebit:stochastic"), "use onebit"),
        (lambda: codecs.Codec("fp7", 32), "unknown codec"),
        (lambda: FP8.encode(np.ones(3, np.int32)), "send it without a codec"),
        (lambda: FP8.encode(np.ones(3)), "float64.*convert it to float32"),
        (lambda: FP8.encode(np.ones(3, np.complex64)), "without a codec"),
        (lambda: FP8.encode([1.0]), "expected a NumPy array"),
        (lambda: FP8.encode(ONES, -1), "expected 64 bits"),
        (lambda: FP8.encode(ONES, 1 << 64), "expected 64 bits"),
        (lambda: FP8.encode(ONES, 0.5), "whole number"),
        (lambda: FP8.encode(ONES, out=CODE[1:]), "132 bytes, got uint8"),
        (lambda: FP8.encode(ONES, by="sse9"), "unknown way to encode"),
        (lambda: codecs.get("int8:stochastic").encode(ONES), "needs a key"),
        (lambda: FP8.decode(CODE, 127), "131 bytes"),
        (lambda: FP8.decode(bytes(CODE), 128), "got a bytes"),
        (lambda: FP8.decode(CODE, -1), "expected 0 or more"),
        (lambda: FP8.decode(CODE, 128, "int32"), "expected float32"),
        (lambda: FP8.decode(CODE, 128, "float3"), "unknown element type"),
        (lambda: FP8.decode(CODE, 128, out=np.ones(5, np.float32)), "expected 128"),
        (lambda: FP8.add(np.ones(128), CODE), "convert it to float32"),
        (lambda: FP8.add(np.ones(256, np.float32)[::2], CODE), "contiguous"),
        (lambda: FP8.add(None, CODE), "expected a NumPy array"),
        (lambda: FP8.nbytes(-1), "expected 0 or more"),
        (lambda: FP8.nbytes(1.5), "whole number"),
        (lambda: codecs.key(-1, 0), "expected 0 or more"),
    ],
)
def test_bad_input_errors_say_what_to_do(make, message):
    with pytest.raises(BadArgument, match=message):
        make()


def test_any_shape_and_stride_can_be_encoded():
    x = gaussian(600).reshape(20, 30)
    assert (FP8.encode(x.T) == FP8.encode(x.T.copy().ravel())).all()
    assert (FP8.encode(x[:, ::2]) == FP8.encode(x[:, ::2].copy())).all()
    into = np.zeros((20, 30), np.float32)
    assert (FP8.add(into, FP8.encode(x)) == round_trip(FP8, x)).all()


@pytest.mark.parametrize(
    "call",
    [
        lambda raw, code: _native.codec_encode("fp9", code, raw, 11, 128),
        lambda raw, code: _native.codec_encode("fp8", code[1:], raw, 11, 128),
        lambda raw, code: _native.codec_encode("fp8", code, raw, 11, 0),
        lambda raw, code: _native.codec_encode("fp8", code, raw, 11, 100),
        lambda raw, code: _native.codec_encode("fp8", code, raw, 12, 128),
        lambda raw, code: _native.codec_encode("fp8", code, raw, 99, 128),
        lambda raw, code: _native.codec_encode("fp8", code, raw, 11, 128, 0, 9),
        lambda raw, code: _native.codec_decode("fp8", raw[1:], code, 11, 128),
        lambda raw, code: _native.codec_add("fp8", raw, code[:-1], 11, 128),
        lambda raw, code: _native.codec_bytes("bf16", 8, 32),
    ],
)
def test_native_codecs_stay_inside_their_buffers(call):
    with pytest.raises(ValueError, match="codec:"):
        call(ONES.view(np.uint8).copy(), CODE.copy())


@pytest.mark.parametrize("name", ["fp8", "int8", "bf16", "mxfp8"])
def test_share_is_the_part_of_the_bytes_that_is_sent(name):
    codec = codecs.get(name)
    count = 1 << 16
    assert codec.share(4) == pytest.approx(codec.nbytes(count) / (4 * count))
    assert codec.share(2) == 2 * codec.share(4)
