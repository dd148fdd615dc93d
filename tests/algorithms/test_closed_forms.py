"""Every all_reduce costs, to the last bit, what theory says."""

from fractions import Fraction
from math import prod

import pytest
from closed_forms import (
    EVERY,
    OTHERS,
    POWERS,
    Count,
    Formula,
    Law,
    Terms,
    ceil_log2,
    check,
    counted,
    exact,
    floor_log2,
    ones,
    power_below,
    share,
    through_levels,
)

from unisono import schedule


def optimal_in(rounds: Count) -> Formula:
    """Bytes and reductions both the least possible, in so many rounds."""
    return lambda p: (rounds(p), 2 * share(p), share(p))


def alike(term: Count) -> Formula:
    """Rounds, buffers and sums all the same number."""
    return lambda p: (term(p), term(p), term(p))


def one_server(p: int) -> Terms:
    return 2 * (p - 1), 2 * (p - 1), p - 1


def tree(p: int) -> Terms:
    return 2 * ceil_log2(p), 2 * ceil_log2(p), ceil_log2(p)


def tree_of_radix(k: int) -> Formula:
    """For p = k^m: every level is k-1 messages."""

    def terms(p: int) -> Terms:
        levels = next(m for m in range(10) if k**m >= p)
        return 2 * (k - 1) * levels, 2 * (k - 1) * levels, (k - 1) * levels

    return terms


def chain_of(m: int) -> Formula:
    def terms(p: int) -> Terms:
        return 2 * (p - 2 + m), Fraction(2 * (p - 2 + m), m), Fraction(p - 2 + m, m)

    return terms


def doubling_folded(p: int) -> Terms:
    return floor_log2(p) + 2, floor_log2(p) + 2, floor_log2(p) + 1


def carried(p: int) -> Terms:
    buffers = ceil_log2(p) + ones(p) - 2
    return ceil_log2(p), buffers, buffers


def halving_folded(p: int) -> Terms:
    q, levels = power_below(p), floor_log2(p)
    return 2 * levels + 2, 4 - Fraction(2, q), 2 - Fraction(1, q)


def half_exchange(p: int) -> Terms:
    q, levels = power_below(p), floor_log2(p)
    return 2 * levels + 3, 4 - Fraction(2, q), Fraction(3, 2) - Fraction(1, q)


def free_round(p: int) -> Terms:
    return 2 * ceil_log2(p) - 1, 2 * share(p), 1


def hybrid(early: int) -> Formula:
    """d levels of halving, the rest of doubling, d of gathering."""

    def terms(p: int) -> Terms:
        rest = min(early, ceil_log2(p))
        d = ceil_log2(p) - rest
        left = Fraction(1, 2**d)
        return ceil_log2(p) + d, 2 * (1 - left) + rest * left, (1 - left) + rest * left

    return terms


def prime_factors(p: int) -> list[int]:
    return next(
        ([d, *prime_factors(p // d)] for d in range(2, p + 1) if p % d == 0), []
    )


def around(p: int) -> int:
    return 2 * (p - 1)


def two_logs(p: int) -> int:
    return 2 * int(ceil_log2(p))


FOLDED = [p for p in EVERY if p > 3 and prime_factors(p) == [p]]
"""What a butterfly folds onto a power of two."""

LAWS = [
    Law("all_reduce", "naive", EVERY, alike(lambda p: p - 1)),
    Law("all_reduce", "parameter_server", EVERY, one_server),
    Law("all_reduce", "parameter_server:sharded", EVERY, optimal_in(around)),
    Law("all_reduce", "direct", EVERY, optimal_in(around)),
    Law("all_reduce", "direct:rotate", EVERY, optimal_in(around)),
    Law("all_reduce", "tree", EVERY, tree),
    Law("all_reduce", "tree:radix=3", [3, 9, 27], tree_of_radix(3)),
    Law("all_reduce", "tree:radix=4", [4, 16, 64], tree_of_radix(4)),
    Law("all_reduce", "chain", EVERY, chain_of(4)),
    Law("all_reduce", "chain:segments=1", EVERY, chain_of(1)),
    Law("all_reduce", "chain:segments=7", EVERY, chain_of(7)),
    Law("all_reduce", "ring", EVERY, optimal_in(around)),
    Law("all_reduce", "recursive_doubling", POWERS, alike(ceil_log2)),
    Law("all_reduce", "recursive_doubling", OTHERS, doubling_folded),
    Law("all_reduce", "dissemination", POWERS, alike(ceil_log2)),
    Law("all_reduce", "dissemination:carry", POWERS, alike(ceil_log2)),
    Law("all_reduce", "dissemination:carry", OTHERS, carried),
    Law("all_reduce", "halving_doubling", POWERS, optimal_in(two_logs)),
    Law("all_reduce", "halving_doubling", OTHERS, halving_folded),
    Law("all_reduce", "halving_doubling:blocks", POWERS, optimal_in(two_logs)),
    Law("all_reduce", "rabenseifner", POWERS, optimal_in(two_logs)),
    Law("all_reduce", "rabenseifner", OTHERS, half_exchange),
    Law("all_reduce", "rabenseifner:early=1", POWERS, free_round),
    *(
        Law("all_reduce", f"rabenseifner:early={e}", POWERS, hybrid(e))
        for e in (1, 2, 3, 5, 99)
    ),
    Law("all_reduce", "circulant", EVERY, optimal_in(two_logs)),
    Law("all_reduce", "pat", EVERY, optimal_in(two_logs)),
    Law("all_reduce", "swing", POWERS, optimal_in(two_logs)),
    Law("all_reduce", "swing", OTHERS, halving_folded),
    Law(
        "all_reduce",
        "butterfly",
        [p for p in EVERY if p not in FOLDED],
        optimal_in(lambda p: 2 * sum(f - 1 for f in prime_factors(p))),
    ),
    Law("all_reduce", "butterfly", FOLDED, halving_folded),
    Law(
        "all_reduce",
        "butterfly:radix=4",
        [4, 16, 64],
        optimal_in(lambda p: 3 * ceil_log2(p)),
    ),
    Law("all_reduce", "butterfly:radix=64", EVERY, optimal_in(around)),
]


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_cost_equals_the_closed_form(law):
    check(law)


@pytest.mark.parametrize("p", EVERY)
def test_one_parameter_server_costs_a_naive_reduce_and_a_naive_broadcast(p):
    joined = schedule("reduce", "naive", p).then(schedule("broadcast", "naive", p))
    assert counted(joined) == (p, *exact(one_server(p)))


@pytest.mark.parametrize("p", POWERS)
def test_double_tree_takes_four_rounds_per_level_less_two(p):
    assert (
        schedule("all_reduce", "double_tree", p).cost().rounds == 4 * ceil_log2(p) - 2
    )


@pytest.mark.parametrize("m", [1, 4, 32])
def test_double_tree_with_more_segments_approaches_two_buffers_sent_and_one_reduced(m):
    for p in EVERY:
        cost = schedule("all_reduce", f"double_tree:segments={m}", p).cost()
        assert cost.span <= 2 + 2 * Fraction(ceil_log2(p), m)
        assert cost.work <= 1 + Fraction(ceil_log2(p), m)


@pytest.mark.parametrize("p", EVERY)
def test_bidirectional_ring_halves_the_steps_and_moves_the_same_bytes(p):
    cost = schedule("all_reduce", "ring:both", p).cost()
    assert cost.steps == 2 * (p // 2)
    assert (cost.span, cost.work) == exact((2 * share(p), share(p)))


@pytest.mark.parametrize("p", OTHERS)
def test_dissemination_has_the_fewest_steps_and_messages_received(p):
    cost = schedule("all_reduce", "dissemination", p).cost()
    assert cost.steps == cost.received.max() == cost.work == ceil_log2(p)
    assert ceil_log2(p) <= cost.rounds == cost.span <= 2 * ceil_log2(p)


@pytest.mark.parametrize(
    ("g", "hosts"), [(2, 2), (4, 3), (3, 4), (8, 8), (5, 7), (1, 6)]
)
def test_rings_on_two_levels_have_the_closed_form(g, hosts):
    p = g * hosts
    bytes_ = 2 * share(g) + Fraction(2 * (hosts - 1), g * hosts)
    terms = 2 * (g - 1) + 2 * (hosts - 1), bytes_, share(p)
    made = schedule("all_reduce", f"hierarchical:levels={g}x{hosts}", p)
    assert counted(made) == (p, *exact(terms))


@pytest.mark.parametrize("sizes", [[2, 4, 3], [3, 3, 3], [2, 2, 2, 2, 2], [4, 2, 8]])
def test_rings_on_any_number_of_levels_have_the_closed_form(sizes):
    levels = "x".join(str(size) for size in sizes)
    p = prod(sizes)
    terms = sum(2 * (s - 1) for s in sizes), 2 * through_levels(sizes), share(p)
    made = schedule("all_reduce", f"hierarchical:levels={levels}", p)
    assert counted(made) == (p, *exact(terms))


@pytest.mark.parametrize(
    ("shape", "side", "dims"),
    [("4x4", 4, 2), ("8x8", 8, 2), ("3x3x3", 3, 3), ("7", 7, 1)],
)
def test_torus_loads_every_link_equally(shape, side, dims):
    p = side**dims
    cost = schedule("all_reduce", f"torus:shape={shape}", p).cost()
    assert cost.steps == 2 * dims * (side - 1)
    assert (cost.span, cost.work) == exact((2 * share(p), share(p)))
    busy = cost.pairs[cost.pairs > 0]
    assert busy.size == p * 2 * dims
    assert busy == pytest.approx(float(2 * share(p) / (2 * dims)), rel=1e-12)


THIRTEEN = {
    "ring": (24, Fraction(24, 13), Fraction(12, 13)),
    "recursive_doubling": (5, 5, 4),
    "dissemination:carry": (4, 5, 5),
    "halving_doubling": (8, Fraction(15, 4), Fraction(15, 8)),
    "rabenseifner": (9, Fraction(15, 4), Fraction(11, 8)),
    "circulant": (8, Fraction(24, 13), Fraction(12, 13)),
}


@pytest.mark.parametrize("name", THIRTEEN)
def test_thirteen_ranks_cost_as_in_the_reference(name):
    made = schedule("all_reduce", name, 13)
    assert counted(made) == (13, *exact(THIRTEEN[name]))


@pytest.mark.parametrize("what", ["all_reduce", "reduce_scatter", "all_gather"])
def test_butterfly_of_a_prime_has_fewer_rounds_than_a_ring(what):
    """From 7 on, an all_reduce from 5 on; smaller ones have as many."""
    for p in FOLDED:
        made, ring = schedule(what, "butterfly", p), schedule(what, "ring", p)
        rounds = made.verify().schedule.cost().rounds
        logs = p.bit_length() - 1
        if p == 5 and what != "all_reduce":
            assert rounds == ring.cost().rounds == 4
        else:
            assert rounds == (2 if what == "all_reduce" else 1) * logs + 2
            assert rounds < ring.cost().rounds
