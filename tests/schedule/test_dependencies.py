"""Which transfers wait for which, and that waiting for these is enough.

An executor does not stop between steps. Here every transfer is a read and, later, a
write; they happen in random order, as far as the dependencies and the rules of a step
allow, and whatever the order, the contract must be kept.
"""

import random
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import unisono
from unisono.algorithms import library
from unisono.schedule import Schedule, Transfer
from unisono.schedule.collective import Holders

law = settings(max_examples=40)
VARIANTS = [
    ("broadcast", "tree+ring"),
    ("all_gather", "ring:both"),
    ("all_reduce", "dissemination:carry"),
    ("all_reduce", "rabenseifner:early=1"),
    ("all_reduce", "hierarchical:by=tree/ring"),
    ("all_to_all", "bruck:radix=3"),
]
CASES = list(library()) + VARIANTS
cases = st.sampled_from(CASES)
Slot = tuple[int, int]
Edges = set[tuple[int, int]]
Event = tuple[int, str]


def scheduled(case: tuple[str, str], n: int) -> Schedule:
    what, name = case
    return unisono.schedule(what, name, n)


def numbered(schedule: Schedule) -> list[tuple[int, Transfer]]:
    """Every transfer with its step, in the order of the schedule."""
    return [(s, t) for s, step in enumerate(schedule) for t in step]


def reads(t: Transfer) -> set[Slot]:
    return {(t.src, t.chunk)} | ({(t.dst, t.into)} if t.reduces else set())


def edges_of(schedule: Schedule) -> Edges:
    made = schedule.dependencies()
    return set(zip(made.before.tolist(), made.after.tolist(), strict=True))


def slow_edges(schedule: Schedule) -> Edges:
    """Step by step: who last wrote each slot, and who has read it since."""
    writers: dict[Slot, list[int]] = {}
    readers: dict[Slot, list[int]] = defaultdict(list)
    edges: Edges = set()
    number = 0
    for step in schedule:
        here = list(enumerate(step, number))
        number += len(here)
        for i, t in here:
            slot = (t.dst, t.into)
            waits = [w for r in reads(t) | {slot} for w in writers.get(r, [])]
            edges |= {(before, i) for before in waits + readers[slot]}
        for i, t in here:
            for slot in reads(t):
                readers[slot].append(i)
        written: dict[Slot, list[int]] = defaultdict(list)
        for i, t in here:
            written[t.dst, t.into].append(i)
        for slot, by in written.items():
            writers[slot], readers[slot] = by, []
    return edges


@pytest.mark.parametrize(("what", "name"), CASES)
def test_edges_are_those_found_slot_by_slot(what, name):
    for n in (1, 2, 5, 6):
        made = unisono.schedule(what, name, n)
        assert edges_of(made) == slow_edges(made)


@law
@given(cases, st.integers(1, 9))
def test_every_edge_leads_to_a_later_step(case, n):
    made = scheduled(case, n)
    found = made.dependencies()
    assert found.step.tolist() == [s for s, _ in numbered(made)]
    assert (found.step[found.before] < found.step[found.after]).all()
    assert (np.diff(found.after) >= 0).all()
    assert len(found) == found.before.size == found.after.size


@law
@given(cases, st.integers(1, 6))
def test_transfer_waits_for_its_incoming_edges(case, n):
    made = scheduled(case, n).dependencies()
    result = [(b, a) for a in range(made.step.size) for b in made.of(a).tolist()]
    pairs = zip(made.before.tolist(), made.after.tolist(), strict=True)
    assert result == list(pairs)


def predecessors(schedule: Schedule, edges: Edges) -> dict[Event, set[Event]]:
    """What must have happened before each transfer's read and before its write."""
    waits: dict[Event, set[Event]] = {}
    readers: dict[tuple[int, Slot], set[Event]] = defaultdict(set)
    copies: dict[tuple[int, Slot], set[Event]] = defaultdict(set)
    for i, (step, t) in enumerate(numbered(schedule)):
        readers[step, (t.src, t.chunk)].add((i, "read"))
        if not t.reduces:
            copies[step, (t.dst, t.into)].add((i, "write"))
    for i, (step, t) in enumerate(numbered(schedule)):
        slot = step, (t.dst, t.into)
        waits[i, "read"] = set()
        waits[i, "write"] = {(i, "read")} | readers[slot]
        if t.reduces:
            waits[i, "write"] |= copies[slot]
    for before, after in edges:
        waits[after, "read"].add((before, "write"))
        waits[after, "write"] |= {(before, "read"), (before, "write")}
    return waits


def some_order(waits: dict[Event, set[Event]], rng: random.Random) -> list[Event]:
    """All events, each at random among those that need not wait any longer."""
    open_ = {event: len(before) for event, before in waits.items()}
    unlocks: dict[Event, list[Event]] = defaultdict(list)
    for event, before in waits.items():
        for earlier in before:
            unlocks[earlier].append(event)
    ready = [event for event, left in open_.items() if not left]
    order = []
    while ready:
        at = rng.randrange(len(ready))
        ready[at], ready[-1] = ready[-1], ready[at]
        order.append(ready.pop())
        for event in unlocks[order[-1]]:
            open_[event] -= 1
            if not open_[event]:
                ready.append(event)
    assert len(order) == len(waits)
    return order


def execute(schedule: Schedule, order: list[Event], state: np.ndarray) -> None:
    """Carry out reads and writes on `state`, by rank and slot."""
    transfers = [t for _, t in numbered(schedule)]
    hand: dict[int, int] = {}
    for i, what in order:
        t = transfers[i]
        if what == "read":
            hand[i] = state[t.src, t.chunk]
        elif t.reduces:
            state[t.dst, t.into] += hand[i]
        else:
            state[t.dst, t.into] = hand[i]


def keeps_contract(schedule: Schedule, begin: np.ndarray, end: np.ndarray) -> bool:
    contract, chunk = schedule.contract, np.arange(schedule.num_chunks)
    origin = contract.holder(schedule.collective.before, chunk)
    due = begin[:, chunk].sum(axis=0) if origin is None else begin[origin, chunk]
    if schedule.collective.after is Holders.EVERYWHERE:
        return bool((end[:, chunk] == due).all())
    holder = contract.holder(schedule.collective.after, chunk)
    return bool((end[holder, chunk] == due).all())


def survives(schedule: Schedule, edges: Edges, rng: random.Random) -> bool:
    """Whether the contract is kept in one random order that respects `edges`."""
    size = (schedule.n, schedule.num_slots)
    begin = np.random.default_rng(rng.randrange(1 << 30)).integers(1 << 40, size=size)
    end = begin.copy()
    execute(schedule, some_order(predecessors(schedule, edges), rng), end)
    return keeps_contract(schedule, begin, end)


@pytest.mark.parametrize(("what", "name"), CASES)
def test_order_that_respects_edges_keeps_the_contract(what, name):
    for n in (1, 2, 5, 8):
        made = unisono.schedule(what, name, n)
        edges, rng = edges_of(made), random.Random(n)
        assert all(survives(made, edges, rng) for _ in range(2))


@law
@given(cases, st.integers(1, 7), st.randoms(use_true_random=False), st.data())
def test_any_root_and_order_keep_the_contract(case, n, rng, data):
    root = data.draw(st.integers(0, n - 1))
    made = scheduled(case, n).rooted_at(root)
    assert survives(made, edges_of(made), rng)


@pytest.mark.parametrize(
    ("what", "name"),
    [("all_reduce", "ring"), ("reduce", "tree"), ("all_reduce", "dissemination:carry")],
)
def test_order_that_ignores_edges_breaks_the_contract(what, name):
    made = unisono.schedule(what, name, 7)
    rng = random.Random(1)
    assert not all(survives(made, set(), rng) for _ in range(5))


@pytest.mark.parametrize("n", [*range(1, 10), 13])
def test_ring_has_a_chain_as_long_as_its_steps(n):
    for what, chain in (("all_reduce", 2 * (n - 1)), ("all_gather", n - 1)):
        made = unisono.schedule(what, "ring", n)
        assert made.dependencies().longest_chain() == chain == made.num_steps


@pytest.mark.parametrize("n", [*range(2, 10), 13, 16])
def test_tree_has_a_chain_as_long_as_its_depth(n):
    chains = {
        what: unisono.schedule(what, "tree", n).dependencies().longest_chain()
        for what in ("broadcast", "reduce")
    }
    assert chains["broadcast"] == max(rank.bit_count() for rank in range(n))
    assert chains["reduce"] == (n - 1).bit_length()


@pytest.mark.parametrize("levels", range(1, 5))
def test_tree_all_reduce_has_a_chain_of_both_trees(levels):
    made = unisono.schedule("all_reduce", "tree", 1 << levels)
    assert made.dependencies().longest_chain() == 2 * levels


@law
@given(cases, st.integers(1, 9))
def test_no_chain_is_longer_than_there_are_steps(case, n):
    made = scheduled(case, n)
    found = made.dependencies()
    assert found.longest_chain() <= made.num_steps
    assert (found.longest_chain() == 0) == (made.num_steps == 0)


def test_world_of_one_has_no_dependencies():
    alone = unisono.schedule("all_reduce", "ring", 1).dependencies()
    assert (len(alone), alone.step.size, alone.longest_chain()) == (0, 0, 0)
