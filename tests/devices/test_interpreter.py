"""The interpreter for devices, on threads of the CPU: the schedule's bits."""

import numpy as np
import pytest

from conformance import (
    Case,
    check,
    every_algorithm,
    every_reduction,
    every_type,
    prepare,
)
from interpreted import (
    MODES,
    PACKETS,
    InterpretedWorld,
    buffers_of,
    plans,
    with_block_that_gives_up,
)
from repeated_memory import PERIOD, repeated_memory

WORLDS = [*range(1, 9), 13]


def run_all(world, cases, modes=MODES, **how):
    prepare([c for c in cases if c.algorithm])
    for mode in modes:
        for case in cases:
            check([case], [[r] for r in world.run(case, mode, **how)])


def interpreted(n):
    """A world whose windows hold several pieces of most cases."""
    return InterpretedWorld(n, 4096 if n < 4 else 1 << 16)


@pytest.mark.sweep
@pytest.mark.quick(n=[1, 3])
@pytest.mark.parametrize("n", WORLDS)
def test_every_algorithm_in_every_mode(n):
    """One slice and several, one piece and several, windows and exposed buffers."""
    run_all(interpreted(n), every_algorithm(n, [0, 1, n - 1, 311, 2777]))


@pytest.mark.sweep
@pytest.mark.quick(n=[3], mode=[0])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("n", [2, 3, 5])
def test_every_type_and_operation(n, mode):
    run_all(interpreted(n), [*every_reduction(n), *every_type(n)], [mode])


@pytest.mark.parametrize("offset", [1, 3])
def test_odd_alignment(offset):
    cases = [
        Case("all_reduce", None, 3, 1001, dtype=dtype)
        for dtype in ("float32", "bfloat16", "int8", "complex128")
    ]
    run_all(interpreted(3), [*cases, Case("all_gather", None, 3, 999)], offset=offset)


def test_uneven_counts():
    cases = [
        Case("all_gather", None, 3, (0, 700, 31)),
        Case("reduce_scatter", None, 3, (5, 0, 1100)),
        Case("all_to_all", None, 3, (1, 0, 3, 0, 500, 6, 7, 8, 0)),
    ]
    run_all(interpreted(3), cases)


@pytest.mark.parametrize(("blocks", "threads"), [(1, 1), (5, 3)])
def test_any_number_of_blocks_and_threads(blocks, threads):
    cases = [Case("all_reduce", name, 3, 2777) for name in ("ring", "direct")]
    run_all(interpreted(3), cases, blocks=blocks, threads=threads)


def test_number_of_blocks_changes_from_call_to_call():
    """Blocks that take no part in a call are behind the others in the next one."""
    world = interpreted(3)
    for turn in range(40):
        blocks = (4, 1, 3, 1, 2)[turn % 5]
        case = Case("all_reduce", ("direct", "ring")[turn % 2], 3, 700 + 300 * turn)
        run_all(world, [case], [turn % 3 and 2], blocks=blocks, threads=1)


@pytest.mark.parametrize("mode", [0, 1, PACKETS])
def test_block_that_gives_up_leaves_nothing_unwritten(mode):
    """And nothing but its own: the other one's results are there, if it has any."""
    found, wanted = with_block_that_gives_up(mode)
    assert np.isnan(found[1::2]).all()
    finished = np.isnan(found[::2]).all() or (found[::2] == wanted[::2]).all()
    assert finished, found


@pytest.mark.parametrize("mode", [0, 1, PACKETS])
@pytest.mark.parametrize("in_place", [True, False])
def test_root_keeps_in_place_what_others_did_not_get(mode, in_place):
    """A broadcast that fails can be made again, by those who are left."""
    case = Case("broadcast", "naive", 2, 300, style="in place" if in_place else "out")
    world = InterpretedWorld(2, 1 << 16)
    prepare([case])
    x, out = buffers_of(case, 0)
    plan = plans(case, 1 << 16)[0]
    call = (plan, x.ctypes.data, out.ctypes.data, mode)
    ((why, _), _) = world.native.run([call, None], 2, 2, int(0.2e9))
    assert why != 0
    if in_place:
        assert (out == case.given(0)).all()
    else:
        assert np.isnan(out).all()


@pytest.mark.sweep
def test_chunk_of_more_than_2_gib():
    """Of one piece, whose end is no whole vector: each block looks for its part."""
    size = (3 << 30) + 12
    with repeated_memory(size) as given, repeated_memory(size) as got:
        given[:PERIOD] = np.tile(np.arange(4, dtype=np.uint8), PERIOD // 4)
        case = Case("broadcast", "naive", 2, size // 4)
        calls = [
            (plan, of.ctypes.data, of.ctypes.data, 3)
            for plan, of in zip(plans(case, 1 << 16), (given, got), strict=True)
        ]
        reported = InterpretedWorld(2, 1 << 16).native.run(calls, 64, 1, int(300e9))
        assert [why for why, _ in reported] == [0, 0]
        assert (got[:PERIOD] == given[:PERIOD]).all()
