"""Sizes as people type and read them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.errors import BadArgument
from unisono.units import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("8", 8), ("32M", 32 << 20), ("1.5K", 1536), ("64KiB", 65536), ("2g", 2 << 30)],
)
def test_letters_are_powers_of_1024(text, nbytes):
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "M", "-3", "12X", "1e9", "5 apples"])
def test_nonsense_is_refused(text):
    with pytest.raises(BadArgument, match="as in 32M"):
        parse_bytes(text)


@given(st.integers(0, 1 << 50))
def test_what_is_printed_is_within_half_a_percent(nbytes):
    number, unit = format_bytes(nbytes).split()
    back = float(number) * 1024 ** ["B", "KiB", "MiB", "GiB", "TiB"].index(unit)
    assert abs(back - nbytes) <= 0.005 * nbytes
