"""Frames: the native core and the reference say the same, and no damage is believed."""

import random

import numpy as np
import pytest
import reference_wire as wire
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono import _native

KEY = bytes(range(16))
WAYS = _native.crc32c_ways()

# From RFC 3720 (iSCSI), and the one that everybody gives.
KNOWN = {
    b"123456789": 0xE3069283,
    bytes(32): 0x8A9136AA,
    b"\xff" * 32: 0x62A8AB43,
    bytes(range(32)): 0x46DD794E,
    bytes(range(31, -1, -1)): 0x113FDB5C,
    b"": 0,
}


def test_table_checksum_is_always_available():
    assert WAYS[-1] == "table"


@pytest.mark.parametrize("way", range(len(WAYS)), ids=WAYS)
def test_checksum_has_known_values(way):
    for data, expected in KNOWN.items():
        assert _native.crc32c(data, way=way) == expected
        assert wire.crc32c(data) == expected


def test_checksum_implementations_agree_at_every_length_and_offset():
    data = np.random.default_rng(1).integers(0, 256, 40_000, dtype=np.uint8)
    lengths = [*range(1100), 2048, 4095, 12_287, 12_288, 12_289, 16_384, 39_000]
    for i, length in enumerate(lengths):
        part = data[i % 67 : i % 67 + length]
        found = {_native.crc32c(part, i * 7919, way) for way in range(len(WAYS))}
        assert len(found) == 1, length


@given(st.binary(max_size=1500), st.integers(0, 2**32 - 1), st.floats(0, 1))
@settings(max_examples=60)
def test_checksum_in_parts_equals_that_of_the_whole(data, seed, place):
    cut = int(place * len(data))
    expected = wire.crc32c(data, seed)
    for way in range(len(WAYS)):
        first = _native.crc32c(data[:cut], seed, way)
        assert _native.crc32c(data[cut:], first, way) == expected


def test_unknown_checksum_implementation_is_refused():
    with pytest.raises(ValueError, match="no such way"):
        _native.crc32c(b"", way=len(WAYS))


def test_keyed_checksum_has_known_values():
    # From the paper and its reference code: the key and the data count upwards.
    expected = {0: 0x726FDB47DD0E0E31, 8: 0x93F5F5799A932462, 15: 0xA129CA6149BE45E5}
    for length, value in expected.items():
        assert _native.siphash(KEY, bytes(range(length))) == value
        assert wire.siphash(KEY, bytes(range(length))) == value


@given(st.binary(min_size=16, max_size=16), st.binary(max_size=300))
@settings(max_examples=60)
def test_keyed_checksum_equals_the_reference(key, data):
    assert _native.siphash(key, data) == wire.siphash(key, data)


WORDS = {
    "flags": st.integers(0, 2**16 - 1),
    "call": st.integers(0, 2**64 - 1),
    "fingerprint": st.integers(0, 2**64 - 1),
    "piece": st.integers(0, 2**32 - 1),
    "message": st.integers(0, 2**32 - 1),
}


@given(
    st.lists(st.tuples(st.binary(max_size=200), st.fixed_dictionaries(WORDS))),
    st.integers(0, 2**32 - 1),
    st.randoms(use_true_random=False),
)
@settings(max_examples=60)
def test_sealed_frames_equal_the_reference(frames, epoch, rng):
    seal = _native.Seal(KEY, epoch)
    stream, expected = b"", []
    for number, (payload, words) in enumerate(frames):
        kind = rng.choice((wire.DATA, wire.NOTE, wire.CONTROL))
        head = seal.seal(payload, kind, **words)
        fields = {"kind": kind, "epoch": epoch, "number": number}
        assert head + payload == wire.frame(KEY, payload, **fields, **words)
        stream += head + payload
        expected.append((head, payload))
    assert received(stream, epoch, rng) == (expected, "none")


def received(stream, epoch, rng):
    """What comes out of a stream that arrives in random cuts."""
    reader = _native.FrameReader(KEY, epoch, 200)
    found = []
    while stream:
        cut = rng.randint(1, 150)
        found += reader.feed(stream[:cut])
        stream = stream[cut:]
    return found, reader.flaw()


CHANGED = {
    "none": {},
    "magic": {"magic": b"HTTP"},
    "mac": {"mac": 12345},
    "epoch": {"epoch": 8},
    "number": {"number": 1},
    "kind": {"kind": 4},
    "length": {"length": 101},
}


@pytest.mark.parametrize("name", CHANGED)
def test_every_invalid_header_field_is_named(name):
    made = wire.frame(KEY, b"x" * 100, **({"epoch": 7} | CHANGED[name]))
    assert _native.Seal(KEY, 7).check(made[:64], 100) == name
    assert wire.flaw(KEY, 7, 0, 100, made[:64]) == name


@given(st.dictionaries(st.sampled_from(wire.FIELDS[1:12]), st.integers(0, 9)))
@settings(max_examples=200)
def test_header_check_equals_the_reference(changed):
    header = wire.frame(KEY, b"", **changed)[:64]
    expected = wire.flaw(KEY, 3, 0, 5, header)
    assert _native.Seal(KEY, 3).check(header, 5) == expected


def test_refused_header_does_not_advance_the_number():
    seal = _native.Seal(KEY, 0)
    first, second = (wire.frame(KEY, b"", number=i) for i in range(2))
    assert [seal.check(h, 0) for h in (second, first, first, second)] == [
        "number",
        "none",
        "number",
        "none",
    ]


def test_every_flipped_bit_is_detected():
    payload = b"sixteen bytes ok"
    made = wire.frame(KEY, payload)
    for bit in range(8 * len(made)):
        wrong = bytearray(made)
        wrong[bit // 8] ^= 1 << bit % 8
        reader = _native.FrameReader(KEY, 0, 64)
        assert reader.feed(wrong) == []
        where = bit // 8
        found = "magic" if where < 4 else "mac" if where < 64 else "payload"
        assert reader.flaw() == found


def test_nothing_is_read_after_an_invalid_header():
    first, second = (wire.frame(KEY, b"abc", number=i) for i in range(2))
    reader = _native.FrameReader(KEY, 0, 64)
    assert reader.feed(b"?" + first) == []
    assert reader.flaw() == "magic"
    assert reader.feed(first + second) == []


def test_end_of_stream_inside_a_frame_is_detected():
    made = wire.frame(KEY, b"abc")
    for cut in range(1, len(made)):
        reader = _native.FrameReader(KEY, 0, 64)
        assert reader.feed(made[:cut]) == []
        assert reader.inside()
        assert len(reader.feed(made[cut:])) == 1
        assert not reader.inside()


def test_huge_length_is_refused_before_reading_the_payload():
    made = wire.frame(KEY, b"", length=2**32 - 1)
    reader = _native.FrameReader(KEY, 0, 64)
    reader.feed(made)
    assert reader.flaw() == "length"


def test_payload_of_another_length_fails_the_check():
    seal = _native.Seal(KEY, 0)
    head = seal.seal(b"abc", wire.DATA)
    assert seal.check_payload(head, b"abc")
    assert not seal.check_payload(head, b"abd")
    assert not seal.check_payload(head, b"abcd")


@pytest.mark.parametrize("size", [0, 15, 17])
def test_key_of_another_size_is_refused(size):
    with pytest.raises(ValueError, match="16 bytes"):
        _native.Seal(bytes(size), 0)
    with pytest.raises(ValueError, match="16 bytes"):
        _native.siphash(bytes(size), b"")


def test_header_of_another_size_is_refused():
    with pytest.raises(ValueError, match="64 bytes"):
        _native.Seal(KEY, 0).check(bytes(63), 0)


def test_million_damaged_streams_give_no_damaged_frame():
    seed = random.randrange(2**63)
    counts = _native.fuzz_frames(seed, 1_000_000)
    assert counts["wrong"] == 0, f"_native.fuzz_frames({seed}, 1_000_000): {counts}"
    assert counts["streams"] == 1_000_000
    # The damage is of every kind, and what lies before it is read.
    assert all(counts[name] > 1000 for name in (*CHANGED, "payload", "cut off"))
    assert counts["frames"] > 100_000


def test_fuzzing_is_determined_by_the_seed():
    assert _native.fuzz_frames(5, 1000) == _native.fuzz_frames(5, 1000)
    assert _native.fuzz_frames(5, 1000) != _native.fuzz_frames(6, 1000)
