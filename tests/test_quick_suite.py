"""What conftest.py makes less of, where sweeps are not run."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st


@settings(max_examples=100)
@given(st.integers())
def test_made_up_number_is_one(number):
    assert isinstance(number, int)


def test_hypothesis_makes_a_quarter_of_the_examples(pytestconfig):
    if pytestconfig.option.markexpr != "not sweep":
        pytest.skip("with sweeps it makes all examples")
    made = test_made_up_number_is_one._hypothesis_internal_use_settings
    assert made.max_examples == 25
