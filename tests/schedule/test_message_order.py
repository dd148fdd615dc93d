"""Messages of one step: what their sender has leaves before what it still waits for."""

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from unisono import _native, schedule
from unisono.algorithms import library
from unisono.runtime.plan import simulated
from unisono.runtime.plan.predict import MODEL, all_alike
from unisono.runtime.plan.programs import rank_program, tables
from unisono.schedule import copy_step, reduce_step
from unisono.schedule.collective import ALL_REDUCE
from unisono.schedule.lower import lower
from unisono.schedule.message_order import MessageOrder
from unisono.schedule.program import Home
from unisono.schedule.schedule import from_steps
from unisono.simulate import simulate
from unisono.topology import parse

FOUR = tuple(range(4))
MIB = 1 << 20


def test_chunk_that_is_there_leaves_before_one_that_comes():
    """Rank 1 has its own chunk at first, and gets chunk 0 in the first step."""
    made = lower(schedule("all_gather", "recursive_doubling", 4), hosts=FOUR)
    for program in made.programs:
        last = [m for m in program.messages if m.to == program.rank ^ 2]
        assert [m.chunk for m in last] == [program.rank, program.rank ^ 1]
        assert last[0].after < last[1].after


@pytest.mark.parametrize("n", [4, 5, 8])
@pytest.mark.parametrize("name", ["recursive_doubling", "circulant"])
def test_messages_of_a_step_wait_for_later_and_later_steps(name, n):
    made = schedule("all_gather", name, n)
    if n == 5 and name == "recursive_doubling":
        pytest.skip("powers of two")
    when = [{(r, r): -1 for r in range(n)}]
    for number, step in enumerate(made):
        when.append(when[-1] | {(t.dst, t.into): number for t in step})
    sent = [list(step) for step in made]
    programs = lower(made, hosts=tuple(range(n))).programs
    for program in programs:
        left = iter(program.messages)
        for number, step in enumerate(sent):
            count = sum(t.src == program.rank for t in step)
            there = [when[number][program.rank, m.chunk] for m in islice(left, count)]
            assert there == sorted(there)


def copied(made):
    """Whether a schedule only copies."""
    return not any(step.mask.any() for step in made)


COPIES = [(what, name) for what, name in library() if "reduce" not in what]


@pytest.mark.cases(len(COPIES))
@pytest.mark.parametrize(("what", "name"), COPIES)
def test_simulated_order_is_that_of_programs(what, name):
    for n in (4, 8):
        made = schedule(what, name, n)
        if not copied(made):
            continue
        pairs = {}
        order = MessageOrder(n, made.num_slots)
        for step in made:
            src, dst, chunk, _, into = (a.tolist() for a in order.sent(step))
            for s, d, c, i in zip(src, dst, chunk, into, strict=True):
                assert c == i
                pairs.setdefault((s, d), []).append(c)
        for program in lower(made, hosts=tuple(range(n))).programs:
            for to in range(n):
                found = [m.chunk for m in program.messages if m.to == to]
                assert found == pairs.get((program.rank, to), [])


@pytest.mark.parametrize("name", ["recursive_doubling", "circulant"])
def test_simulated_all_gather_takes_as_long_as_its_chunks(name):
    where = parse("switch:4").but(streams=True)
    chunk = simulate("direct", parse("switch:2"), 2 * MIB, collective="all_gather").time
    found = simulate(name, where, 4 * MIB, collective="all_gather").time
    assert found == pytest.approx(3 * chunk, rel=0.04)


@pytest.mark.parametrize(
    ("what", "name", "n"),
    [
        ("all_gather", "recursive_doubling", 4),
        ("all_gather", "circulant", 8),
        ("gather", "tree", 4),
    ],
)
def test_choice_between_hosts_simulates_that_order_in_both_directions(what, name, n):
    """Backwards it is the reverse; no link is idle before its last byte."""
    byte = 1e-9
    model = replace(MODEL, mutual=0.0, shared=0.0, start=0.0, message=0.0)
    model = replace(all_alike(n, byte, model), byte_inside=1e-15)
    found = simulated.simulated(what, name, 1, tuple(range(n)), n * MIB, model)
    assert found == pytest.approx((n - 1) * MIB * byte, rel=0.01)


def test_messages_into_one_slot_arrive_in_the_order_of_its_sources():
    """Rank 0 sends its second temporary first: so the reader adds it first."""
    chunk, first, second = 0, 1, 2
    steps = [
        copy_step([chunk], src=[1], dst=[0], into=[first]),
        copy_step([chunk], src=[2], dst=[0], into=[second]),
        reduce_step([second, first], src=[0, 0], dst=[3, 3], into=[chunk, chunk]),
    ]
    made = from_steps(ALL_REDUCE, 4, steps, num_chunks=1, num_temporaries=2)
    sender, *_, reader = lower(made, hosts=FOUR).programs
    to_reader = [m for m in sender.messages if m.to == 3]
    assert [m.after for m in to_reader] == [2, 1]
    (adds,) = (a for a in reader.actions if len(a.sources) > 1)
    assert [s.index for s in adds.sources if s.home is Home.STREAM] == [0, 1]
    found = rank_program(made, 0, 0, FOUR).program
    expected = _native.program_tables(tables(sender))
    assert _native.program_tables(found) == expected


def test_order_keeps_the_places_of_each_pair():
    order = MessageOrder(3, 3)
    order.sent(copy_step([0], src=[0], dst=[1]))
    step = copy_step([0, 1, 1, 2], src=[1, 2, 1, 2], dst=[2, 0, 2, 0])
    src, dst, chunk, *_ = order.sent(step)
    assert src.tolist() == [1, 2, 1, 2]
    assert dst.tolist() == [2, 0, 2, 0]
    assert chunk.tolist() == [1, 1, 0, 2]
    assert np.array_equal(step.flat()[2], [0, 1, 1, 2])
