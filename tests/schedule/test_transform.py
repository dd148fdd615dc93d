"""The algebra of schedules: what is made of right schedules is right."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import unisono
from unisono.algorithms import library
from unisono.errors import BadArgument, ScheduleError
from unisono.schedule import Schedule, Transfer, fold, refine, relabel, split, verify

law = settings(max_examples=25)
quick = settings(max_examples=8)
KEYS = list(library())
WORLDS = (*range(1, 10), 13)
MIRRORED = {"all_gather": "reduce_scatter", "broadcast": "reduce", "scatter": "gather"}
ROOTED = [key for key in KEYS if key[0] in ("broadcast", "scatter", "gather", "reduce")]
FOLDED = [k for k in KEYS if k[0] in ("all_reduce", "all_gather", "reduce_scatter")]
VARIANTS = [
    ("broadcast", "tree:radix=3"),
    ("broadcast", "double_tree:segments=3"),
    ("scatter", "direct:rotate"),
    ("all_gather", "ring:both"),
    ("all_gather", "pat:aggregate=1"),
    ("all_gather", "halving_doubling:blocks"),
]


def names_for(what: str) -> list[str]:
    return [name for collective, name in KEYS if collective == what]


def steps_of(schedule: Schedule) -> list[list[Transfer]]:
    """The transfers of every step, in an order that does not matter."""
    return [sorted(step) for step in schedule]


@pytest.mark.parametrize(
    ("first", "second", "whole"),
    [
        ("reduce_scatter", "all_gather", "all_reduce"),
        ("scatter", "all_gather", "broadcast"),
        ("reduce_scatter", "gather", "reduce"),
        ("reduce", "broadcast", "all_reduce"),
        ("reduce", "scatter", "reduce_scatter"),
        ("gather", "broadcast", "all_gather"),
    ],
)
@law
@given(n=st.integers(1, 9), data=st.data())
def test_then_gives_the_combined_collective(first, second, whole, n, data):
    one, two = (data.draw(st.sampled_from(names_for(w))) for w in (first, second))
    root = data.draw(st.integers(0, n - 1))
    a = unisono.schedule(first, one, n).rooted_at(root)
    b = unisono.schedule(second, two, n).rooted_at(root)
    joined = a.then(b)
    assert joined.collective.name == whole
    assert joined.num_steps == a.num_steps + b.num_steps
    assert joined.root == (root if joined.collective.rooted else 0)
    assert verify(joined)


def test_then_refuses_schedules_that_do_not_fit():
    ring = unisono.schedule("all_gather", "ring", 4)
    sums = unisono.schedule("reduce_scatter", "ring", 4)
    down = unisono.schedule("broadcast", "tree", 4)
    up = unisono.schedule("reduce", "tree", 4)
    carry = unisono.schedule("all_reduce", "dissemination:carry", 5)
    gather, scatter = (unisono.schedule(w, "tree", 4) for w in ("gather", "scatter"))
    refused = [
        (sums, unisono.schedule("all_gather", "ring", 5), "4 and 5 ranks"),
        (ring, sums, "cannot follow"),
        (ring, ring, "cannot follow"),
        (up, down.rooted_at(2), "roots differ: 0 and 2"),
        (gather, scatter, "cannot be joined"),
        (carry, carry, "cannot follow"),
    ]
    for first, second, why in refused:
        with pytest.raises(BadArgument, match=why):
            first.then(second)


def test_temporaries_are_refused_as_parts():
    with_temporaries = unisono.schedule("reduce_scatter", "ring", 4).but(
        num_temporaries=1
    )
    with pytest.raises(BadArgument, match="temporaries"):
        with_temporaries.then(unisono.schedule("all_gather", "ring", 4))
    carry = unisono.schedule("all_reduce", "dissemination:carry", 5)
    with pytest.raises(BadArgument, match="temporaries"):
        carry.relabel(range(5))
    with pytest.raises(BadArgument, match="temporaries"):
        carry.split(2)
    for part in (refine(carry, 2), fold(carry, 6)):
        with pytest.raises(BadArgument, match="temporaries"):
            list(part)


@pytest.mark.parametrize(("what", "name"), KEYS)
def test_mirror_twice_is_the_identity(what, name):
    for n in (1, 4, 5):
        once = unisono.schedule(what, name, n)
        assert steps_of(once.mirror().mirror()) == steps_of(once)


@pytest.mark.parametrize(
    ("what", "name"), [key for key in KEYS if key[0] in MIRRORED] + VARIANTS
)
def test_mirror_of_a_schedule_without_waste_keeps_its_contract(what, name):
    for n in WORLDS:
        back = unisono.schedule(what, name, n).mirror()
        assert back.collective.name == MIRRORED[what]
        assert verify(back).exact == (what == "scatter")


@pytest.mark.parametrize("name", names_for("all_to_all"))
@pytest.mark.parametrize("n", WORLDS)
def test_mirror_of_an_all_to_all_is_an_all_to_all(name, n):
    assert verify(unisono.schedule("all_to_all", name, n).mirror()).exact


def test_mirror_renames_the_phases():
    inside_out = unisono.schedule("all_gather", "hierarchical", 6).mirror()
    phases = list(dict.fromkeys(step.phase for step in inside_out))
    assert phases == ["reduce_scatter inside", "reduce_scatter across"]


def test_mirror_swaps_fold_in_and_fold_out():
    phases = [
        step.phase for step in unisono.schedule("all_gather", "swing", 5).mirror()
    ]
    assert (phases[0], phases[-1]) == ("fold in", "fold out")


def test_mirror_of_a_schedule_with_waste_is_wrong():
    lap = unisono.schedule("broadcast", "tree+ring", 4)  # the root hears itself
    assert verify(lap)
    with pytest.raises(ScheduleError):
        verify(lap.mirror())


@pytest.mark.parametrize(("what", "name"), KEYS)
def test_s_segments_add_s_minus_1_steps(what, name):
    for n, segments in ((2, 1), (2, 3), (5, 2), (5, 3)):
        whole = unisono.schedule(what, name, n)
        cut = whole.split(segments)
        assert cut.num_chunks == whole.num_chunks * segments
        assert cut.num_steps == whole.num_steps + segments - 1
        assert verify(cut).transfers == segments * verify(whole).transfers


def test_world_of_one_stays_without_steps_however_split():
    assert unisono.schedule("broadcast", "tree", 1).split(4).num_steps == 0


@pytest.mark.parametrize("segments", [0, -1])
def test_fewer_segments_than_one_are_refused(segments):
    with pytest.raises(BadArgument, match="at least 1"):
        split(unisono.schedule("broadcast", "tree", 4), segments)


@pytest.mark.parametrize(("what", "name"), KEYS)
@quick
@given(n=st.integers(1, 9), data=st.data())
def test_relabelled_ranks_keep_the_contract(what, name, n, data):
    ranks = data.draw(st.permutations(range(n)))
    root = data.draw(st.integers(0, n - 1))
    made = relabel(unisono.schedule(what, name, n).rooted_at(root), ranks)
    assert made.root == ranks[root if made.collective.rooted else 0]
    assert verify(made)


@pytest.mark.parametrize(
    "ranks", [[0, 1, 2], [0, 1, 2, 2], [1, 2, 3, 4], [0, 1, 2, 3, 4]]
)
def test_relabelling_without_a_permutation_is_refused(ranks):
    with pytest.raises(BadArgument, match=r"each of 0\.\.3 once"):
        unisono.schedule("all_gather", "ring", 4).relabel(ranks)


@pytest.mark.parametrize(("what", "name"), ROOTED)
def test_any_rank_can_be_the_root(what, name):
    for n in (1, 2, 5, 8):
        made = unisono.schedule(what, name, n)
        for root in range(n):
            made = made.rooted_at(root)
            assert made.root == root
            assert verify(made)


@pytest.mark.parametrize("root", [-1, 4])
def test_root_outside_the_world_is_refused(root):
    for what in ("broadcast", "all_gather"):
        name = names_for(what)[0]
        with pytest.raises(BadArgument, match=f"root = {root}"):
            unisono.schedule(what, name, 4).rooted_at(root)


def test_rooted_at_leaves_collectives_without_root_unchanged():
    made = unisono.schedule("all_gather", "ring", 4)
    assert made.rooted_at(2) is made


@pytest.mark.parametrize(("what", "name"), KEYS)
def test_refined_chunks_are_sent_together(what, name):
    for n, pieces in ((1, 2), (4, 1), (5, 3)):
        whole = unisono.schedule(what, name, n)
        finer = refine(whole, pieces)
        assert finer.num_chunks == whole.num_chunks * pieces
        assert finer.num_steps == whole.num_steps
        assert verify(finer).transfers == pieces * verify(whole).transfers


@pytest.mark.parametrize(("what", "name"), FOLDED)
@quick
@given(m=st.integers(1, 6), data=st.data(), segments=st.integers(1, 2))
def test_surplus_ranks_fold_onto_others(what, name, m, data, segments):
    n = data.draw(st.integers(m, 2 * m))
    inner = unisono.schedule(what, name, m).split(segments)
    folded = fold(inner, n)
    assert folded.n == n
    assert folded.num_steps == inner.num_steps + (2 if n > m else 0)
    assert verify(folded)


@pytest.mark.parametrize("n", [3, 9])
def test_more_ranks_than_pairs_or_fewer_than_parts_are_refused(n):
    with pytest.raises(BadArgument, match=f"4 ranks can stand for 4 to 8, not {n}"):
        fold(unisono.schedule("all_reduce", "ring", 4), n)


@pytest.mark.parametrize("what", ["broadcast", "gather", "all_to_all", "barrier"])
def test_fold_refuses_other_collectives(what):
    inner = unisono.schedule(what, names_for(what)[0], 4)
    with pytest.raises(BadArgument, match=f"not known for {what}"):
        fold(inner, 6)
