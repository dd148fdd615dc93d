"""Broken programs are found out: the laws of lowering can fail.

Every single fault of a kind is tried, one at a time, on programs small enough for that.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from lowering import MODES, call, expected, mean

from program_player import ProgramFault, play
from unisono import schedule
from unisono.schedule.lower import lower
from unisono.schedule.program import Program, Wait

CASES = [
    ("all_reduce", "direct", 4),
    ("all_reduce", "ring", 4),
    ("all_reduce", "recursive_doubling", 5),
    ("all_reduce", "rabenseifner", 5),
    ("all_reduce", "tree", 6),
    ("all_reduce", "naive", 4),
    ("reduce", "tree", 7),
    ("reduce_scatter", "halving_doubling", 4),
    ("broadcast", "chain", 4),
    ("all_gather", "circulant", 5),
    ("all_gather", "ring", 4),
    ("all_to_all", "bruck", 4),
    ("broadcast", "naive", 5),
    ("scatter", "tree", 7),
    ("gather", "tree", 6),
    ("gather", "direct", 5),
    ("broadcast", "direct+direct", 4),
    ("reduce", "direct+direct", 4),
    ("barrier", "dissemination", 5),
]


def put(program: Program, number: int, **changes) -> Program:
    """The same program with one action changed."""
    actions = list(program.actions)
    actions[number] = replace(actions[number], **changes)
    return replace(program, actions=tuple(actions))


def without(items: tuple, number: int) -> tuple:
    return items[:number] + items[number + 1 :]


def waits_dropped(p: Program) -> Iterator[Program]:
    for number, a in enumerate(p.actions):
        for i in range(len(a.waits)):
            yield put(p, number, waits=without(a.waits, i))


def waits_too_early(p: Program) -> Iterator[Program]:
    for number, a in enumerate(p.actions):
        for i, w in enumerate(a.waits):
            early = replace(w, count=w.count - 1)
            yield put(p, number, waits=(*a.waits[:i], early, *a.waits[i + 1 :]))


def exits_dropped(p: Program) -> Iterator[Program]:
    for i in range(len(p.exits)):
        yield replace(p, exits=without(p.exits, i))


def readers_dropped(p: Program) -> Iterator[Program]:
    for i in range(len(p.readers)):
        yield replace(p, readers=without(p.readers, i))


def sources_dropped(p: Program) -> Iterator[Program]:
    for number, a in enumerate(p.actions):
        for i in range(len(a.sources)):
            if len(a.sources) > 1:
                yield put(p, number, sources=without(a.sources, i))


def sources_exchanged(p: Program) -> Iterator[Program]:
    """Two actions read each other's first source."""
    for one, a in enumerate(p.actions):
        for other, b in enumerate(p.actions[:one]):
            if a.sources[0] != b.sources[0]:
                half = put(p, one, sources=(b.sources[0], *a.sources[1:]))
                yield put(half, other, sources=(a.sources[0], *b.sources[1:]))


def sources_reordered(p: Program) -> Iterator[Program]:
    """With three and more, the order of a sum can be told from its bits."""
    for number, a in enumerate(p.actions):
        if len(a.sources) > 2:
            yield put(p, number, sources=(*a.sources[1:], a.sources[0]))


def actions_exchanged(p: Program) -> Iterator[Program]:
    for number in range(1, len(p.actions)):
        actions = list(p.actions)
        actions[number - 1 : number + 1] = reversed(actions[number - 1 : number + 1])
        yield replace(p, actions=tuple(actions))


def outputs_dropped(p: Program) -> Iterator[Program]:
    for number, a in enumerate(p.actions):
        if a.output is not None:
            yield put(p, number, output=None)


def deliveries_dropped(p: Program) -> Iterator[Program]:
    for number, a in enumerate(p.actions):
        for i in range(len(a.delivers)):
            yield put(p, number, delivers=without(a.delivers, i))


def windows_dropped(p: Program) -> Iterator[Program]:
    for number, a in enumerate(p.actions):
        if a.window is not None:
            yield put(p, number, window=None)


def windows_shared(p: Program) -> Iterator[Program]:
    """Two values of one rank in one place."""
    for number, a in enumerate(p.actions):
        if a.window:
            yield put(p, number, window=a.window - 1)


def completion_turned(p: Program) -> Iterator[Program]:
    for number, a in enumerate(p.actions):
        if len(a.sources) > 1:
            yield put(p, number, completes=not a.completes)


FAULTS = [
    (sources_dropped, 1.0),
    (sources_reordered, 1.0),
    (outputs_dropped, 1.0),
    (deliveries_dropped, 1.0),
    (windows_dropped, 1.0),
    (windows_shared, 1.0),
    (completion_turned, 1.0),
    # The rest may do no harm: other waits imply the one that is missing, two sources
    # hold the same sum, neighbouring actions have nothing to do with each other.
    (waits_dropped, 0.95),
    (waits_too_early, 0.95),
    (sources_exchanged, 0.98),
    (exits_dropped, 0.8),
    (actions_exchanged, 0.75),
]


@pytest.mark.sweep
@pytest.mark.quick(faults=[waits_dropped])
@pytest.mark.parametrize(("faults", "share"), FAULTS)
def test_faults_are_noticed(faults, share):
    unnoticed, tried = survivors(faults, CASES)
    assert tried > 30
    assert len(unnoticed) <= (1 - share) * tried, unnoticed


def test_windows_are_not_reused_before_they_are_read():
    """Where nothing comes back from those who read, only `readers` hold a rank up."""
    rooted = ("broadcast", "scatter", "gather", "reduce")
    one_way = [c for c in CASES if c[0] in rooted and "+" not in c[1]]
    unnoticed, tried = survivors(readers_dropped, one_way)
    assert tried > 30
    assert unnoticed == []


def test_ranks_that_wait_for_each_other_are_stuck():
    made = schedule("all_reduce", "direct", 3)
    fine = lower(made)
    for_the_next = [Wait((p.rank + 1) % 3, 1) for p in fine.programs]
    programs = [
        put(p, 0, waits=(wait,))
        for p, wait in zip(fine.programs, for_the_next, strict=True)
    ]
    programs = tuple(replace(p, lead=(0, 0, 0)) for p in programs)
    one = call(made, (False, False), 1, replace(fine, programs=programs))
    with pytest.raises(ProgramFault, match="wait for ever"):
        play([one], mean(3))


def survivors(faults, cases) -> tuple[list[str], int]:
    """Faulty programs that nobody noticed, and how many there were in all."""
    unnoticed, tried = [], 0
    for what, name, n in cases:
        made = schedule(what, name, n)
        for mode in MODES:
            fine = lower(made, input_shared=mode[0], output_shared=mode[1])
            right = expected(made, call(made, mode, 1, fine).inputs)
            for p in fine.programs:
                for number, broken in enumerate(faults(p)):
                    programs = [publishes_all(q) for q in fine.programs]
                    programs[p.rank] = publishes_all(broken)
                    tried += 1
                    one = call(made, mode, 1, replace(fine, programs=tuple(programs)))
                    if not noticed(one, n, right):
                        unnoticed.append(f"{made.title} {mode} rank {p.rank}: {number}")
    return unnoticed, tried


def publishes_all(p: Program) -> Program:
    """It tells of every action, so that who waits for too few goes on too early."""
    return replace(p, awaited=frozenset(range(1, len(p.actions) + 1)))


def noticed(one, n, right) -> bool:
    try:
        return play([one], mean(n), seed=1)[0] != right
    except ProgramFault:
        return True
