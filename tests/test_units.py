"""Sizes as people type and read them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.errors import BadArgument
from unisono.units import (
    format_bandwidth,
    format_bytes,
    format_seconds,
    parse_bandwidth,
    parse_bytes,
    parse_rate,
    parse_seconds,
)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("8", 8), ("32M", 32 << 20), ("1.5K", 1536), ("64KiB", 65536), ("2g", 2 << 30)],
)
def test_suffixes_are_powers_of_1024(text, nbytes):
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "M", "-3", "12X", "1e9", "5 apples"])
def test_invalid_sizes_are_refused(text):
    with pytest.raises(BadArgument, match="as in 32M"):
        parse_bytes(text)


@given(st.integers(0, 1 << 50))
def test_printed_values_are_within_half_a_percent(nbytes):
    number, unit = format_bytes(nbytes).split()
    back = float(number) * 1024 ** ["B", "KiB", "MiB", "GiB", "TiB"].index(unit)
    assert abs(back - nbytes) <= 0.005 * nbytes


@pytest.mark.parametrize(
    ("text", "rate"),
    [("1gbit", 10**9), ("20mbit", 2 * 10**7), ("2.5 Gbit/s", 25 * 10**8), ("8bit", 8)],
)
def test_rates_are_bits_and_powers_of_1000(text, rate):
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["", "1", "1gb", "0bit", "-1mbit", "fast", "1e9bit"])
def test_invalid_rate_is_refused(text):
    with pytest.raises(BadArgument, match="as in 20mbit or 1gbit"):
        parse_rate(text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("5ms", 0.005), ("200us", 0.0002), ("0.5 s", 0.5), ("0s", 0)]
)
def test_durations_have_a_unit(text, seconds):
    assert parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "5", "ms", "-1ms", "1h"])
def test_invalid_duration_is_refused(text):
    with pytest.raises(BadArgument, match="as in 5ms"):
        parse_seconds(text)


@pytest.mark.parametrize(
    ("text", "rate"), [("25GB/s", 25e9), ("100 Gb/s", 12.5e9), ("8kbit/s", 1e3)]
)
def test_bandwidths_are_bytes_unless_they_say_bits(text, rate):
    assert parse_bandwidth(text) == pytest.approx(rate)


@pytest.mark.parametrize("text", ["", "25", "25GB", "GB/s", "-1GB/s"])
def test_invalid_bandwidth_is_refused(text):
    with pytest.raises(BadArgument, match="as in 25GB/s"):
        parse_bandwidth(text)


def test_times_and_bandwidths_have_short_text():
    assert [format_seconds(t) for t in (2, 1.5e-3, 2e-6, 3e-9, 0)] == [
        *("2 s", "1.5 ms", "2 µs", "3 ns", "0 ns")
    ]
    assert [format_bandwidth(r) for r in (12.5e9, 1e3, 5, 2e12)] == [
        *("12.5 GB/s", "1 kB/s", "5 B/s", "2 TB/s")
    ]
    assert parse_seconds("800ns") == pytest.approx(8e-7)
