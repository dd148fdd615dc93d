"""What top-k, random-k and PowerSGD send of a tensor, and how they are spelled."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.codecs.feedback import Feedback
from unisono.codecs.options import is_scheme, scheme
from unisono.codecs.powersgd import PowerSGD, first_guess, orthogonal, product
from unisono.codecs.randomk import RandomK, drawn, numbers
from unisono.codecs.topk import TopK, largest, packed, unpacked
from unisono.errors import BadArgument

FLOATS = st.lists(st.floats(width=32), max_size=40)


@settings(max_examples=60)
@given(FLOATS, st.integers(0, 40))
def test_topk_selects_the_largest_magnitudes(values, k):
    x = np.array(values, np.float32)
    k = min(k, x.size)
    places = largest(x, k)
    assert places.size == k
    assert (np.diff(places) > 0).all()
    size = np.where(np.isnan(x), np.inf, np.abs(x))  # NaN is as large as can be
    rest = np.delete(size, places)
    assert k in (0, x.size) or size[places].min() >= rest.max()


def test_topk_ties_go_to_lowest_index():
    x = np.array([1, -2, 2, 1, 2], np.float32)
    assert largest(x, 2).tolist() == [1, 2]
    assert largest(x, 4).tolist() == [0, 1, 2, 4]


def test_topk_ranks_nan_above_infinity():
    x = np.array([3, np.inf, -np.nan, 4], np.float32)
    assert largest(x, 1).tolist() == [2]


@settings(max_examples=30)
@given(FLOATS)
def test_pairs_are_packed_and_unpacked_unchanged(values):
    x = np.array(values, np.float32)
    places = np.arange(x.size) + (1 << 32) - 50
    pairs = packed(places, x)
    assert pairs.nbytes == 8 * x.size
    at, found = unpacked(pairs)
    assert at.tolist() == places.tolist()
    assert found.tobytes() == x.tobytes()


@settings(max_examples=60)
@given(st.integers(0, 500), st.floats(0, 1), st.integers(0, 1 << 40))
def test_randomk_selects_k_distinct_elements_in_order(elements, share, seed):
    k = int(share * elements)
    places = drawn(elements, k, seed)
    assert places.size == k
    assert (np.diff(places) > 0).all()
    assert not k or (places[0] >= 0 and places[-1] < elements)


def test_randomk_selects_every_element_equally_often():
    times = np.zeros(100)
    for seed in range(2000):
        times[drawn(100, 10, seed)] += 1
    assert times.min() > 120  # 200 expected, with a deviation of 13
    assert times.max() < 280


def test_randomk_selection_is_frozen():
    """Ranks may have other versions of anything: these numbers must never change."""
    assert numbers(7, 2).tolist() == [616627130639593526, 8922196704502046250]
    assert drawn(1000, 5, 3).tolist() == [39, 395, 530, 760, 801]


def test_powersgd_columns_become_orthogonal():
    p = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
    p[:, 2] = 2 * p[:, 0]  # nothing is left of it
    q = orthogonal(p)
    np.testing.assert_allclose(q.T @ q, np.diag([1, 1, 0, 1]), atol=1e-6)
    assert not orthogonal(np.zeros((5, 2), np.float32)).any()
    assert np.isnan(orthogonal(np.full((5, 1), np.nan, np.float32))).all()


def test_powersgd_recovers_a_low_rank_matrix():
    source = np.random.default_rng(1)
    m = source.normal(size=(30, 2)) @ source.normal(size=(2, 20))
    m = m.astype(np.float32)
    p = orthogonal(m @ first_guess(20, 2, 0))
    np.testing.assert_allclose(product(p, m.T @ p), m, atol=1e-4)


def test_powersgd_leaves_small_matrices_uncompressed():
    how = PowerSGD(4)
    assert how.sizes((100,)) is None
    assert how.sizes((6, 8)) is None
    assert how.sizes((10, 3, 5)) == (10, 15, 4)
    assert how.sizes((40, 2)) is None


# --- feedback


def test_error_feedback_sends_the_rest_later():
    memory = {}
    feedback = Feedback(memory, 4)
    assert feedback.wanted(np.float32([1, 2, 3, 4])).tolist() == [1, 2, 3, 4]
    feedback.sent(np.array([3]))
    assert feedback.wanted(np.float32([1, 1, 1, 1])).tolist() == [2, 3, 4, 1]
    feedback.sent_coarse(np.float32([2, 2, 2, 2]))
    assert memory["residual"].tolist() == [0, 1, 2, -1]


def test_error_feedback_with_momentum_keeps_velocities():
    """Both elements get the same in all, though one of them waited."""
    feedback, total = Feedback({}, 2, momentum=0.5), np.zeros(2)
    for gradient, sent in ([4, 4], [0]), ([0, 0], [0]), ([0, 0], [0, 1]):
        wanted = feedback.wanted(np.float32(gradient))
        total[sent] += wanted[sent]
        feedback.sent(np.array(sent))
    assert total.tolist() == [4, 4 + 2 + 1]


def test_error_feedback_sends_nonfinite_values_and_keeps_none():
    feedback = Feedback({}, 3, momentum=0.9)
    wanted = feedback.wanted(np.float32([np.nan, np.inf, 1]))
    assert np.isnan(wanted[0])
    feedback.sent(np.array([0]))
    assert feedback.residual.tolist() == [0, 0, 1]


def test_warm_up_goes_down_to_the_density():
    how = TopK(0.01, warmup=4)
    counts = [how.count(10_000, step) for step in range(6)]
    assert counts[0] == 2500
    assert counts[4:] == [100, 100]
    assert counts == sorted(counts, reverse=True)
    assert how.count(10_000) == 100


def test_warm_up_goes_down_to_k():
    how = TopK(k=10, warmup=2)
    assert [how.count(1000, step) for step in range(3)] == [250, 50, 10]
    assert [how.count(20, step) for step in range(3)] == [10, 10, 10]


def test_density_rounds_up_to_at_least_one_element():
    assert TopK(0.07).count(100) == 7
    assert RandomK(0.07).count(101) == 8
    assert TopK(0.01).count(3) == 1
    assert TopK().count(0) == 0


# --- how they are spelled


def test_scheme_names_and_options_are_parsed():
    assert scheme("topk:0.05") == TopK(0.05)
    assert scheme("topk") == TopK()
    assert scheme("topk:k=7,momentum=0.9,warmup=5") == TopK(k=7, momentum=0.9, warmup=5)
    assert scheme("randomk:0.1,seed=3") == RandomK(0.1, seed=3)
    assert scheme("powersgd:2") == PowerSGD(2)
    assert scheme(PowerSGD(1)) == PowerSGD(1)
    assert is_scheme("topk:1")
    assert is_scheme(TopK())
    assert not is_scheme("fp8")
    assert not is_scheme(None)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("topk:0", "density = 0.0: expected more than 0"),
        ("topk:1.5", "1 % is 0.01"),
        ("topk:nan", "density"),
        ("topk:k=-1", "k = -1: expected 1 or more"),
        ("topk:k=x", "k = 'x': expected a whole number"),
        ("topk:0.1,momentum=1", "momentum = 1.0"),
        ("topk:0.1,warmup=-1", "warmup = -1"),
        ("topk:density=0.1,mometum=0.9", "nearest: momentum"),
        ("randomk:2", "density"),
        ("randomk:0.1,seed=-1", "seed = -1"),
        ("powersgd:0", "rank = 0: expected 1 or more"),
        ("powersgd:1.5", "expected a whole number"),
        ("powersgd:1,warmup=-1", "warmup = -1"),
        ("tpk:0.1", "topk"),
    ],
)
def test_out_of_range_options_are_refused(spec, message):
    with pytest.raises(BadArgument, match=message):
        scheme(spec)


def test_unknown_scheme_names_are_refused():
    with pytest.raises(BadArgument, match="a float: expected a name such as"):
        scheme(0.01)


@pytest.mark.parametrize("how", [TopK(k=11), RandomK(k=11)])
def test_k_above_the_number_of_elements_is_refused(how):
    with pytest.raises(BadArgument, match="k = 11, but there are 10 elements"):
        how.count(10)
    assert how.count(11) == 11
