"""Dense codecs: native and NumPy to the same bits, whatever the values and places."""

import ml_dtypes
import numpy as np
import pytest

from unisono import codecs
from unisono.codecs import reference
from unisono.dtypes import numpy_dtype

NATIVE = codecs.ways()[:-1]
SPECS = [*codecs.NAMES, "fp8:block=32", "fp8_e5m2:block=96", "int8:block=4096"]
SPECS += ["int4:block=64", "onebit:block=32"]
MOST = np.finfo(np.float32).max
COUNTS = (0, 1, 2, 7, 31, 32, 33, 127, 128, 129, 255, 1000, 4101)


def from_bits(bits):
    return np.asarray(bits, np.uint32).view(np.float32)


def hard_values(rng, count):
    """Values that are hard in some way, each kind in an array of its own."""
    bits = rng.integers(0, 1 << 32, count, dtype=np.uint32)
    normal = rng.standard_normal(count).astype(np.float32)
    finite = np.where(np.isfinite(from_bits(bits)), from_bits(bits), np.float32(1))
    yield "any bits", from_bits(bits)
    yield "any finite value", finite
    yield "Gaussian", normal
    yield "zeros", np.zeros(count, np.float32)
    yield "negative zeros", np.full(count, -0.0, np.float32)
    yield "subnormal", from_bits(bits & 0x807FFFFF)
    yield "tiny", normal * np.float32(2.0**-120)
    yield "huge", np.clip(normal, -1, 1) * MOST
    yield "the largest", np.where(bits & 1, MOST, -MOST).astype(np.float32)
    yield "halves", rng.integers(-9, 9, count).astype(np.float32) / 2
    for bad in (np.nan, -np.nan, np.inf, -np.inf):
        damaged = normal.copy()
        damaged[rng.integers(0, count, count // 100 + (count > 0))] = bad
        yield f"some {bad}", damaged
    yield "all infinite", np.full(count, np.inf, np.float32)


def same(a, b):
    """Equal bits; any NaN equals any other, since NumPy leaves their payload open."""
    whole = np.uint32 if a.itemsize == 4 else np.uint16
    with np.errstate(invalid="ignore"):
        both_nan = np.isnan(a.astype(np.float32)) & np.isnan(b.astype(np.float32))
    return bool(((a.view(whole) == b.view(whole)) | both_nan).all())


@pytest.mark.parametrize("key", [0, 1, (1 << 64) - 1])
@pytest.mark.parametrize("spec", SPECS)
def test_native_codes_equal_the_reference(spec, key):
    rng, codec = np.random.default_rng(1), codecs.get(spec)
    for count in COUNTS:
        for kind, x in hard_values(rng, count):
            expected = codec.encode(x, key, by="numpy")
            for way in NATIVE:
                code = codec.encode(x, key, by=way)
                assert (code == expected).all(), (way, count, kind)


@pytest.mark.parametrize("spec", SPECS)
def test_native_decoded_values_equal_the_reference(spec):
    """Whatever the code: that of values, or bytes that nobody encoded."""
    rng, codec = np.random.default_rng(2), codecs.get(spec)
    for count in COUNTS:
        any_bytes = np.frombuffer(rng.bytes(codec.nbytes(count)), np.uint8)
        into = rng.standard_normal(count).astype(np.float32)
        for code in (any_bytes, codec.encode(into)):
            expected = codec.decode(code, count, by="numpy")
            total = codec.add(into.copy(), code, by="numpy")
            for way in NATIVE:
                assert same(codec.decode(code, count, by=way), expected), (way, count)
                assert same(codec.add(into.copy(), code, by=way), total), (way, count)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("spec", [*SPECS, "int8:block=65536"])
def test_small_floats_are_widened_and_rounded_once(spec, dtype):
    rng, codec = np.random.default_rng(3), codecs.get(spec)
    for count in (0, 1, 33, 2048, 2049, 70_000):
        bits = rng.integers(0, 1 << 16, count, dtype=np.uint16)
        x, into = bits.view(numpy_dtype(dtype)), np.ones(count, numpy_dtype(dtype))
        with np.errstate(invalid="ignore"):
            wide = x.astype(np.float32)
        for key in (0, 5):
            expected = codec.encode(wide, key, by="numpy")
            assert (codec.encode(x, key) == expected).all()
            assert (codec.encode(x, key, by="numpy") == expected).all()
        code = codec.encode(wide)
        narrow = codec.decode(code, count, dtype)
        assert narrow.dtype == x.dtype
        assert same(narrow, codec.decode(code, count, dtype, by="numpy"))
        total = codec.add(into.copy(), code)
        assert same(total, codec.add(into.copy(), code, by="numpy"))


@pytest.mark.parametrize("spec", codecs.NAMES)
def test_encoding_works_at_any_alignment(spec):
    rng, codec, count = np.random.default_rng(4), codecs.get(spec), 300
    x = rng.standard_normal(count).astype(np.float32)
    expected = codec.encode(x)
    values = codec.decode(expected, count)
    room = np.empty(codec.nbytes(count) + 64, np.uint8)
    floats = np.empty(4 * count + 64, np.uint8)
    for at in range(9):
        source = floats[at : at + 4 * count].view(np.float32)
        for to in range(9):
            source[:] = x
            code = room[to : to + codec.nbytes(count)]
            for way in NATIVE:
                codec.encode(source, out=code, by=way)
                assert (code == expected).all()
                codec.decode(code, count, out=source, by=way)
                assert same(source.copy(), values)


@pytest.mark.parametrize("spec", SPECS)
def test_whole_blocks_can_be_encoded_and_decoded_alone(spec):
    codec = codecs.get(spec)
    cut = 3 * codec.block
    x = np.random.default_rng(5).standard_normal(cut + 77).astype(np.float32)
    whole, at = codec.encode(x), codec.nbytes(cut)
    apart = [codec.encode(x[:cut]), codec.encode(x[cut:])]
    assert (np.concatenate(apart) == whole).all()
    assert same(codec.decode(whole[at:], 77), codec.decode(whole, x.size)[cut:])


@pytest.mark.parametrize(
    ("spec", "dtype", "most"),
    [
        ("fp8", ml_dtypes.float8_e4m3fn, 448),
        ("fp8_e5m2", ml_dtypes.float8_e5m2, 57344),
        ("mxfp8", ml_dtypes.float8_e4m3fn, 448),
    ],
)
def test_rounding_at_scale_one_is_that_of_ml_dtypes(spec, dtype, most):
    """Every value of the format, every midpoint, and the neighbours of those."""
    values = np.arange(128, dtype=np.uint8).view(dtype).astype(np.float32)
    values = values[np.isfinite(values)]
    middle = (values[1:] + values[:-1]) / 2
    points = np.concatenate([values, middle])
    points = np.concatenate(
        [points, np.nextafter(points, 0), np.nextafter(points, most)]
    )
    points = np.minimum(points, most).astype(np.float32)
    codec = codecs.get(spec)
    rows = np.full((points.size, codec.block), most, np.float32)
    rows[:, 0], rows[:, 1] = points, -points
    code = codec.encode(rows).reshape(points.size, -1)[:, -codec.block :]
    assert (code[:, 0] == points.astype(dtype).view(np.uint8)).all()
    assert (code[:, 1] == (-points).astype(dtype).view(np.uint8)).all()


@pytest.mark.parametrize(
    ("spec", "dtype"), [("fp16", np.float16), ("bf16", ml_dtypes.bfloat16)]
)
def test_fp16_and_bf16_are_those_of_numpy_and_ml_dtypes(spec, dtype):
    rng = np.random.default_rng(6)
    x = from_bits(rng.integers(0, 1 << 32, 200_000, dtype=np.uint32))
    with np.errstate(all="ignore"):
        expected = x.astype(dtype)
    assert same(codecs.get(spec).encode(x).view(dtype), expected)


def test_random_bits_look_random():
    """Each bit is set half of the time, and neighbours know nothing of each other."""
    bits = np.unpackbits(reference.draws(12345, 1 << 16).view(np.uint8)).reshape(-1, 32)
    share = bits.mean(axis=0)
    assert np.abs(share - 0.5).max() < 5 * 0.5 / 256
    for other in (1, 2, 31, 32, 64):
        agree = (bits[other:] == bits[:-other]).mean(axis=0)
        assert np.abs(agree - 0.5).max() < 5 * 0.5 / 256
    nearby = np.unpackbits(reference.draws(12346, 1 << 16).view(np.uint8))
    assert abs((nearby.reshape(-1, 32) == bits).mean() - 0.5) < 0.002
