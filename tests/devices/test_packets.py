"""Calls whose data travel as packets, on threads of the CPU: the schedule's bits."""

import threading
import time

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
from interpreted import PACKETS, InterpretedWorld, buffers_of, plans

WORLDS = [*range(1, 9), 13]
WINDOW = 1 << 22
EPOCH = 1 << 30  # generations; packet_epoch_bits of native/device/launch.hpp
CLOSED, TIMEOUT, MISMATCH = 2, 4, 5  # native/device/launch.hpp: Why


def exchange(world, cases, blocks=2, **how):
    """Run the cases that fit into so many blocks, each twice; how many did."""
    fit = [c for c in cases if world.fits_packets(c, blocks)]
    prepare([c for c in fit if c.algorithm])
    for case in fit:
        for _ in range(2):  # in both halves of the windows
            made = world.run(case, PACKETS, blocks=blocks, **how)
            check([case], [[r] for r in made])
    return len(fit)


@pytest.mark.sweep
@pytest.mark.quick(n=[1, 3])
@pytest.mark.parametrize("n", WORLDS)
def test_every_algorithm(n):
    """One block and several, parts of units, and chunks that some blocks have not."""
    world = InterpretedWorld(n, WINDOW)
    cases = every_algorithm(n, [0, 1, n - 1, 311, 2777])
    ran = exchange(world, cases, blocks=16, threads=2)
    assert ran > 0.9 * len(cases)
    assert exchange(world, cases, blocks=3, threads=3) > 0.6 * len(cases)


@pytest.mark.sweep
@pytest.mark.quick(n=[3])
@pytest.mark.parametrize("n", [2, 3, 5])
def test_every_type_and_operation(n):
    cases = [*every_reduction(n), *every_type(n)]
    assert exchange(InterpretedWorld(n, WINDOW), cases) == len(cases)


@pytest.mark.parametrize("offset", [1, 3])
@pytest.mark.parametrize("algorithm", ["direct", "ring"])
def test_odd_alignment(algorithm, offset):
    cases = [
        Case("all_reduce", algorithm, 3, 301, dtype=dtype)
        for dtype in ("float32", "bfloat16", "int8", "complex128")
    ]
    assert exchange(InterpretedWorld(3, WINDOW), cases, offset=offset) == len(cases)


def test_uneven_counts():
    cases = [
        Case("all_gather", None, 3, (0, 700, 31)),
        Case("reduce_scatter", None, 3, (5, 0, 1100)),
        Case("all_to_all", None, 3, (1, 0, 3, 0, 500, 6, 7, 8, 0)),
    ]
    assert exchange(InterpretedWorld(3, WINDOW), cases, blocks=4) == len(cases)


@pytest.mark.parametrize("threads", [1, 2, 3, 4, 5, 9])
def test_any_number_of_threads(threads):
    """The last one sees the ranks arrive; the others are groups with some chunks."""
    cases = [
        Case("all_reduce", name, 3, count)
        for name in ("ring", "direct", "naive", "tree")
        for count in (1, 13, 700)
    ]
    made = exchange(InterpretedWorld(3, WINDOW), cases, threads=threads)
    assert made == len(cases)


def test_calls_with_packets_and_others_take_turns():
    """The windows are others; generations, and numbers of calls, are the same."""
    world = InterpretedWorld(3, 4096)
    for turn in range(40):
        blocks = (4, 1, 3, 1, 2)[turn % 5]
        how = (PACKETS, 0, 3, PACKETS, 2, PACKETS)[turn % 6]
        case = Case("all_reduce", ("direct", "ring")[turn % 2], 3, 300 + 20 * turn)
        prepare([case])
        if how != PACKETS or world.fits_packets(case, blocks):
            made = world.run(case, how, blocks=blocks, threads=1 + turn % 3)
            check([case], [[r] for r in made])


def test_packets_are_cleared_before_their_flags_come_again():
    """A flag has 32 bits: after 2^32 generations nothing may be left that has it."""
    world = InterpretedWorld(2, WINDOW)
    long, short = (Case("all_gather", "direct", 2, count) for count in (400, 2))

    def used(rank):
        return sum(byte != 0 for byte in world.native.packets(rank))

    for epoch in (1, 2, 9):
        world.native.set_generation(epoch * EPOCH - 2)  # a case takes two
        assert exchange(world, [long], blocks=1) == 1
        assert min(used(0), used(1)) > 400
        assert exchange(world, [short], blocks=1) == 1
        assert max(used(0), used(1)) < 100


def test_no_flag_is_that_of_cleared_packets():
    """Their flag is 0, and so were the 32 bits of the generation that this call has."""
    world = InterpretedWorld(2, WINDOW)
    case = Case("all_gather", "direct", 2, 40)
    prepare([case])
    world.native.set_generation((1 << 32) - 1)
    made = world.run(case, PACKETS, blocks=1)
    check([case], [[r] for r in made])
    words = np.frombuffer(world.native.packets(0), np.uint64)
    assert np.count_nonzero(words >> 32) == 20  # one for every 4 bytes given


def all_gather(world):
    """What both ranks run, and their buffers."""
    case = Case("all_gather", "direct", 2, 40)
    prepare([case])
    buffers = [buffers_of(case, r) for r in range(2)]
    calls = [
        (plan, x.ctypes.data, out.ctypes.data, PACKETS)
        for plan, (x, out) in zip(plans(case, WINDOW), buffers, strict=True)
    ]
    return calls, buffers


def failures(world, calls, timeout_s, blocks=1):
    reported = world.native.run(calls, blocks, 2, int(timeout_s * 1e9))
    return [tuple(each) for each in reported]


def test_absent_rank_is_reported_and_output_is_lost():
    world = InterpretedWorld(2, WINDOW)
    calls, buffers = all_gather(world)
    reported = failures(world, [calls[0], None], 0.2)
    assert reported[0] == (TIMEOUT, 1)
    assert np.isnan(buffers[0][1]).all()


def test_ranks_that_call_different_things_say_so():
    """Whether their data came or not: a call that differs does not end well."""
    for other in (
        Case("all_gather", "direct", 2, 41),
        Case("all_reduce", "direct", 2, 80),
    ):
        world = InterpretedWorld(2, WINDOW)
        calls, buffers = all_gather(world)
        x, out = buffers_of(other, 1)
        prepare([other])
        plan = plans(other, WINDOW)[1]
        calls[1] = (plan, x.ctypes.data, out.ctypes.data, PACKETS)
        reported = failures(world, calls, 60)
        assert reported[0] == (MISMATCH, 1) or reported[1] == (MISMATCH, 0)
        assert all(why in (0, MISMATCH) for why, _ in reported)
        assert np.isnan(buffers[0][1]).all() or reported[0][0] == 0


@pytest.mark.parametrize("mode", [0, 3])
def test_rank_without_packets_differs(mode):
    world = InterpretedWorld(2, WINDOW)
    calls, _ = all_gather(world)
    calls[1] = (*calls[1][:3], mode)
    why = [why for why, _ in failures(world, calls, 60)]
    assert MISMATCH in why


def test_abort_ends_the_wait():
    world = InterpretedWorld(2, WINDOW)
    calls, buffers = all_gather(world)
    ended = []
    thread = threading.Thread(
        target=lambda: ended.append(failures(world, [calls[0], None], 600))
    )
    thread.start()
    time.sleep(0.05)  # most likely it waits; the result is the same if it does not yet
    world.native.abort()
    thread.join(60)
    assert ended == [[(0, 0), (0, 0)]]
    assert np.isnan(buffers[0][1]).all()
