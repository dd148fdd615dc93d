"""Fits give back what the times were made of, and say how sure they are."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.errors import BadArgument
from unisono.tune.fit import fit

SIZES = [8 << (2 * k) for k in range(11)]


def times(sizes, latency, byte, *, noise=0.0, seed=0):
    random = np.random.default_rng(seed)
    exact = np.array([latency + byte * s for s in sizes])
    return (exact * (1 + noise * random.standard_normal(len(sizes)))).tolist()


@settings(max_examples=40)
@given(latency=st.floats(1e-7, 1e-3), byte=st.floats(1e-11, 1e-8))
def test_straight_line_is_fitted_by_one_segment(latency, byte):
    found = fit(SIZES, times(SIZES, latency, byte))
    assert len(found.pieces) == 1
    assert found.pieces[0].latency == pytest.approx(latency, rel=1e-6)
    assert found.pieces[0].byte == pytest.approx(byte, rel=1e-6)
    assert found.error < 1e-6
    assert found.at(1 << 30) == pytest.approx(latency + byte * (1 << 30), rel=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_noise_widens_the_errors_and_leaves_the_values(seed):
    sizes = SIZES * 8
    found = fit(sizes, times(sizes, 5e-6, 1e-10, noise=0.03, seed=seed))
    for size in (8, 1 << 23):
        assert found.at(size) == pytest.approx(5e-6 + 1e-10 * size, rel=0.06)
    first, last = found.pieces[0], found.pieces[-1]
    assert 0 < first.latency_error < 0.2 * first.latency
    assert 0 < last.byte_error < 0.2 * last.byte
    assert 0.01 < found.error < 0.06


def test_confidence_intervals_contain_the_truth_as_often_as_stated():
    held, sizes = 0, SIZES * 4
    for seed in range(60):
        piece = fit(sizes, times(sizes, 5e-6, 1e-10, noise=0.05, seed=seed)).pieces[0]
        held += abs(piece.latency - 5e-6) <= piece.latency_error
    assert held >= 48  # of 60; 57 are to be expected


def test_link_with_two_regimes_has_two_segments():
    slow, fast = SIZES[:6], SIZES[6:]
    result = times(slow, 2e-6, 1e-9) + times(fast, 20e-6, 1e-10)
    found = fit(SIZES * 3, np.tile(result, 3) * (1 + 0.001 * np.sin(np.arange(33))))
    assert len(found.pieces) == 2
    first, last = found.pieces
    assert first.upto == slow[-1]
    assert last.lower == fast[0]
    assert first.byte == pytest.approx(1e-9, rel=0.05)
    assert last.latency == pytest.approx(20e-6, rel=0.05)
    assert last.bandwidth == pytest.approx(1e10, rel=0.05)


def test_fitted_costs_are_not_negative():
    piece = fit([8, 16, 32, 64], [4e-6, 3e-6, 2e-6, 1e-6]).pieces[0]
    assert piece.byte == 0.0
    assert piece.latency > 0
    assert piece.bandwidth == math.inf


@pytest.mark.parametrize(
    ("sizes", "seconds", "message"),
    [
        ([8], [1e-6], "needs two"),
        ([8, 8], [1e-6, 2e-6], "needs two"),
        ([8, 16], [1e-6], "expected equal numbers"),
        ([8, 16], [1e-6, 0.0], "above 0"),
        ([8, 16], [1e-6, math.nan], "above 0"),
        ([-8, 16], [1e-6, 1e-6], "not below"),
    ],
)
def test_invalid_samples_are_refused(sizes, seconds, message):
    with pytest.raises(BadArgument, match=message):
        fit(sizes, seconds)
