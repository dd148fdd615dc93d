"""Random calls, the same on all ranks, and what must come of each, to the bit.

A *desk* is what a rank works with: the world's communicator, groups of it that were
kept, and the ids behind their ranks. `desk.members` are the ids of the communicator
that was used last: an error names ranks of that.
"""

import gc
import os
import random
from dataclasses import dataclass
from functools import cache

import numpy as np

from conformance import (
    MEANINGFUL,
    REDUCING,
    ROOTED,
    STYLES,
    WHOLE,
    Case,
    differing,
    expected,
    numbers,
    perform,
    same,
)
from kill_trials.programs import offered
from unisono.dtypes import DTYPES
from unisono.schedule.collective import COLLECTIVES

MOST_GROUPS = 3
CODECS = {"fp8": 0.1, "int8": 0.05, "bf16": 0.02}
"""Dense codecs, and a relative error that their sums of few ranks stay well below."""


_WRONG = bool(os.environ.get("CAMPAIGN_WRONG_REFERENCE"))
"""A test has set it: a correct result must then be reported as wrong."""


class WrongResult(AssertionError):
    """A call returned something else than it should have."""


@dataclass(frozen=True)
class Salted(Case):
    """A case whose numbers are others in each call: an old result is a wrong one."""

    salt: int = 0

    def given(self, rank):
        if self.what in ("broadcast", "scatter") and rank != self.root:
            return None
        count = self.size(rank, after=False)
        return numbers(self.dtype, count, [self.salt, rank, count])


class Desk:
    def __init__(
        self,
        comm,
        ids,
        seed,
        *,
        large=False,
        messages=True,
        any_source=True,
        sign=lambda: None,
    ):
        self.weights = _WEIGHTS if messages else _WEIGHTS | {"messages": 0}
        self.any_source = any_source
        self.comm, self.ids, self.seed, self.large = comm, list(ids), seed, large
        self.me = self.ids[comm.rank]
        self.members = self.ids
        self.groups = []
        self.sign = sign
        self.calls = 0
        self.kind = ""

    def turn(self, number):
        """Make the calls of one turn."""
        rng = random.Random(f"{self.seed}/{number}")
        self.kind = rng.choices(list(self.weights), list(self.weights.values()))[0]
        _KINDS[self.kind](self, rng)
        self.calls += 1

    def close_groups(self):
        for group, _ in self.groups:
            if group is not None:
                group.close()
        self.groups.clear()

    def own(self, rng):
        """Chance that differs from rank to rank."""
        return random.Random(f"{rng.random()}/{self.me}")

    def use(self, comm, members):
        """What comes next is a call of this communicator."""
        self.members = members
        self.sign()
        return comm


# --- collectives


def collective(desk, rng):
    case = draw_case(rng, desk.comm.world_size, desk.large)
    finish(desk, desk.comm, desk.ids, case, begin(desk, desk.comm, desk.ids, case))


def begin(desk, comm, members, case):
    return perform(desk.use(comm, members), [case])[0]


def finish(desk, comm, members, case, begun):
    """Wait if there is something to wait for, and compare."""
    result, kept = begun
    if "async_op" in case.more:
        desk.use(comm, members)
        result = result.wait()
    if not kept:
        raise WrongResult(f"{case}: the input was changed")
    core = comm.core
    model = core.session.links_between(core.world_ranks)
    wanted = expected(case, core.hosts_if_several, model)[comm.rank]
    if _WRONG and wanted is not None:
        wanted = wanted[:-1]
    if wanted is None:
        if result is not None:
            raise WrongResult(f"{case}: returned {result!r}, expected None")
    elif not same(result, wanted):
        raise WrongResult(f"{case}, rank {comm.rank}: {differing(result, wanted)}")


def draw_case(rng, n, large, **more):
    what = rng.choice(list(COLLECTIVES))
    algorithm = rng.choice((None, None, *offered(what, n)))
    dtype, op = _type(rng, what)
    counts = _counts(rng, what, n, large and DTYPES[dtype].itemsize >= 4)
    if what == "all_to_all" and "async_op" in more:
        counts = n * n  # uneven shares are exchanged first, and that is waited for
    uneven = not isinstance(counts, int)
    styles = STYLES[:2] if uneven and what == "all_to_all" else STYLES
    lenders = tuple(
        frozenset(r for r in range(n) if rng.random() < 0.5)
        if rng.random() < 0.3
        else frozenset()
        for _ in range(2)
    )
    return Salted(
        what,
        None if uneven else algorithm,
        n,
        counts,
        rng.randrange(n) if what in ROOTED else 0,
        dtype,
        op,
        rng.choice(styles),
        lenders,
        more,
        rng.getrandbits(32),
    )


def _type(rng, what):
    if what in REDUCING:
        if rng.random() < 0.5:
            return "float32", rng.choice(("sum", "mean", "max"))
        return rng.choice(MEANINGFUL)
    return rng.choice(("float32", *DTYPES)), "sum"


def _counts(rng, what, n, large):
    """Elements: none, one, odd, in a header, in a window, in several pieces."""
    if what == "barrier":
        return 0
    sizes = (0, 1, 2, 7, 10, 33, 333, 1000, 3001)
    count = rng.choice((*sizes, 50_001, 150_000) if large else sizes)
    if what in WHOLE:
        return count
    if rng.random() < 0.3:
        shares = n * n if what == "all_to_all" else n
        return tuple(rng.choice((0, 1, count // n, 5)) for _ in range(shares))
    return -(-count // n) * n


def in_flight(desk, rng):
    """Several calls in flight, waited for in another order on each rank."""
    cases = [
        draw_case(rng, desk.comm.world_size, desk.large, async_op=True)
        for _ in range(rng.randint(2, 5))
    ]
    begun = [(c, begin(desk, desk.comm, desk.ids, c)) for c in cases]
    desk.own(rng).shuffle(begun)
    for case, one in begun:
        finish(desk, desk.comm, desk.ids, case, one)


def coded(desk, rng):
    """A sum whose values travel as codes: a little wrong, and the same everywhere."""
    n, comm = desk.comm.world_size, desk.comm
    codec, most = rng.choice(list(CODECS.items()))
    count, salt = rng.choice((1, 64, 1000, 3001)), rng.getrandbits(32)
    given = [numbers("float32", count, [salt, r]) for r in range(n)]
    x = given[comm.rank].copy()
    desk.use(comm, desk.ids).all_reduce(x, codec=codec)
    exact = np.sum(given, axis=0, dtype=np.float64)
    scale = np.sqrt(sum(np.square(g, dtype=np.float64).sum() for g in given))
    lost = np.sqrt(np.square(x - exact).sum())
    if lost > 3 * n * most * scale:
        raise WrongResult(f"{codec}: an error of {lost / scale:.3f} of {count} numbers")
    marks = desk.use(comm, desk.ids).all_gather_objects(x.tobytes()[:4096])
    if len(set(marks)) > 1:
        raise WrongResult(f"{codec}: ranks have different bits")


# --- messages and objects


def messages(desk, rng):
    """Messages crosswise, all in flight at once; each has a tag of its own."""
    comm, n = desk.comm, desk.comm.world_size
    sizes = (0, 1, 9, 500, 20_000) if desk.large else (0, 1, 9, 500)
    first = 64 * desk.calls  # no tag twice: somebody may already be at the next turn
    drawn = [
        (rng.randrange(n), rng.randrange(n), tag, rng.choice(sizes))
        for tag in range(first, first + rng.randint(1, 2 * n))
    ]
    drawn = [m for m in drawn if m[0] != m[1]]
    salt, own = rng.getrandbits(32), desk.own(rng)
    value = {m[2]: numbers("int32", m[3], [salt, m[2]]) for m in drawn}
    received = [m for m in drawn if m[1] == comm.rank]
    own.shuffle(received)
    desk.use(comm, desk.ids)
    works = [
        (None, comm.send(value[tag].copy(), dst, tag=tag, async_op=True))
        for src, dst, tag, _ in drawn
        if src == comm.rank
    ]
    for src, _, tag, size in received:
        source = None if desk.any_source and own.random() < 0.2 else src
        out = np.zeros(size, np.int32)
        works.append((tag, comm.recv(out, source, tag=tag, async_op=True)))
    own.shuffle(works)
    for tag, work in works:
        result = desk.use(comm, desk.ids) and work.wait()
        if tag is not None and not np.array_equal(result, value[tag]):
            raise WrongResult(f"message {tag} of {drawn}: {result[:5]}")


def objects(desk, rng):
    comm, root = desk.comm, rng.randrange(desk.comm.world_size)
    thing = {"a": rng.random(), "b": "x" * rng.choice((0, 3, 3000)), "c": [1, None]}
    got = desk.use(comm, desk.ids).broadcast_object(
        thing if comm.rank == root else None, root
    )
    mine = [desk.me, "y" * (desk.me * rng.randrange(20))]
    everybody = desk.use(comm, desk.ids).gather_objects(mine, root)
    wanted = [desk.me] if comm.rank == root else None
    heads = everybody and [e[0] for e in everybody]
    if got != thing or heads != (wanted and desk.ids):
        raise WrongResult(f"got {got} and {everybody}, sent {thing}")


# --- groups


def split(desk, rng):
    """A group, used once and closed, dropped without a word, or kept."""
    comm, n = desk.comm, desk.comm.world_size
    colors = [rng.choice((0, 0, 1, None)) for _ in range(n)]
    keys = [rng.random() < 0.5 for _ in range(n)]
    made = desk.use(comm, desk.ids).split(colors[comm.rank], int(keys[comm.rank]))
    _used(desk, rng, made, _members(desk, colors, keys))


def _members(desk, colors, keys):
    mine = colors[desk.comm.rank]
    ranks = [r for r in range(len(colors)) if colors[r] == mine]
    return [desk.ids[r] for r in sorted(ranks, key=lambda r: (keys[r], r))]


def duplicate(desk, rng):
    made = desk.use(desk.comm, desk.ids).duplicate()
    _used(desk, rng, made, desk.ids)


def _used(desk, rng, made, members):
    end, salt = rng.choice(("close", "drop", "keep")), rng.random()
    if made is not None:
        chance = random.Random(f"{salt}/{members}")
        case = draw_case(chance, made.world_size, desk.large)
        finish(desk, made, members, case, begin(desk, made, members, case))
    if end == "keep" and len(desk.groups) < MOST_GROUPS:
        desk.groups.append((made, members))
    elif end == "close" and made is not None:
        made.close()
    else:
        del made
        gc.collect(0)


def concurrent(desk, rng):
    """Calls of the world and of all groups at once, begun in any order."""
    salt, own = rng.random(), desk.own(rng)
    used = [(desk.comm, desk.ids), *(g for g in desk.groups if g[0] is not None)]
    own.shuffle(used)
    begun = []
    for comm, members in used:
        chance = random.Random(f"{salt}/{members}/{comm.world_size}")
        case = draw_case(chance, comm.world_size, desk.large, async_op=True)
        begun.append((comm, members, case, begin(desk, comm, members, case)))
    own.shuffle(begun)
    for one in begun:
        finish(desk, *one)


_KINDS = {
    "collective": collective,
    "in_flight": in_flight,
    "messages": messages,
    "objects": objects,
    "split": split,
    "duplicate": duplicate,
    "concurrent": concurrent,
    "coded": coded,
}
IN_GROUPS = ("split", "duplicate", "concurrent")
"""Kinds of turns in which ranks wait in other communicators than the world's."""
_WEIGHTS = dict(zip(_KINDS, (30, 8, 8, 4, 6, 3, 8, 3), strict=True))


@cache
def warm(n, hosts):
    """Find algorithms once in the process that forks the ranks."""
    for what in COLLECTIVES:
        offered(what, n)
