"""All collectives but all_reduce cost, to the last bit, what theory says."""

from collections.abc import Callable
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
    Number,
    Terms,
    ceil_log2,
    check,
    counted,
    exact,
    floor_log2,
    share,
    through_levels,
)

from unisono import schedule

ADDING = ("reduce", "reduce_scatter")


def others(p: int) -> int:
    return p - 1


def digits(p: int, radix: int) -> int:
    """How many digits the numbers below p have."""
    return next(m for m in range(20) if radix**m >= p)


def sharing(what: str, rounds: Count, times: int = 1) -> Formula:
    """The least bytes, so many times, in so many rounds; and sums if there are any."""
    adds = share if what in ADDING else lambda _: 0
    return lambda p: (rounds(p), times * share(p), adds(p))


def whole(what: str, term: Count) -> Formula:
    """As many buffers as rounds, and as many sums where there are any."""
    return lambda p: (term(p), term(p), term(p) if what in ADDING else 0)


def chain_of(what: str, m: int) -> Formula:
    def terms(p: int) -> Terms:
        buffers = Fraction(p - 2 + m, m)
        return p - 2 + m, buffers, buffers if what in ADDING else 0

    return terms


def laws_of(
    names: list[str],
    whats: list[str],
    make: Callable[[str], Formula],
    worlds: list[int] = EVERY,
) -> list[Law]:
    return [Law(w, name, worlds, make(w)) for w in whats for name in names]


ONE_WAY = ["broadcast", "reduce"]
SHARES = ["scatter", "gather"]
HALVES = ["all_gather", "reduce_scatter"]
LAWS = [
    *laws_of(["naive"], ONE_WAY, lambda w: whole(w, others)),
    *laws_of(["tree"], ONE_WAY, lambda w: whole(w, ceil_log2)),
    *laws_of(
        ["tree:radix=3"],
        ONE_WAY,
        lambda w: whole(w, lambda p: 2 * digits(p, 3)),
        [3, 9, 27],
    ),
    *laws_of(
        ["tree:radix=4"],
        ONE_WAY,
        lambda w: whole(w, lambda p: 3 * digits(p, 4)),
        [4, 16, 64],
    ),
    *laws_of(["chain"], ONE_WAY, lambda w: chain_of(w, 4)),
    *laws_of(["chain:segments=1"], ONE_WAY, lambda w: chain_of(w, 1)),
    *laws_of(["chain:segments=9"], ONE_WAY, lambda w: chain_of(w, 9)),
    *laws_of(
        ["naive", "direct", "direct:rotate"], SHARES, lambda w: sharing(w, others)
    ),
    *laws_of(["tree"], SHARES, lambda w: sharing(w, ceil_log2)),
    *laws_of(["ring", "direct", "direct:rotate"], HALVES, lambda w: sharing(w, others)),
    *laws_of(["circulant", "pat"], HALVES, lambda w: sharing(w, ceil_log2)),
    *laws_of(["pat:aggregate=1"], HALVES, lambda w: sharing(w, others)),
    *laws_of(
        ["halving_doubling", "halving_doubling:blocks", "swing", "butterfly"],
        HALVES,
        lambda w: sharing(w, ceil_log2),
        POWERS,
    ),
    Law("all_gather", "recursive_doubling", POWERS, sharing("all_gather", ceil_log2)),
    Law(
        "broadcast",
        "tree+ring",
        EVERY,
        lambda p: (ceil_log2(p) + p - 1, 2 * share(p), 0),
    ),
    Law(
        "broadcast",
        "tree+circulant",
        EVERY,
        lambda p: (2 * ceil_log2(p), 2 * share(p), 0),
    ),
    Law(
        "reduce",
        "circulant+tree",
        EVERY,
        sharing("reduce", lambda p: 2 * ceil_log2(p), 2),
    ),
    Law(
        "reduce",
        "rabenseifner",
        POWERS,
        sharing("reduce", lambda p: 2 * ceil_log2(p), 2),
    ),
    Law("all_to_all", "direct", EVERY, sharing("all_to_all", others)),
    Law("all_to_all", "direct:rotate", EVERY, sharing("all_to_all", others)),
    Law("all_to_all", "bruck:radix=64", EVERY, sharing("all_to_all", others)),
    Law("all_to_all", "ring", EVERY, lambda p: (p - 1, Fraction(p - 1, 2), 0)),
    Law("barrier", "dissemination", EVERY, lambda p: (ceil_log2(p), 0, 0)),
]


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_cost_equals_the_closed_form(law):
    check(law)


@pytest.mark.parametrize("p", OTHERS)
@pytest.mark.parametrize("what", HALVES)
@pytest.mark.parametrize("name", ["halving_doubling", "swing"])
def test_folding_costs_two_rounds_and_about_one_more_buffer(name, what, p):
    cost = schedule(what, name, p).cost()
    assert cost.rounds == floor_log2(p) + 2
    assert 1 < cost.span < 3


@pytest.mark.parametrize("what", HALVES)
@pytest.mark.parametrize("p", EVERY)
def test_bidirectional_ring_halves_the_steps_and_moves_the_same_bytes(p, what):
    cost = schedule(what, "ring:both", p).cost()
    assert cost.steps == p // 2
    assert cost.span == float(share(p))


@pytest.mark.parametrize("p", EVERY)
def test_bidirectional_ring_all_to_all_uses_the_shorter_direction(p):
    cost = schedule("all_to_all", "ring:both", p).cost()
    assert cost.steps == p // 2
    assert cost.span == float(Fraction(sum(min(d, p - d) for d in range(p)), p))


@pytest.mark.parametrize("p", EVERY)
def test_bruck_moves_a_chunk_once_per_one_bit_of_its_distance(p):
    moved = Fraction(sum(f"{distance:b}".count("1") for distance in range(p)), p)
    made = schedule("all_to_all", "bruck", p)
    assert counted(made) == (p, *exact((ceil_log2(p), moved, 0)))


def test_bruck_with_13_ranks_moves_22_thirteenths():
    assert schedule("all_to_all", "bruck", 13).cost().span == 22 / 13


@pytest.mark.parametrize("radix", [3, 4, 5])
def test_bruck_of_any_radix_sends_one_message_per_digit_and_value(radix):
    for p in EVERY:
        cost = schedule("all_to_all", f"bruck:radix={radix}", p).cost()
        rounds = (radix - 1) * digits(p, radix)
        bytes_ = Fraction(radix - 1, radix) * digits(p, radix)
        if radix ** digits(p, radix) == p:
            assert (cost.rounds, cost.span) == exact((rounds, bytes_))
        assert cost.rounds <= rounds
        assert cost.span <= float(bytes_)


@pytest.mark.parametrize("radix", [3, 4, 5])
@pytest.mark.parametrize("what", [*ONE_WAY, *SHARES])
def test_k_nomial_tree_takes_at_most_k_minus_1_rounds_per_level(what, radix):
    for p in EVERY:
        cost = schedule(what, f"tree:radix={radix}", p).cost()
        assert cost.steps == digits(p, radix)
        assert cost.rounds <= (radix - 1) * digits(p, radix)


@pytest.mark.parametrize("what", ONE_WAY)
@pytest.mark.parametrize("p", EVERY)
def test_double_tree_takes_at_most_two_rounds_per_level_and_one(p, what):
    cost = schedule(what, "double_tree", p).cost()
    assert cost.rounds <= 2 * ceil_log2(p) + 1
    assert max(cost.sent.max(), cost.received.max()) <= 1


@pytest.mark.parametrize("what", ONE_WAY)
@pytest.mark.parametrize("m", [8, 32])
def test_double_tree_with_segments_costs_its_segments_and_two_rounds_per_level(m, what):
    for p in EVERY:
        cost = schedule(what, f"double_tree:segments={m}", p).cost()
        assert cost.rounds <= 2 * ceil_log2(p) + 2 * m
        assert cost.span <= 1 + Fraction(ceil_log2(p), m)


@pytest.mark.parametrize("what", HALVES)
@pytest.mark.parametrize("sizes", [[4, 3], [5, 7], [2, 4, 3], [2, 2, 2, 2, 2]])
def test_rings_on_levels_have_the_closed_form(sizes, what):
    p, levels = prod(sizes), "x".join(str(size) for size in sizes)
    made = schedule(what, f"hierarchical:levels={levels}", p)
    adds = share(p) if what in ADDING else 0
    terms = sum(size - 1 for size in sizes), through_levels(sizes), adds
    assert counted(made) == (p, *exact(terms))


@pytest.mark.parametrize(("g", "hosts"), [(4, 3), (3, 4), (8, 8), (5, 7)])
def test_all_to_all_on_two_levels_has_the_closed_form(g, hosts):
    p = g * hosts
    made = schedule("all_to_all", f"hierarchical:levels={g}x{hosts}", p)
    assert counted(made) == (p, *exact((g - 1 + hosts - 1, share(g) + share(hosts), 0)))


BOUNDS: dict[str, Callable[[int], tuple[Number, Number]]] = {
    "broadcast": lambda p: (1, 0),
    "reduce": lambda p: (1, share(p)),
    "scatter": lambda p: (share(p), 0),
    "gather": lambda p: (share(p), 0),
    "all_gather": lambda p: (share(p), 0),
    "reduce_scatter": lambda p: (share(p), share(p)),
    "all_reduce": lambda p: (2 * share(p), share(p)),
    "all_to_all": lambda p: (share(p), 0),
    "barrier": lambda p: (0, 0),
}


@pytest.mark.cases(2)
@pytest.mark.parametrize("what", BOUNDS)
def test_lower_bound_is_that_of_the_literature(what):
    for p in EVERY:
        least = schedule(what, "hierarchical", p).cost().bound
        assert least.rounds == ceil_log2(p)
        expected = exact(BOUNDS[what](p))
        assert (least.span, least.work) == pytest.approx(expected, rel=1e-12)
