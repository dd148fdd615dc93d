"""Placements are written as short texts and read back, and nothing else is read."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono import UnsupportedWorld
from unisono.errors import BadArgument
from unisono.schedule.placement import numbered, parse_hosts, written

law = settings(max_examples=200)
placements = st.lists(st.integers(0, 5), min_size=1, max_size=40)

WRITTEN = {
    "0": [0],
    "0x3": [0, 0, 0],
    "0x5.1x4.2x4": [0] * 5 + [1] * 4 + [2] * 4,
    "0-3x2": [0, 1, 2, 3] * 2,
    "0-3": [0, 1, 2, 3],
    "0.1x2.0": [0, 1, 1, 0],
    "0x2.1x2.0x2.1x2": [0, 0, 1, 1, 0, 0, 1, 1],
    "3-4x3.0": [3, 4, 3, 4, 3, 4, 0],
}


@pytest.mark.parametrize("text", WRITTEN)
def test_placement_has_one_short_text(text):
    assert written(WRITTEN[text]) == text
    assert parse_hosts(text, len(WRITTEN[text])).tolist() == WRITTEN[text]


@law
@given(placements)
def test_written_placement_is_parsed_back(hosts):
    assert parse_hosts(written(hosts), len(hosts)).tolist() == hosts


@law
@given(placements)
def test_hosts_are_numbered_by_their_first_ranks(hosts):
    found = numbered([f"node{h}" for h in hosts])
    assert found == numbered(hosts) == numbered(found)
    assert found[0] == 0
    assert all(h <= max(found[:r]) + 1 for r, h in enumerate(found) if r)
    for a in range(len(hosts)):
        assert [h == found[a] for h in found] == [h == hosts[a] for h in hosts]


@pytest.mark.parametrize(
    "text", ["", ".", "0..1", "a", "0x", "0x0", "x3", "3-1", "0-", "0 1", "-1", "0,1"]
)
def test_invalid_texts_are_refused_with_the_expected_form(text):
    with pytest.raises(BadArgument, match=r"0\.1\.0\.1"):
        parse_hosts(text, 4)


@pytest.mark.parametrize("text", ["0.1", "0x5", "0-1x3", "0x999999999", "0-999999999"])
def test_wrong_number_of_ranks_is_refused_before_allocation(text):
    with pytest.raises(UnsupportedWorld, match="there are 4") as refused:
        parse_hosts(text, 4)
    assert refused.value.n == 4
