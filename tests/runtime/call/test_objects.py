"""Objects as bytes: exact round trips, refusals that name the place, hostile bytes."""

import collections
import enum
import math
import pickle
import random
import struct
import subprocess
import sys
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from unisono.errors import BadArgument, Corrupted, MissingExtra
from unisono.runtime import object_collectives
from unisono.runtime.call import objects
from unisono.runtime.call.objects import decode, encode

pytestmark = pytest.mark.one_in(3)

SMALL = [
    name
    for name in dir(ml_dtypes)
    if isinstance(getattr(ml_dtypes, name), type) and name not in ("finfo", "iinfo")
]
DTYPES = [
    *("?", "b", "B", "h", "H", "i", "I", "i8", "u8", "e", "f", "d", "F", "D"),
    *(">i2", ">u8", ">f4", ">c16", "U3", ">U3", "S5", "m8[s]", "M8[ns]"),
]


def same(a, b):
    """Equal to the bit and in type, at every depth; keys keep their order."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray | np.generic):
        equal = (a.dtype.str, a.shape) == (b.dtype.str, b.shape)
        return equal and a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    if isinstance(a, set | frozenset):
        found = all(any(same(x, y) for y in b) for x in a)
        return found and len(a) == len(b)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def back(obj, **options):
    return decode(encode(obj, **options), **options)


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(1 << 3000), 1 << 3000),
    st.floats(),
    st.complex_numbers(),
    st.text(st.characters(codec=None, exclude_categories=())),
    st.binary(),
)
arrays = st.sampled_from(DTYPES).flatmap(
    lambda code: hnp.arrays(
        np.dtype(code), hnp.array_shapes(min_dims=0, max_dims=3, min_side=0)
    )
)
numpy_scalars = st.one_of(
    st.sampled_from([c for c in DTYPES if "U" not in c and "S" not in c]).flatmap(
        lambda code: hnp.arrays(np.dtype(code).newbyteorder("="), ()).map(
            lambda a: a[()]
        )
    ),
    st.text().map(np.str_),
    st.binary().map(np.bytes_),
)
keys = st.recursive(
    scalars | numpy_scalars,
    lambda inner: (
        st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3)
    ),
    max_leaves=4,
)
things = st.recursive(
    scalars | st.binary().map(bytearray) | arrays | numpy_scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.sets(keys, max_size=4)
        | st.frozensets(keys, max_size=4)
    ),
    max_leaves=12,
)


@given(things)
@example([])
@example(((), [], {}, set(), frozenset(), "", b"", bytearray()))
@example([0.0, -0.0, math.nan, -math.nan, math.inf, 5e-324])
@example([complex(-0.0, math.nan), complex(math.inf, -0.0)])
@example([0, -1, 127, 128, -128, -129, 255, 1 << 64, -(1 << 64), 10**1000])
@example({(1, frozenset([2])): {None: True, False: 1.5}, np.float32(2): b"\0"})
@example(["\ud800", "ä\0€𝄞", np.str_("a\0"), np.bytes_(b"a\0"), "x" * 300])
@example([[0] * 254, [0] * 255, [0] * 256, bytes(255)])
def test_types_and_bits_come_back(thing):
    assert same(back(thing), thing)


@pytest.mark.parametrize("name", SMALL)
def test_small_floats_and_integers_come_back(name):
    dtype = np.dtype(getattr(ml_dtypes, name))
    for array in (np.ones(3, dtype), np.zeros((), dtype), np.ones((2, 0), dtype)):
        assert same(back(array), array)
    one = back(dtype.type(1))
    assert type(one) is dtype.type
    assert one == dtype.type(1)


ROWS = np.arange(24.0).reshape(2, 3, 4)


@pytest.mark.parametrize(
    "array",
    [
        ROWS[:, ::2, ::-1],
        ROWS.T,
        np.asfortranarray(ROWS[0]),
        np.broadcast_to(np.int16(3), (2, 5)),
        np.frombuffer(bytes(9), np.uint8)[1:].view(np.int64),
        np.zeros((1,) * 32),
        np.datetime64("NaT", "s"),
        np.array(["", "äö"]),
    ],
)
def test_arrays_come_back_contiguous_and_writable(array):
    got = back(array)
    assert same(got, np.ascontiguousarray(array).reshape(array.shape)[...]) or same(
        got, array
    )
    if isinstance(got, np.ndarray):
        assert got.flags.c_contiguous
        assert got.flags.writeable
        assert got.flags.aligned


def test_decoded_arrays_own_their_memory():
    data = bytearray(encode([np.arange(4), b"abc", bytearray(b"abc")]))
    got = decode(memoryview(data))
    data[:] = bytes(len(data))
    assert got[0].tolist() == [0, 1, 2, 3]
    assert got[1:] == [b"abc", b"abc"]


def test_any_buffer_of_bytes_can_be_decoded():
    data = encode({"a": (1, 2)})
    padded = np.zeros(2 * len(data), np.uint8)
    padded[::2] = np.frombuffer(data, np.uint8)
    views = [data, bytearray(data), memoryview(data), memoryview(data).cast("c")]
    for view in (*views, memoryview(padded)[::2]):
        assert decode(view) == {"a": (1, 2)}
    with pytest.raises(Corrupted):
        decode(memoryview(np.empty(0, np.uint8)))


def test_arrays_are_copied_once():
    array = np.zeros(1 << 22)
    tracemalloc.start()
    data = encode({"model": array})
    assert tracemalloc.get_traced_memory()[1] < 1.1 * array.nbytes
    tracemalloc.reset_peak()
    decode(data)
    assert tracemalloc.get_traced_memory()[1] < 2.1 * array.nbytes
    tracemalloc.stop()


class Foo:
    def __init__(self, value=1):
        self.value = value

    def __eq__(self, other):
        return type(other) is Foo and self.value == other.value

    __hash__ = None


class Colour(enum.IntEnum):
    RED = 1


Point = collections.namedtuple("Point", "x y")


class Text(str):
    __slots__ = ()


class Float(np.float64):
    pass


RECORDS = np.zeros(2, [("a", "i4"), ("b", "f8")])
SELF: list = []
SELF.append(SELF)


@pytest.mark.parametrize(
    ("thing", "message"),
    [
        (
            {"model": [0, 0, 0, Foo()]},
            r"^object at \['model'\]\[3\]: a Foo cannot be sent without pickle; pass "
            r"allow_pickle=True if all ranks are trusted$",
        ),
        (Foo(), "^object: a Foo cannot"),
        ([({"k": {Colour.RED: 0}},)], r"object at \[0\]\[0\]\['k'\]<key>: a Colour"),
        ([{frozenset([Point(1, 2)])}], r"object at \[0\]<member><member>: a Point"),
        (Colour.RED, "a Colour"),
        (Text("x"), "a Text"),
        (collections.OrderedDict(), "a OrderedDict"),
        (range(3), "a range"),
        (memoryview(b""), "a memoryview"),
        (print, "a builtin_function"),
        (RECORDS, r"a ndarray of \[\('a', '<i4'\)"),
        (RECORDS[0], "a void of"),
        (np.array([None]), "a ndarray of object"),
        (np.zeros(1, np.longdouble), "a ndarray of float128|of float64"),
        (np.ma.zeros(1), "a MaskedArray of float64"),
        (Float(1), "a Float of float64"),
        (SELF, r"object at \[0\]\[0\]\[0\]\[0\]\.\.\..*: nested deeper than 100"),
        ({"x" * 99: Foo()}, r"object at \['x+\.\.\.x+'\]: a Foo"),
    ],
)
def test_unsupported_value_is_named_with_its_path(thing, message):
    if np.dtype(np.longdouble) == np.float64 and "float128" in message:
        pytest.skip("the long double is a double here")
    with pytest.raises(BadArgument, match=message):
        encode(thing)


def nested(depth, make=lambda inner: [inner]):
    thing = 0
    for _ in range(depth):
        thing = make(thing)
    return thing


@pytest.mark.parametrize("make", [lambda x: [x], lambda x: (x,), lambda x: {0: x}])
def test_depth_has_a_limit_on_both_sides(make):
    deepest = nested(objects.MOST_DEPTH, make)
    assert same(back(deepest), deepest)
    with pytest.raises(BadArgument, match="nested deeper"):
        encode(make(deepest))
    one, data = encode(make(0))[1:-3], encode(deepest)
    with pytest.raises(Corrupted, match="nested deeper"):
        decode(data[:1] + one + data[1:])


def test_deep_nesting_does_not_recurse():
    with pytest.raises(Corrupted, match="nested deeper"):
        decode(encode([])[:1] + b"l\x01" * 1_000_000)


def test_size_has_a_limit(monkeypatch):
    monkeypatch.setattr(objects, "MOST_BYTES", 1000)
    assert back([bytes(900)])
    with pytest.raises(BadArgument, match=r"object at \[1\]: more than 1000 B"):
        encode([bytes(900), np.zeros(100)])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "byte 0 of 0"),
        (b"\x02N", "version 2 of the encoding, expected 1"),
        (b"\x01", "truncated"),
        (b"\x01?", "unknown type byte 63"),
        (b"\x01NN", "1 bytes are left over"),
        (b"\x01b\xff" + b"\xff" * 8, "bytes are announced"),
        (b"\x01l\xff" + b"\xff" * 8, "18446744073709551615 items in the 0 bytes"),
        (b"\x01l\x02N", "2 items in the 1 bytes"),
        (b"\x01d\x02NNN", "2 items in the 3 bytes"),
        (b"\x01d\x01l\x00N", "unhashable"),
        (b"\x01e\x01l\x00", "unhashable"),
        (b"\x01e\x02NN", "twice"),
        (b"\x01d\x02TNTN", "twice"),
        (b"\x01s\x01\xff", "decode"),
        (b"\x01a\x03|b1\x01\x01\x02", "a boolean that is neither"),
        (b"\x01a\x03<U1\x01\x01\xff\xff\xff\xff", "Unicode"),
        (b"\x01a\x03|O8\x00" + bytes(8), "no element type is called"),
        (b"\x01a\x03\xff\xff\xff\x00", "ascii"),
        (b"\x01a\x05finfo\x00", "no element type is called"),
        (b"\x01a\x06int999\x00", "this ml_dtypes has no int999"),
        (b"\x01a\x07<M8[xx]\x00" + bytes(8), "xx"),
        (b"\x01a\x03<f4\x41" + bytes(65), "65 axes"),
        (b"\x01a\xc8" + bytes(200) + b"\x00", "200 letters"),
        (b"\x01a\x03<f4\x02\x00\xff" + b"\xff" * 8, "object, byte"),
        (b"\x01a\x03<f4\x02\xff" + b"\xff" * 8 + b"\x02", "bytes are announced"),
        (b"\x01g\x03<f4\x01\x01" + bytes(4), "a scalar with axes"),
        (b"\x01t\x05nasty\x00", "no element type is called"),
    ],
)
def test_invalid_bytes_are_corrupted(data, message):
    with pytest.raises(Corrupted, match=message):
        decode(data)


RICH = encode(
    {
        "model": [np.arange(6.0).reshape(2, 3), np.float32(1), np.ones(2, ">U2")],
        (1, -(1 << 70)): {"a", b"b", 2.5, 1j, None, True},
        frozenset([3]): np.ones(3, ml_dtypes.bfloat16),
        "t": (bytearray(b"xyz"), np.str_("é"), np.bytes_(b"\0"), {}, np.bool_(True)),
        "when": np.array(["2020-01-01"], "M8[D]"),
    }
)


def test_every_truncation_is_detected():
    for end in range(len(RICH)):
        with pytest.raises(Corrupted):
            decode(RICH[:end])


def survive(data):
    """Either an object or Corrupted (a pickle: BadArgument), and little memory."""
    try:
        decode(data)
    except (Corrupted, BadArgument):
        return


def test_every_changed_byte_is_handled(torch):
    tracemalloc.start()
    for at in range(len(RICH)):
        for byte in {
            0,
            1,
            0x7F,
            0xFE,
            0xFF,
            RICH[at] ^ 1,
            RICH[at] ^ 0x80,
            *b"abdeltp",
        }:
            survive(RICH[:at] + bytes((byte,)) + RICH[at + 1 :])
    assert tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()


def test_random_changes_are_handled():
    rng = random.Random(5)
    for _ in range(6000):
        data = bytearray(RICH)
        for _ in range(rng.randint(1, 6)):
            at, to = sorted(rng.randrange(1, len(data) + 1) for _ in range(2))
            data[at:to] = rng.choice([b"", rng.randbytes(to - at), data[at:to] * 2])
        survive(bytes(data))


@settings(max_examples=300)
@given(st.lists(st.sampled_from([*b"NTFifcsbBSYagtpluezd\0\1\2\3\xff"]) | st.binary()))
def test_random_bytes_are_handled(pieces):
    parts = [p if isinstance(p, bytes) else bytes((p,)) for p in pieces]
    survive(b"\x01" + b"".join(parts))


def test_pickle_needs_permission_on_both_sides():
    thing = {"a": [Foo(3), RECORDS, Colour.RED], "plain": (1, np.arange(2))}
    data = encode(thing, allow_pickle=True)
    got = decode(data, allow_pickle=True)
    assert got["a"][0] == Foo(3)
    assert (got["a"][1] == RECORDS).all()
    assert got["a"][2] is Colour.RED
    assert same(got["plain"], thing["plain"])
    with pytest.raises(BadArgument, match="a pickle, which may run any code"):
        decode(data)
    assert same(back((1, "x"), allow_pickle=True), (1, "x"))


class Evil:
    def __reduce__(self):
        return sys.exit, (3,)


def test_pickle_is_not_run_without_permission():
    raw = pickle.dumps(Evil())
    with pytest.raises(BadArgument, match="allow_pickle=True"):
        decode(b"\x01p" + bytes((len(raw),)) + raw)


def test_failing_pickle_is_an_error():
    with pytest.raises(
        BadArgument, match=r"object at \[0\]: a function cannot be pick"
    ):
        encode([lambda: 0], allow_pickle=True)
    with pytest.raises(Corrupted, match="a pickle cannot be read"):
        decode(b"\x01p\x03abc", allow_pickle=True)


def test_missing_extras_are_named(monkeypatch):
    data = encode(np.ones(1, ml_dtypes.bfloat16))
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtra, match="lowp"):
        decode(data)
    with pytest.raises(MissingExtra, match="torch"):
        decode(b"\x01t\x07float32\x00" + bytes(4))
    with pytest.raises(BadArgument, match="a Foo"):
        encode(Foo())


def test_torch_is_not_imported_for_plain_data():
    code = (
        "import sys, numpy\n"
        "from unisono.runtime.call.objects import decode, encode\n"
        "decode(encode([1, numpy.ones(2), {'a': (None,)}]))\n"
        "assert 'torch' not in sys.modules and 'ml_dtypes' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")


TORCH_TYPES = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64"),
    *("complex128", "float8_e4m3fn", "float8_e5m2"),
]


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("name", TORCH_TYPES)
def test_tensors_come_back(torch, name):
    for shape in ((), (0,), (3,), (2, 0, 3), (2, 3)):
        tensor = torch.ones(shape, dtype=torch.float32).to(getattr(torch, name))
        got = back([tensor])[0]
        assert type(got) is torch.Tensor
        assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
        raw = [t.reshape(-1).view(torch.uint8) for t in (got, tensor)]
        assert torch.equal(*raw)


def test_views_of_tensors_come_back_plain(torch):
    x = torch.arange(12.0).reshape(3, 4)
    for view in (x.T, x[:, ::2], x.expand(2, 3, 4), x.requires_grad_()):
        assert torch.equal(back(view), view)
    assert not back(x).requires_grad
    z = torch.tensor([1 + 2j])
    assert torch.equal(back(z.conj()), z.conj().resolve_conj())
    assert torch.equal(back(z.conj().imag), torch.tensor([-2.0]))


def test_other_tensors_are_refused(torch):
    with pytest.raises(BadArgument, match=r"object at \['w'\]: a Parameter of torch"):
        encode({"w": torch.nn.Parameter(torch.ones(1))})
    with pytest.raises(BadArgument, match="on meta"):
        encode(torch.ones(1, device="meta"))
    with pytest.raises(BadArgument, match="sparse_coo"):
        encode(torch.ones(2).to_sparse())


def test_invalid_tensors_are_corrupted(torch):
    data = encode([torch.ones(2, 3, dtype=torch.bfloat16), torch.ones(1).bool()])
    for end in range(len(data)):
        with pytest.raises(Corrupted):
            decode(data[:end])
    with pytest.raises(Corrupted, match="a boolean that is neither"):
        decode(data[:-1] + b"\x02")
    for at in range(len(data)):
        for byte in (0, 1, 2, 0x7F, 0xFF, data[at] ^ 4):
            survive(data[:at] + bytes((byte,)) + data[at + 1 :])
    huge = b"\x02\x00\xff" + b"\xff" * 8
    with pytest.raises(Corrupted):
        decode(b"\x01t\x07float32" + huge)
    with pytest.raises(Corrupted, match="this torch has no float8_none"):
        decode(b"\x01t\x0bfloat8_none\x00")


# --- sizes that another rank announces


class Announced:
    """A communicator whose other rank says that its object has so many bytes."""

    rank, world_size, peers = 1, 2, ("rank 0", "rank 1")

    def __init__(self, size):
        self.size = size

    def broadcast(self, x, root):
        assert x.shape == (1,), "no memory is taken for it"
        return np.array([self.size])

    def all_gather(self, x):
        return np.array([self.size, x[0]])


@pytest.mark.parametrize("size", [-1, 0, objects.MOST_BYTES + 1, 1 << 62, -(1 << 63)])
def test_invalid_object_sizes_are_refused(size):
    with pytest.raises(Corrupted, match=f"rank 0 announces an object of {size} bytes"):
        object_collectives.broadcast_object(Announced(size), None, 0, False)
    with pytest.raises(Corrupted, match=f"rank 0 announces an object of {size} bytes"):
        object_collectives.gather_objects(Announced(size), "mine", None, False)


@pytest.mark.parametrize("count", [-1, (1 << 48) + 1])
def test_invalid_send_counts_are_refused(count):
    class Comm(Announced):
        def all_gather(self, x):
            return np.array([[1, count], x[0]])

    with pytest.raises(BadArgument, match="rank 0 gave invalid send_counts"):
        object_collectives.exchange_counts(Comm(0), np.ones(2), [1, 1], None)
