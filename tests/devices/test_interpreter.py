"""The interpreter for devices, on threads of the CPU: the schedule's bits."""

import pytest

from conformance import (
    check,
    every_algorithm,
    every_reduction,
    every_type,
    prepare,
)
from interpreted import MODES, InterpretedWorld

WORLDS = [*range(1, 9), 13]


def run_all(world, cases, **how):
    prepare([c for c in cases if c.algorithm])
    for mode in MODES:
        for case in cases:
            check([case], [[r] for r in world.run(case, mode, **how)])


@pytest.mark.quick(n=[1, 2, 3, 5])
@pytest.mark.parametrize("n", WORLDS)
def test_every_algorithm_in_every_mode(n):
    """One slice and several, one piece and several, windows and exposed buffers."""
    run_all(
        InterpretedWorld(n, 4096 if n < 4 else 1 << 16),
        every_algorithm(n, [0, 1, n - 1, 311, 2777]),
    )


@pytest.mark.quick(n=[3])
@pytest.mark.parametrize("n", [2, 3, 5])
def test_every_type_and_operation(n):
    run_all(InterpretedWorld(n), [*every_reduction(n), *every_type(n)])
