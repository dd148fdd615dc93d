"""Programs with codes: every order of the ranks, the same bits, and how wrong they are.

Values are kept as how they came about, so that what was encoded, and how often, can be
read off the result.
"""

import math
from dataclasses import replace
from random import Random

import pytest
from lowering import PIECES, call, holders, schedules
from variants import QUICK, VARIANTS

from program_player import Call, ProgramFault, play
from unisono import schedule
from unisono.algorithms import library
from unisono.errors import BadArgument
from unisono.schedule.coding import Scope
from unisono.schedule.collective import Holders
from unisono.schedule.lower import lower
from unisono.schedule.program import Home

PLAIN = list(library())
SPECIAL = [v for v in VARIANTS if v not in PLAIN]
FOLDED = ("recursive_doubling",)
"""Some ranks get a copy of what others add up each for itself: unlike bits."""
REDUCING = ("reduce", "reduce_scatter", "all_reduce")


def summed(values, completes):
    total = values[0]
    for value in values[1:]:
        total = ("sum", *sorted((total, value), key=repr))
    return total


def encode(value):
    assert value[0] != "code"
    return ("code", value)


def decode(code):
    assert code[0] == "code"
    return ("decoded", code[1])


def variance(value):
    """Contributions, and the variance of their errors: as the law has it."""
    if value[0] == "given":
        return 1, 0.0
    parts = [variance(part) for part in value[1:]]
    size, noise = sum(p[0] for p in parts), sum(p[1] for p in parts)
    return (size, noise + size) if value[0] == "decoded" else (size, noise)


def ranks_in(value):
    if value[0] == "given":
        return [value[1]]
    return sorted(rank for part in value[1:] for rank in ranks_in(part))


def played(made, scope, hosts, seed):
    """What comes of it, as how it came about; None if it is refused."""
    try:
        lowered = lower(made, hosts=hosts, coded=scope)
    except BadArgument:
        return None
    given = call(made, (False, False), seed, lowered, hosts)
    inputs = {
        (r, c): [("given", r, c, piece) for piece in range(PIECES)]
        for r, c in holders(made, made.collective.before)
    }
    one = Call(lowered, inputs, PIECES, given.in_place, hosts=hosts)
    return lowered, play([one], summed, seed=seed, encode=encode, decode=decode)[0]


def check(made, scope, hosts, seed):
    found = played(made, scope, hosts, seed)
    if found is None:
        return False
    lowered, ends = found
    assert set(ends) == set(holders(made, made.collective.after))
    if made.collective.after is Holders.EVERYWHERE:
        for (_, chunk), values in ends.items():
            assert values == ends[0, chunk]
    worst = 0.0
    reduces = made.collective.name in REDUCING
    for values in ends.values():
        if reduces:
            assert ranks_in(values[0]) == list(range(made.n))
        size, noise = variance(values[0])
        worst = max(worst, noise / size)
    assert math.isclose(lowered.noise.factor, math.sqrt(worst), abs_tol=1e-9)
    return True


def placed(n, random):
    if random.random() < 0.3:
        return tuple(range(n))
    count = random.randint(2, max(2, n - 1))
    return tuple(random.randrange(count) for _ in range(n))


def cases():
    """All of the library in three worlds, and all with parameters in one."""
    yield from ((*v, n) for v in PLAIN for n in (2, 3, 8))
    for v in SPECIAL:
        yield pytest.param(*v, 4, marks=() if v in QUICK else pytest.mark.sweep)


@pytest.mark.quick(n=[3, 4])
@pytest.mark.parametrize(("what", "name", "n"), list(cases()))
def test_coded_programs_give_the_same_bits_in_any_order(what, name, n):
    random = Random(f"{what} {name} coded")
    for made in schedules(what, name, [n]):
        allowed = check(made, Scope.ALL, (), seed=made.n)
        assert allowed or name.startswith(FOLDED), made.title
        check(made, Scope.HOSTS, placed(made.n, random), seed=made.n + 1)
        if made.n == 3:
            check(made, Scope.ALL, placed(made.n, random), seed=made.n)


def test_one_rank_encodes_nothing():
    for what, name in PLAIN:
        lowered = lower(schedule(what, name, 1), coded=Scope.ALL)
        assert (lowered.codes, lowered.noise.factor) == (0, 0)


@pytest.mark.cases(3)
@pytest.mark.parametrize("n", [2, 3, 4, 8, 13, 32, 64])
def test_noise_factor_follows_the_closed_form(n):
    """Own values are read as they are, so direct is a little below its law."""

    def factor(name):
        return lower(schedule("all_reduce", name, n), coded=Scope.ALL).noise.factor

    assert math.isclose(factor("direct"), math.sqrt(2 - 1 / n))
    if n <= 13:
        assert math.isclose(factor("ring"), math.sqrt((n + 1) / 2))
    if n & (n - 1) == 0:
        halving = factor("halving_doubling")
        assert math.isclose(halving, math.sqrt(math.log2(n) / 2 + 1))
    if n == 64:
        two_levels = factor("hierarchical:by=direct/direct")
        assert math.isclose(two_levels, math.sqrt(3), rel_tol=0.05)


def test_codec_between_hosts_keeps_values_within_a_host_exact():
    hosts = (0,) * 4 + (1,) * 4
    made = schedule("all_reduce", "hierarchical:hosts=0x4.1x4,by=direct/direct", 8)
    inside = lower(made, hosts=hosts, coded=Scope.HOSTS)
    assert inside.noise.terms == ((4, 0.5), (8, 1.0))  # never a single contribution
    for p in inside.programs:
        for m in p.messages:
            assert m.source.home is Home.CODE
    one_host = lower(made, coded=Scope.HOSTS)
    assert one_host.codes == 0
    assert one_host.noise.factor == 0


def test_every_value_is_encoded_once():
    """A direct all_reduce encodes its input but for its own share, and one sum."""
    lowered = lower(schedule("all_reduce", "direct", 5), coded=Scope.ALL)
    for p in lowered.programs:
        encoding = [
            a
            for a in p.actions
            if a.code is not None
            and not (len(a.sources) == 1 and a.sources[0].home is Home.CODE)
        ]
        assert len(encoding) == 5
        assert sum(a.back for a in p.actions) == 1


def test_schedules_that_would_end_with_different_bits_are_refused():
    made = schedule("all_reduce", "recursive_doubling", 5)  # folded: some get a copy
    with pytest.raises(BadArgument, match="different bits; use direct"):
        lower(made, coded=Scope.ALL)


@pytest.mark.parametrize("name", ["direct", "ring", "halving_doubling"])
def test_programs_that_keep_stale_values_are_detected(name):
    """Without `back` the owner of a sum differs from those who got its code."""
    made = schedule("all_reduce", name, 4)
    found = played(made, Scope.ALL, (), 1)
    lowered, right = found
    wrong = tuple(
        replace(p, actions=tuple(replace(a, back=False) for a in p.actions))
        for p in lowered.programs
    )
    inputs = {
        (r, c): [("given", r, c, piece) for piece in range(PIECES)]
        for r, c in holders(made, made.collective.before)
    }
    changed = replace(lowered, programs=wrong)
    one = Call(changed, inputs, PIECES)
    ends = play([one], summed, encode=encode, decode=decode)[0]
    assert ends != right
    few = replace(lowered, codes=lowered.codes - 1)
    with pytest.raises(ProgramFault, match="has no slot"):
        play([Call(few, inputs, PIECES)], summed, encode=encode, decode=decode)
