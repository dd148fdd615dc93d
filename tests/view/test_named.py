"""Pictures and pages of schedules that are given by names."""

import pytest

import unisono
from unisono.errors import BadArgument, NotOffered
from unisono.schedule import verify
from unisono.view.html import to_html
from unisono.view.story import one_or_two


def test_names_draw_what_a_schedule_draws():
    made = unisono.schedule("broadcast", "tree", n=5, root=2)
    names = "broadcast", "tree", 5
    assert unisono.to_svg(*names, root=2) == unisono.to_svg(made)
    assert to_html(*names, root=2) == to_html(made)
    assert unisono.explain(*names, root=2).startswith(made.title)


def test_another_algorithm_is_for_the_same_call():
    made = unisono.schedule("broadcast", "tree", n=5, root=2)
    for what in ((made, "", 0, 0), ("broadcast", "tree", 5, 2)):
        first, other = one_or_two(*what, "chain", "")
        assert (first.title, other.title) == (
            made.title,
            unisono.schedule("broadcast", "chain", n=5, root=2).title,
        )


def test_algorithms_are_completed_from_the_topology():
    first, other = one_or_two("all_reduce", "hierarchical", 8, 0, "ring", "cloud:2x4")
    assert first.title == "all_reduce by hierarchical:levels=4x2, n=8"
    assert other.n == 8


@pytest.mark.parametrize("show", [unisono.to_svg, to_html, unisono.explain])
def test_wrong_names_are_named(show):
    with pytest.raises(BadArgument, match="nearest: all_reduce"):
        show("all_redcue")
    with pytest.raises(NotOffered, match="bruck"):
        show("broadcast", "bruck")
    with pytest.raises(BadArgument, match="list: expected a schedule, or names"):
        show([])


def test_verify_takes_schedules():
    with pytest.raises(BadArgument, match=r"unisono.schedule\('all_reduce', 'ring'"):
        verify("ring")
