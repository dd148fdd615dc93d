"""Every algorithm on threads and on processes: what the schedule says, to the bit."""

import pytest
from variants import VARIANTS

from conformance import (
    WORLDS,
    check,
    every_algorithm,
    every_reduction,
    every_type,
    perform,
    prepare,
)
from processes import on_processes
from unisono.algorithms import library
from unisono.testing import world

pytestmark = pytest.mark.one_in(2)

A_FEW = [
    *(("all_reduce", name) for name in ("direct", "naive", "ring", "rabenseifner")),
    *(("reduce_scatter", name) for name in ("direct", "halving_doubling")),
    *(("all_gather", name) for name in ("direct", "circulant")),
    *(("broadcast", name) for name in ("naive", "tree", "chain")),
    *(("reduce", name) for name in ("naive", "tree")),
    *(("all_to_all", name) for name in ("direct", "bruck")),
    *(("scatter", "tree"), ("gather", "tree"), ("barrier", "dissemination")),
]
ONE_OF_EACH = list({what: (what, name) for what, name in A_FEW}.values())
SPECIAL = [v for v in VARIANTS if v not in library()]


@pytest.mark.quick(n=[2, 5])
@pytest.mark.parametrize("n", WORLDS)
def test_every_algorithm_on_threads_is_correct(n):
    """Sizes from nothing to many pieces, and to what is read in place."""
    few = [1, n - 1, 2777, 9001] if n < 13 else [n - 1, 9001 if n < 16 else 2777]
    cases = every_algorithm(n, [0, 1, n - 1, n, 311, 2777, 9001] if n < 6 else few)
    prepare(cases)
    with world(n, window=2048) as w:
        check(cases, w.run(perform, cases))


@pytest.mark.quick(n=[2])
@pytest.mark.parametrize("n", [2, 6])
def test_algorithms_with_parameters_on_threads_are_correct(n):
    cases = every_algorithm(n, [3 * n + 1, 1999], SPECIAL)
    prepare(cases)
    with world(n, window=2048) as w:
        check(cases, w.run(perform, cases))


@pytest.mark.quick(n=[3])
@pytest.mark.parametrize("n", WORLDS)
def test_every_algorithm_on_processes_is_correct(n):
    by = list(library()) if n in (3, 5) else A_FEW if n < 9 else ONE_OF_EACH
    cases = every_algorithm(n, [n + 1, 7001 if n < 9 else 400], by)
    check(cases, on_processes(perform, n, (cases,)))


@pytest.mark.quick(n=[3])
@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_every_type_and_operation_on_threads_is_correct(worlds, n):
    cases = [*every_reduction(n), *every_type(n)]
    check(cases, worlds(n, 1024).run(perform, cases))


@pytest.mark.sweep
def test_every_type_and_operation_on_processes_is_correct():
    cases = [*every_reduction(4, 700), *every_type(4, 700)]
    check(cases, on_processes(perform, 4, (cases,)))
