"""Contracts: who holds what before and after, and how large every chunk is."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.errors import BadArgument
from unisono.schedule.collective import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BARRIER,
    BROADCAST,
    COLLECTIVES,
    GATHER,
    REDUCE,
    REDUCE_SCATTER,
    SCATTER,
    Collective,
    Contract,
    Holders,
    between,
    collective,
)

law = settings(max_examples=60)
worlds = st.integers(1, 9)
pieces = st.integers(1, 4)
counts = st.one_of(st.just(0), st.just(1), st.integers(0, 200))
OWNED = [c for c in COLLECTIVES.values() if c.owned and c is not ALL_TO_ALL]


def contract(what: Collective, n: int, cut: int = 1) -> Contract:
    return Contract(what, n, 0, what.chunk_multiple(n) * cut)


@law
@given(worlds, pieces, st.sampled_from(OWNED))
def test_chunks_belong_to_ranks_in_equal_consecutive_shares(n, cut, what):
    made = contract(what, n, cut)
    owner = made.owner(np.arange(made.num_chunks))
    assert owner.tolist() == [rank for rank in range(n) for _ in range(cut)]


@law
@given(worlds, pieces)
def test_all_to_all_chunks_go_from_their_row_to_their_column(n, cut):
    made = contract(ALL_TO_ALL, n, cut)
    chunk = np.arange(made.num_chunks)
    pairs = list(zip(made.owner(chunk), made.target(chunk), strict=True))
    expected = [(i, j) for i in range(n) for j in range(n) for _ in range(cut)]
    assert pairs == expected


@law
@given(worlds, st.data())
def test_holder_gives_the_ranks_that_hold_a_chunk(n, data):
    root = data.draw(st.integers(0, n - 1))
    made = Contract(ALL_TO_ALL, n, root, n * n)
    chunk = np.arange(n * n)
    wanted = {Holders.ROOT: np.full(n * n, root)}
    wanted |= {Holders.OWNER: chunk // n, Holders.TARGET: chunk % n}
    assert made.holder(Holders.EVERYWHERE, chunk) is None
    for place, ranks in wanted.items():
        holder = made.holder(place, chunk)
        assert holder is not None
        assert np.array_equal(holder, ranks)


@pytest.mark.parametrize("what", COLLECTIVES.values(), ids=COLLECTIVES)
def test_collective_properties_follow_from_before_and_after(what):
    places = {what.before, what.after}
    assert what.reduces == (what in (REDUCE, REDUCE_SCATTER, ALL_REDUCE))
    assert what.rooted == (what in (BROADCAST, SCATTER, GATHER, REDUCE))
    assert what.owned == (Holders.OWNER in places)
    assert what.meaning


@law
@given(worlds, st.sampled_from(list(COLLECTIVES.values())))
def test_default_chunk_count_fits_the_contract(n, what):
    made = Contract(what, n, 0, what.default_chunks(n))
    per_rank = n if what in (ALL_REDUCE, ALL_TO_ALL) or what.owned else 1
    assert made.chunks_per_rank == per_rank


@law
@given(worlds, pieces, counts, st.sampled_from(list(COLLECTIVES.values())))
def test_one_count_is_cut_as_evenly_as_whole_elements_allow(n, cut, count, what):
    made = contract(what, n, cut)
    sizes = made.chunk_sizes(count)
    assert sizes.size == made.num_chunks
    if what is BARRIER:
        assert not sizes.any()
        return
    buffers = n if what is ALL_TO_ALL else 1
    assert sizes.sum() == count * buffers
    shares = sizes.reshape(what.chunk_multiple(n), cut).sum(axis=1)
    for even in (shares, *sizes.reshape(-1, cut)):
        assert even.max() - even.min() <= 1


@law
@given(worlds, pieces, st.data(), st.sampled_from([*OWNED, ALL_TO_ALL]))
def test_uneven_counts_are_kept_and_cut_the_larger_pieces_first(n, cut, data, what):
    made = contract(what, n, cut)
    shares = what.chunk_multiple(n)
    result = data.draw(st.lists(counts, min_size=shares, max_size=shares))
    cuts = made.chunk_sizes(result).reshape(shares, cut)
    wanted = [0] * shares if what is BARRIER else result
    assert cuts.sum(axis=1).tolist() == wanted
    assert (np.diff(cuts, axis=1) <= 0).all()
    assert (cuts.max(axis=1) - cuts.min(axis=1) <= 1).all()


def test_table_of_counts_is_read_row_by_row():
    made = Contract(ALL_TO_ALL, 2, 0, 4)
    assert made.chunk_sizes(np.array([[1, 2], [3, 4]])).tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (ALL_GATHER, [1, 2]),
        (ALL_GATHER, [1, 2, 3, 4]),
        (ALL_GATHER, [1, -1, 3]),
        (ALL_TO_ALL, [1, 2, 3]),
        (BROADCAST, [1, 2, 3]),
        (ALL_REDUCE, []),
        (ALL_REDUCE, -1),
        (SCATTER, -4),
    ],
)
def test_counts_of_the_wrong_number_or_sign_are_refused(what, message):
    made = contract(what, 3)
    with pytest.raises(
        BadArgument, match=rf"{what.name}\(n=3\): expected|none negative"
    ):
        made.chunk_sizes(message)


@pytest.mark.parametrize("n", [0, -1])
def test_world_without_ranks_is_refused(n):
    with pytest.raises(BadArgument, match="at least one rank"):
        Contract(BROADCAST, n, 0, 1)


@pytest.mark.parametrize("root", [-1, 3, 4])
def test_root_outside_the_world_is_refused(root):
    with pytest.raises(BadArgument, match=r"ranks are 0\.\.2"):
        Contract(BROADCAST, 3, root, 1)


@pytest.mark.parametrize(
    ("what", "chunks"),
    [(BROADCAST, 0), (ALL_REDUCE, -2), (ALL_GATHER, 4), (ALL_TO_ALL, 3), (GATHER, 0)],
)
def test_chunks_that_do_not_come_in_equal_shares_are_refused(what, chunks):
    with pytest.raises(BadArgument, match=f"with {chunks} chunks"):
        Contract(what, 3, 0, chunks)


@pytest.mark.parametrize("what", COLLECTIVES.values(), ids=COLLECTIVES)
def test_between_finds_the_collective_of_two_holders(what):
    wanted = ALL_GATHER if what is BARRIER else what
    assert between(what.before, what.after) is wanted


def test_between_refuses_holders_that_no_collective_connects():
    known = {(c.before, c.after) for c in COLLECTIVES.values()}
    others = {(a, b) for a in Holders for b in Holders} - known
    assert others
    for before, after in others:
        with pytest.raises(BadArgument, match=f"from {before.value} to {after.value}"):
            between(before, after)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_are_found_by_name(name):
    assert collective(name).name == name


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("allreduce", "all_reduce"),
        ("brodcast", "broadcast"),
        ("alltoall", "all_to_all"),
    ],
)
def test_unknown_collective_is_refused_with_the_nearest_name_first(wrong, near):
    message = f"unknown collective '{wrong}'; nearest: {near}, "
    with pytest.raises(BadArgument, match=message):
        collective(wrong)
