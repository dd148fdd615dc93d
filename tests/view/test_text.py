"""The text picture: golden files for every algorithm, and the rules of the grammar.

After a change that is meant, `UPDATE_GOLDEN=1 make test` writes the files anew; read
the difference before committing it.
"""

import os
from pathlib import Path

import pytest

import unisono
from unisono.algorithms import library
from unisono.errors import BadArgument, ScheduleError
from unisono.schedule import collective, copy_step, from_steps, reduce_step
from unisono.view import explain, picture

GOLDEN = Path(__file__).parent / "golden"


def check_golden(name: str, text: str) -> None:
    file = GOLDEN / name
    if os.environ.get("UPDATE_GOLDEN"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
    assert file.read_text(encoding="utf-8") == text


@pytest.mark.parametrize("key", library(), ids="-".join)
def test_every_algorithm_is_drawn_as_before(key):
    made = library()[key](4)
    check_golden(f"{'-'.join(key)}.txt", explain(made) + "\n")


def test_textbook_ring_has_four_and_four_steps():
    text = explain(unisono.schedule("all_reduce", "ring", n=5))
    phases = [
        line.split()[-1] for line in text.splitlines() if line.startswith("step ")
    ]
    assert phases == ["reduce_scatter"] * 4 + ["all_gather"] * 4
    assert "every rank ends with a+b+c+d+e" in text
    assert "8 rounds (at least 3)" in text


def test_partial_sum_is_drawn_as_partial():
    text = picture(unisono.schedule("all_reduce", "ring", n=5))
    first = text.split("\n\n")[1]
    assert "[·bc··]" in first
    assert first.count("[") == 5


def test_changed_cells_are_exactly_the_written_ones():
    s = unisono.schedule("all_gather", "circulant", n=7)
    for step, grid in zip(s, picture(s).split("\n\n")[1:], strict=True):
        assert grid.count("[") == len(step)


@pytest.mark.parametrize("n", [1, 2, 8])
def test_small_worlds_are_drawn_step_by_step(n):
    s = unisono.schedule("all_reduce", "recursive_doubling", n=n)
    assert picture(s).count("step ") == s.num_steps


def test_beyond_eight_ranks_steps_that_do_the_same_have_one_grid():
    text = picture(unisono.schedule("all_reduce", "ring", n=16))
    start, sums, copies = text.split("\n\n")
    assert start.startswith("start\n")
    assert sums.startswith("steps 1-15/30  reduce_scatter\n  Every rank sends one ")
    assert copies.startswith("steps 16-30/30  all_gather\n")
    assert "chunk 0 [16]  1 [ 2][ 3]" in sums
    assert sums.count("[") == copies.count("[") == 15 * 16
    assert max(map(len, text.splitlines())) <= 88


def test_beyond_eight_ranks_cells_name_the_rank_they_came_from():
    text = explain(unisono.schedule("all_gather", "ring", n=10))
    assert "In the cells the rank it began at; [ ] has changed since" in text
    assert "chunk 9 [ 9][ 9][ 9][ 9][ 9][ 9][ 9][ 9][ 9]  9" in text


def test_many_different_steps_are_one_group_for_each_phase():
    text = picture(unisono.schedule("all_reduce", "chain", n=10))
    heads = [line for line in text.splitlines() if line.startswith("step")]
    assert heads == ["steps 1-12/24  reduce", "steps 13-24/24  broadcast"]
    assert "36 messages, up to 4 in one step." in text


@pytest.mark.parametrize("n", [17, 64, 1024])
def test_large_worlds_are_summed_up_by_phase(n):
    text = picture(unisono.schedule("all_reduce", "ring", n=n))
    assert len(text.splitlines()) == 3
    assert f"{n - 1:,}" in text


@pytest.mark.sweep
def test_every_line_of_an_explanation_fits_the_screen():
    for key in library():
        for n in (4, 8, 13):
            made = library()[key](n)
            widest = max(len(line) for line in explain(made).splitlines())
            assert widest <= 100, f"{made.title}: {widest} columns"


def test_hundred_thousand_ranks_have_no_picture():
    s = unisono.schedule("all_reduce", "ring", n=100_000)
    with pytest.raises(BadArgument, match="at most 1024"):
        picture(s)
    with pytest.raises(BadArgument, match="at most 1024"):
        explain(s)


def test_wrong_schedule_is_not_explained_but_its_picture_marks_what_is_wrong():
    all_reduce = collective("all_reduce")
    twice = [reduce_step(0, [0, 1], [1, 0]), reduce_step(0, [0, 1], [1, 0])]
    wrong = from_steps(all_reduce, 2, twice, num_chunks=1)
    with pytest.raises(ScheduleError):
        explain(wrong)
    assert "!ab!" in picture(wrong)


def test_transfers_are_listed_in_words():
    gather = collective("all_gather")
    s = from_steps(gather, 2, [copy_step([0, 1], [0, 1], [1, 0])], num_chunks=2)
    assert "copy 0→1 chunk 0, 1→0 chunk 1" in picture(s)


def test_temporaries_have_rows_of_their_own():
    text = picture(unisono.schedule("all_reduce", "dissemination:carry", n=5))
    assert "temporary 0" in text
    assert "0→1 temporary 0 into chunk 0" in text


def test_print_and_notebooks_show_the_picture():
    s = unisono.schedule("all_reduce", "ring", n=3)
    assert str(s) == picture(s)
    assert repr(s) == "<Schedule: all_reduce by ring, n=3, 3 chunks>"
    assert s._repr_svg_().startswith("<svg")
