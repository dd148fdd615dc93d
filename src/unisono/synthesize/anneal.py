"""Simulated annealing of plans: small changes, kept if they help, at first if not, too.

The numbers by chance are fixed, so the same plans come to the same result.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from random import Random

from unisono.synthesize.plays import Costs, Goal, Plan, Played, played

BEGIN = 4
"""How many of the best plans are improved, each for itself."""
CHANGES = 3000
"""How many changes are tried with each."""
WARM, COLD = 0.05, 0.001
"""By which part of its time a plan may get worse, at first and in the end."""


def improved(
    plans: Iterable[Plan],
    costs: Costs,
    goal: Goal,
    changes: int = CHANGES,
    enough: float = 0.0,
) -> list[Played]:
    """Plans that reach the goal, and what the best become by so many changes each.

    Nothing is changed if a plan takes no more than `enough`.
    """
    known = {one.plan: one for one in (played(p, costs, goal) for p in plans)}
    order = sorted(known.values(), key=_rank)
    if costs.n > 1 and (order[0].missing or order[0].seconds > enough):
        for seed, one in enumerate(order[:BEGIN]):
            order.append(_annealed(one, costs, goal, seed, changes))
    return sorted((one for one in order if not one.missing), key=_rank)


def _rank(one: Played) -> tuple[int, float, int]:
    return one.missing, one.seconds, sum(map(len, one.steps))


def _annealed(
    first: Played, costs: Costs, goal: Goal, seed: int, changes: int
) -> Played:
    chance = Random(seed)
    unit = first.seconds or 1.0
    lack = unit / costs.n  # what it costs that a rank lacks a part
    now, best = first, first
    for turn in range(changes):
        heat = unit * WARM * (COLD / WARM) ** (turn / changes)
        plan = now.plan
        for _ in range(chance.choice((1, 1, 2, 3))):
            plan = _changed(plan, costs.n, chance)
        new = played(plan, costs, goal)
        worse = _price(new, lack) - _price(now, lack)
        if worse <= 0 or chance.random() < math.exp(-worse / heat):
            now = new
            if _rank(now) < _rank(best):
                best = now
    return best


def _price(one: Played, lack: float) -> float:
    few = 1e-6 * sum(map(len, one.steps)) * lack
    return one.seconds + one.missing * lack + few


def _changed(plan: Plan, n: int, chance: Random) -> Plan:
    """The plan with one message more, less, elsewhere or at another time."""
    steps = [list(step) for step in plan]
    what = chance.randrange(5)
    filled = [k for k, step in enumerate(steps) if step]
    if what == 0 or not filled:
        src, dst = chance.sample(range(n), 2)
        at = chance.randrange(len(steps) + 1)
        if at == len(steps) or chance.random() < 0.3:
            steps.insert(at, [])
        _put(steps[at], (src, dst), chance)
        return _frozen(steps)
    k = chance.choice(filled)
    src, dst = steps[k].pop(chance.randrange(len(steps[k])))
    if what == 1:  # to or from another rank
        other = chance.randrange(n)
        pair = (other, dst) if chance.random() < 0.5 else (src, other)
        if pair[0] != pair[1]:
            _put(steps[k], pair, chance)
    elif what == 2:  # at another time
        at = min(max(0, k + chance.choice((-2, -1, 1, 2))), len(steps) - 1)
        if chance.random() < 0.3:
            steps.insert(at, [])
        _put(steps[at], (src, dst), chance)
    elif what == 3:  # the other way round
        _put(steps[k], (dst, src), chance)
    return _frozen(steps)


def _put(step: list[tuple[int, int]], pair: tuple[int, int], chance: Random) -> None:
    if pair not in step:
        step.insert(chance.randrange(len(step) + 1), pair)


def _frozen(steps: list[list[tuple[int, int]]]) -> Plan:
    return tuple(tuple(step) for step in steps if step)
