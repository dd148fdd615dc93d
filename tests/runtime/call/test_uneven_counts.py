"""Shares of any size, none included: what each rank gets is what counts say."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conformance import ROOTED, STYLES, Case, check, perform
from processes import on_processes
from unisono.errors import BadArgument

OWNED = {
    "all_gather": [None, "ring", "circulant"],
    "reduce_scatter": [None, "ring", "halving_doubling"],
    "gather": [None, "tree"],
    "scatter": [None, "tree"],
    "all_to_all": [None, "bruck", "ring"],
}
DTYPES = ["uint8", "int16", "bfloat16", "float32", "complex128"]


def patterns(n):
    """Counts with nothing for the first, the last, all but one, and all."""
    return [
        tuple(range(n)),
        tuple(reversed(range(n))),
        tuple(7 * (r == n // 2) for r in range(n)),
        (0,) * n,
        tuple(1 + 900 * (r % 2) for r in range(n)),
    ]


def uneven_cases(n):
    found = []
    for what, names in OWNED.items():
        for name in names:
            for counts in patterns(n):
                if what == "all_to_all":
                    counts = tuple(c * (i % 3) for i in range(n) for c in counts)
                styles = STYLES[:2] if what == "all_to_all" else STYLES
                style = styles[len(found) % len(styles)]
                root = n - 1 if what in ROOTED else 0
                found.append(Case(what, name, n, counts, root, style=style))
    return found


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_uneven_shares_on_threads_are_correct(worlds, n):
    cases = uneven_cases(n)
    check(cases, worlds(n).run(perform, cases))


def test_uneven_shares_on_processes_are_correct():
    cases = uneven_cases(4)
    check(cases, on_processes(perform, 4, (cases,)))


@st.composite
def any_cases(draw):
    n = draw(st.integers(1, 5))
    found = []
    for _ in range(draw(st.integers(1, 4))):
        what = draw(st.sampled_from([*OWNED, "all_reduce", "reduce", "broadcast"]))
        root = draw(st.integers(0, n - 1)) if what in ROOTED else 0
        dtype = draw(st.sampled_from(DTYPES))
        sizes = st.one_of(st.integers(0, 9), st.integers(0, 3000))
        if what not in OWNED:
            counts = draw(sizes)
        else:
            shares = n * n if what == "all_to_all" else n
            counts = tuple(draw(st.lists(sizes, min_size=shares, max_size=shares)))
        name = draw(st.sampled_from(OWNED.get(what, [None, "tree"])))
        style = draw(st.sampled_from(STYLES[:2] if what == "all_to_all" else STYLES))
        found.append(Case(what, name, n, counts, root, dtype, style=style))
    return found


@settings(
    max_examples=120,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(any_cases(), st.sampled_from([512, 4096, 1 << 16]))
def test_any_counts_types_and_roots_are_correct(worlds, cases, window):
    check(cases, worlds(cases[0].n, window).run(perform, cases))


@settings(
    max_examples=30,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.integers(1, 4), st.lists(st.integers(0, 3), min_size=1, max_size=3))
def test_rows_of_any_shape_are_correct(worlds, n, shape):
    """Shares are rows: slices along the first axis, whatever the others are."""

    def gathered(comm):
        x = np.full((comm.rank + 1, *shape), comm.rank, np.int32)
        counts = list(range(1, n + 1))
        everything = comm.all_gather(x, counts=counts)
        mine = comm.reduce_scatter(everything, counts=counts)
        return everything, mine

    wanted = np.concatenate([np.full((r + 1, *shape), r) for r in range(n)])
    for rank, (everything, mine) in enumerate(worlds(n).run(gathered)):
        assert everything.shape == wanted.shape
        assert (everything == wanted).all()
        assert mine.shape == (rank + 1, *shape)
        assert (mine == n * rank).all()


def test_all_to_all_exchanges_counts_if_only_sends_are_given(worlds):
    def exchanged(comm):
        send = [comm.rank + 1] * comm.world_size
        x = np.full(sum(send), comm.rank, np.int64)
        return comm.all_to_all(x, send_counts=send)

    for found in worlds(3).run(exchanged):
        assert found.tolist() == [0, 1, 1, 2, 2, 2]


WRONG = {
    "too few": lambda c: c.all_gather(np.ones(2), counts=[2]),
    "negative": lambda c: c.all_gather(np.ones(2), counts=[-2, 2, 2]),
    "not mine": lambda c: c.all_gather(np.ones(2), counts=[1, 1, 1]),
    "not whole": lambda c: c.all_gather(np.ones(2), counts=[2, 2, 2.5]),
    "another sum": lambda c: c.reduce_scatter(np.ones(7), counts=[2, 2, 2]),
    "not even": lambda c: c.reduce_scatter(np.ones(7)),
    "not even either": lambda c: c.all_to_all(np.ones(7)),
    "uneven sends": lambda c: c.all_to_all(np.ones(7), recv_counts=[1, 1, 1]),
    "sends of another sum": lambda c: c.all_to_all(np.ones(7), send_counts=[2, 2, 2]),
    "sends to too few": lambda c: c.all_to_all(np.ones(7), send_counts=[7]),
    "other receives": lambda c: c.all_to_all(
        np.ones(6), send_counts=[2, 2, 2], recv_counts=[1, 2, 3]
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_counts_are_refused_and_break_nothing(worlds, wrong):
    """All ranks make the same mistake, get the error, and continue."""

    def mistaken(comm):
        with pytest.raises(BadArgument):
            WRONG[wrong](comm)
        return comm.all_reduce(np.ones(1))[0]

    assert worlds(3).run(mistaken) == [3, 3, 3]


def test_wrong_send_counts_of_one_rank_raise_on_all(worlds):
    def mistaken(comm):
        send = [1, 1] if comm.rank else [-1, 3]
        with pytest.raises(BadArgument, match="send_counts"):
            comm.all_to_all(np.ones(2), send_counts=send)

    worlds(2).run(mistaken)
