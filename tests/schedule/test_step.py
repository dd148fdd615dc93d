"""Steps: broadcasting, joining, choosing, turning round, and the text of a transfer."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.errors import BadArgument
from unisono.schedule import Step, Transfer, copy_step, reduce_step, together

law = settings(max_examples=60)
transfers = st.builds(
    Transfer,
    src=st.integers(0, 5),
    dst=st.integers(0, 5),
    chunk=st.integers(0, 5),
    reduces=st.booleans(),
    into=st.integers(0, 5),
)
rows = st.lists(transfers, max_size=12)


def step_of(transfers: list[Transfer]) -> Step:
    """A step with exactly these transfers, each of its own kind."""
    columns = np.array(transfers, dtype=np.int64).reshape(-1, 5).T
    src, dst, chunk, reduces, into = columns
    return Step(src, dst, chunk, into, reduces.astype(bool), "phase")


@pytest.mark.parametrize(("make", "reduces"), [(copy_step, False), (reduce_step, True)])
def test_arguments_are_broadcast_against_each_other(make, reduces):
    made = make([0, 1], src=[[2], [3], [4]], dst=5)
    expected = [(s, 5, c, reduces, c) for s in (2, 3, 4) for c in (0, 1)]
    assert list(made) == expected
    assert len(made) == 6
    assert not made.renames


@pytest.mark.parametrize(("make", "reduces"), [(copy_step, False), (reduce_step, True)])
def test_single_numbers_make_one_transfer(make, reduces):
    assert list(make(3, src=0, dst=1)) == [(0, 1, 3, reduces, 3)]


@pytest.mark.parametrize("make", [copy_step, reduce_step])
def test_arguments_that_do_not_fit_are_refused(make):
    with pytest.raises(BadArgument, match="do not fit together"):
        make([0, 1], src=[0, 1, 2], dst=0)


@pytest.mark.parametrize("wrong", [0.5, 1.0, [0, 1.5], "0", True, np.nan, None])
@pytest.mark.parametrize("where", ["chunk", "src", "dst", "into"])
def test_values_other_than_integers_are_refused(where, wrong):
    if where == "into" and wrong is None:
        return  # then the chunk keeps its name
    with pytest.raises(BadArgument, match="whole numbers"):
        copy_step(**{"chunk": 0, "src": 0, "dst": 1, where: wrong})


def test_step_constructor_checks_its_arrays():
    one, two = np.zeros(1, np.int64), np.zeros(2, np.int64)
    for arrays, reduces in [
        ((one, one, two, one), False),
        ((one, one, one, one.astype(float)), False),
        (([0], one, one, one), False),
        ((one, one, one, one), 1),
        ((one, one, one, one), np.ones(2, bool)),
    ]:
        with pytest.raises(BadArgument, match="a step"):
            Step(*arrays, reduces)


def test_no_chunks_make_no_transfers():
    empty = copy_step(np.arange(0), src=0, dst=1)
    assert len(empty) == 0
    assert list(empty) == []


def test_into_is_broadcast_and_renames():
    made = copy_step(0, src=[0, 1], dst=[1, 2], into=7)
    assert list(made) == [(0, 1, 0, False, 7), (1, 2, 0, False, 7)]
    assert made.renames


def test_into_its_own_name_is_no_renaming():
    assert not reduce_step([0, 1], src=0, dst=1, into=[0, 1]).renames
    assert reduce_step([0, 1], src=0, dst=1, into=[0, 2]).renames


@law
@given(rows)
def test_flat_columns_are_the_transfers_one_after_the_other(rows):
    step = step_of(rows)
    assert list(step) == rows
    columns = step.flat()
    assert all(column.shape == (len(rows),) for column in columns)
    assert list(zip(*(c.tolist() for c in columns), strict=True)) == rows


def test_one_kind_for_all_has_a_mask_of_their_shape():
    made = reduce_step([0, 1], src=[[2], [3], [4]], dst=5)
    assert made.mask.shape == (3, 2)
    assert made.mask.all()
    assert not copy_step([0, 1], src=[[2], [3], [4]], dst=5).mask.any()


@law
@given(st.lists(rows, max_size=4))
def test_together_is_all_transfers_in_order(parts):
    joined = together(step_of(rows) for rows in parts)
    assert list(joined) == [t for rows in parts for t in rows]


def test_together_keeps_names_and_kinds_of_different_steps():
    joined = together(
        [copy_step(0, src=0, dst=1), reduce_step(1, src=2, dst=0, into=3)]
    )
    assert list(joined) == [(0, 1, 0, False, 0), (2, 0, 1, True, 3)]
    assert joined.renames


def test_together_without_renaming_does_not_rename():
    joined = together(
        [copy_step([0, 1], src=0, dst=1), reduce_step([[2]], src=2, dst=0)]
    )
    assert joined.into is joined.chunk


def test_together_takes_the_first_phase_that_has_a_name():
    plain, one, two = (copy_step(c, src=0, dst=1) for c in range(3))
    joined = together([plain, one.named("one"), two.named("two")])
    assert joined.phase == "one"
    assert together([plain, one]).phase == ""


def test_together_of_one_step_and_nothing_is_that_step():
    only = copy_step(0, src=0, dst=1)
    nothing = together(())
    assert len(nothing) == 0
    assert together([nothing, only, nothing]) is only


@law
@given(rows, st.data())
def test_where_keeps_masked_transfers_and_the_phase(rows, data):
    flags = st.lists(st.booleans(), min_size=len(rows), max_size=len(rows))
    keep = data.draw(flags)
    kept = step_of(rows).where(np.array(keep, dtype=bool))
    assert list(kept) == [t for t, k in zip(rows, keep, strict=True) if k]
    assert kept.phase == "phase"


def test_where_takes_a_mask_of_the_broadcast_shape():
    made = copy_step([0, 1], src=[[2], [3]], dst=5)
    kept = made.where(np.array([[True, False], [False, True]]))
    assert list(kept) == [(2, 5, 0, False, 0), (3, 5, 1, False, 1)]


@law
@given(rows, st.booleans())
def test_backwards_swaps_ends_names_and_on_request_kinds(rows, swap):
    back = step_of(rows).backwards(swap_kinds=swap)
    expected = [(t.dst, t.src, t.into, t.reduces != swap, t.chunk) for t in rows]
    assert list(back) == expected


@law
@given(rows, st.booleans())
def test_backwards_twice_is_the_identity(rows, swap):
    step = step_of(rows)
    twice = step.backwards(swap_kinds=swap).backwards(swap_kinds=swap)
    assert list(twice) == rows


@pytest.mark.parametrize("make", [copy_step, reduce_step])
def test_backwards_changes_one_kind_for_all(make):
    made = make([0, 1], src=0, dst=1)
    assert made.backwards(swap_kinds=True).reduces is not made.reduces
    assert made.backwards(swap_kinds=False).reduces is made.reduces


def test_named_changes_the_phase_alone():
    made = reduce_step([0, 1], src=0, dst=1)
    named = made.named("push")
    assert named.phase == "push"
    assert list(named) == list(made)
    assert made.phase == ""


@pytest.mark.parametrize(
    ("transfer", "text"),
    [
        (Transfer(0, 1, 3, True, 3), "chunk 3: 0 → 1 (reduce)"),
        (Transfer(4, 2, 0, False, 0), "chunk 0: 4 → 2 (copy)"),
        (Transfer(1, 1, 0, False, 5), "chunk 0 as 5: 1 → 1 (copy)"),
    ],
)
def test_text_of_a_transfer_has_chunk_ranks_and_kind(transfer, text):
    assert str(transfer) == text
    assert transfer.kind in text
