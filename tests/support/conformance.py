"""Cases of collectives: how ranks make them, and what must come of them, to the bit.

All ranks can tell from a case what everybody is given, so the same list of cases runs
on threads and on processes, and one process knows all results before.
"""

from dataclasses import dataclass, field
from functools import cache

import numpy as np

from unisono import UnsupportedWorld, schedule
from unisono.algorithms import library
from unisono.dtypes import DTYPES, OPS, check_op, numpy_dtype
from unisono.errors import BadArgument
from unisono.runtime.plan.plans import lowered
from unisono.runtime.plan.select import choose
from unisono.schedule.collective import COLLECTIVES, Contract, Holders
from unisono.testing import reference

WORLDS = [*range(1, 10), 13, 16]
STYLES = ["new", "out", "in place"]
ROOTED = ("broadcast", "scatter", "gather", "reduce")
REDUCING = ("reduce", "reduce_scatter", "all_reduce")
WHOLE = ("all_reduce", "reduce", "broadcast")  # those that any number of elements suits


@dataclass(frozen=True)
class Case:
    """One call; `counts` are the elements, as `Contract.chunk_sizes` takes them.

    With style "new" the call makes the result's array where it can; `lenders` are ranks
    whose arrays come from comm.empty, first inputs and then outputs.
    """

    what: str
    algorithm: str | None
    n: int
    counts: int | tuple[int, ...]
    root: int = 0
    dtype: str = "float32"
    op: str = "sum"
    style: str = "out"
    lenders: tuple[frozenset[int], frozenset[int]] = (frozenset(), frozenset())
    more: dict = field(default_factory=dict, hash=False, compare=False)

    def sizes(self, place: Holders, rank: int) -> list[int]:
        """The elements of each share that a rank has before or after."""
        collective = COLLECTIVES[self.what]
        multiple = collective.chunk_multiple(self.n)
        contract = Contract(collective, self.n, self.root, multiple)
        sizes = contract.chunk_sizes(self.counts)
        holder = contract.holder(place, np.arange(multiple))
        return (sizes if holder is None else sizes[holder == rank]).tolist()

    def size(self, rank: int, *, after: bool) -> int:
        collective = COLLECTIVES[self.what]
        place = collective.after if after else collective.before
        return sum(self.sizes(place, rank))

    def given(self, rank: int) -> np.ndarray | None:
        """What a rank holds before; None if nothing is asked of it."""
        if self.what in ("broadcast", "scatter") and rank != self.root:
            return None
        return _numbers(self.dtype, self.size(rank, after=False), rank)

    def has_result(self, rank: int) -> bool:
        return self.what not in ("reduce", "gather") or rank == self.root


@cache
def _numbers(dtype: str, count: int, rank: int) -> np.ndarray:
    return numbers(dtype, count, [rank, count])


def numbers(dtype: str, count: int, seed: list[int]) -> np.ndarray:
    """Some numbers, small enough that nothing overflows to a NaN."""
    random = np.random.default_rng(seed)
    if dtype == "bool":
        made = random.integers(0, 2, count).astype(bool)
    elif DTYPES[dtype].kind in "iu":
        raw = random.bytes(count * DTYPES[dtype].itemsize)
        made = np.frombuffer(raw, dtype).copy()
    elif DTYPES[dtype].kind == "c":
        parts = random.standard_normal((2, count))
        made = (parts[0] + 1j * parts[1]).astype(dtype)
    else:
        made = random.standard_normal(count).astype(numpy_dtype(dtype))
    made.flags.writeable = False
    return made


# --- the ranks' part


def perform(comm, cases):
    """Make all calls; for each the result and whether what is only read was kept."""
    return [_performed(comm, case) for case in cases]


def _performed(comm, case):
    x, out = _buffers(comm, case)
    kept = x.copy() if _only_read(case, comm.rank, x, out) else None
    found = dict(case.more)
    if case.algorithm is not None:
        found["algorithm"] = case.algorithm
    if case.what in ROOTED:
        found["root"] = case.root
    if case.what in REDUCING:
        found["op"] = case.op
    found |= _counts(case, comm.rank)
    if case.what == "barrier":
        return comm.barrier(**found), True
    result = getattr(comm, case.what)(x, out=out, **found)
    return result, kept is None or bool((bits(kept) == bits(x)).all())


def _only_read(case, rank, x, out):
    if x is None or (out is not None and np.shares_memory(x, out)):
        return False
    return out is not None or case.what not in WHOLE or not case.has_result(rank)


def _counts(case, rank):
    if isinstance(case.counts, int):
        return {}
    if case.what != "all_to_all":
        return {"counts": case.counts}
    matrix = np.reshape(case.counts, (case.n, case.n))
    return {
        "send_counts": matrix[rank].tolist(),
        "recv_counts": matrix[:, rank].tolist(),
    }


def _buffers(comm, case):
    """Input and output of this rank, separate or not, exposed or not."""
    rank = comm.rank
    given = case.given(rank)
    make = [comm.empty if rank in some else np.empty for some in case.lenders]
    dtype = numpy_dtype(case.dtype)
    if case.what in WHOLE and case.style != "out":
        x = make[0](case.size(rank, after=False) or case.size(rank, after=True), dtype)
        if given is not None:
            x[:] = given
        return x, None
    if case.style == "in place":
        return _in_place(make, case, rank, given, dtype)
    x = None
    if given is not None:
        x = make[0](given.size, dtype)
        x[:] = given
    elif case.what == "broadcast":
        x = np.zeros(case.size(rank, after=True), dtype)
    must = case.style == "out" or (case.what == "scatter" and given is None)
    if not (must and case.has_result(rank)):
        return x, None
    return x, make[1](case.size(rank, after=True), dtype)


def _in_place(make, case, rank, given, dtype):
    """A rank's own rows are a part of the larger buffer, and x is out in all_to_all."""
    before = case.size(rank, after=False)
    after = case.size(rank, after=True)
    whole = make[0](max(before, after) if case.has_result(rank) else before, dtype)
    if case.what == "all_to_all":
        whole[:before] = given
        return whole, whole
    x = out = whole
    if case.what in ("all_gather", "gather") and case.has_result(rank):
        lead = sum(_shares(case)[:rank])
        x = whole[lead : lead + before]
    elif case.what in ("all_gather", "gather"):
        out = None
    elif given is None:
        x = None
    else:
        lead = sum(_shares(case)[:rank])
        out = whole[lead : lead + after]
    if x is not None:
        x[:] = given
    return x, out


def _shares(case):
    owned = COLLECTIVES[case.what]
    contract = Contract(owned, case.n, case.root, owned.chunk_multiple(case.n))
    return contract.chunk_sizes(case.counts).tolist()


# --- what must come of it


def bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def same(found: np.ndarray, wanted: np.ndarray) -> bool:
    """Equal bits, but any NaN equals any other."""
    if found.dtype != wanted.dtype or found.shape != wanted.shape:
        return False
    if np.array_equal(bits(found), bits(wanted)):
        return True
    with np.errstate(all="ignore"):
        wide = [np.asarray(a).astype(np.complex128) for a in (found, wanted)]
    return np.array_equal(*wide, equal_nan=True) and not (wide[0] == 0).any()


def expected(case: Case, hosts=(), model=None) -> list[np.ndarray | None]:
    """The results by rank: sums by the schedule's steps, copies as they must be.

    `model` is that of the links between hosts, if the ranks have probed them.
    """
    given = [case.given(r) for r in range(case.n)]
    if case.what in REDUCING:
        return reference(_schedule(case, hosts, model), given, case.counts, op=case.op)
    return [_copied(case, given, r) for r in range(case.n)]


def _schedule(case, hosts, model):
    name = case.algorithm
    if name is None:
        total = case.counts if isinstance(case.counts, int) else sum(case.counts)
        nbytes = total * DTYPES[case.dtype].itemsize
        result = case.more.get("reproducible", False)
        name = choose(
            case.what,
            nbytes,
            case.n,
            named=None,
            reproducible=result,
            hosts=hosts or None,
            model=model,
        ).algorithm
    return _found(case.what, name, case.n, case.root)


@cache
def _found(what, name, n, root):
    return schedule(what, name, n, root=root)


def _copied(case, given, rank):
    """What a collective that only copies gives a rank, by its meaning."""
    if case.what == "barrier" or not case.has_result(rank):
        return None
    if case.what == "broadcast":
        return given[case.root]
    if case.what in ("all_gather", "gather"):
        return np.concatenate(given)
    if case.what == "scatter":
        return np.split(given[case.root], np.cumsum(_shares(case))[:-1])[rank]
    rows = np.reshape(_shares(case), (case.n, case.n))
    parts = [
        np.split(x, np.cumsum(row)[:-1])[rank]
        for x, row in zip(given, rows, strict=True)
    ]
    return np.concatenate(parts)


def differing(found: np.ndarray, wanted: np.ndarray) -> str:
    """Where two arrays differ, in few words."""
    if found.dtype != wanted.dtype or found.shape != wanted.shape:
        return f"{found.dtype}{found.shape} is not {wanted.dtype}{wanted.shape}"
    raw = [bits(a).reshape(a.size, a.itemsize) for a in (found, wanted)]
    where = np.flatnonzero((raw[0] != raw[1]).any(axis=1))
    first = where[0]
    return f"{where.size} elements differ, first {found[first]} at {first}"


def check(cases, results, hosts=()) -> None:
    """Compare what all ranks returned with what they should have."""
    for number, case in enumerate(cases):
        wanted = expected(case, hosts)
        for rank in range(case.n):
            found, kept = results[rank][number]
            where = f"{case}, rank {rank}"
            assert kept, f"{where}: the input was changed"
            if wanted[rank] is None:
                assert found is None, where
            else:
                assert same(found, wanted[rank]), (
                    f"{where}: {differing(found, wanted[rank])}"
                )


# --- lists of cases


def fitting(variants, n):
    """Those that can be had for n ranks."""
    found = []
    for what, name in variants:
        try:
            _found(what, name, n, 0)
        except UnsupportedWorld:
            continue
        found.append((what, name))
    return found


def sizes_for(what: str, n: int, elements) -> list[int]:
    """Numbers of elements near those asked for that suit the collective."""
    if what == "barrier":
        return [0]
    return sorted({e if what in WHOLE else -(-e // n) * n for e in elements})


def prepare(cases) -> None:
    """Lower what will be needed once, and not on every thread at once."""
    for what, name, n, root in {(c.what, c.algorithm, c.n, c.root) for c in cases}:
        if name is not None:
            lowered(what, name, n, root)
            for mode in range(4):
                lowered(what, name, n, root, mode)


def every_algorithm(n: int, elements, variants=None) -> list[Case]:
    """All algorithms of the library at several sizes, roots and styles."""
    variants = list(library()) if variants is None else variants
    found = []
    for what, name in fitting(variants, n):
        roots = sorted({0, n - 1}) if what in ROOTED else [0]
        turn = len(found)
        for count in sizes_for(what, n, elements):
            for root in roots:
                style = STYLES[turn % 3]
                turn += 1
                found.append(Case(what, name, n, count, root, style=style))
    return found


MEANINGFUL = []
for _dtype in DTYPES.values():
    for _op in OPS:
        try:
            check_op(_dtype, _op)
        except BadArgument:
            continue
        MEANINGFUL.append((_dtype.name, _op))


def every_reduction(n: int, count: int = 53) -> list[Case]:
    """All element types and operations, each by three algorithms of each collective."""
    by = {
        "all_reduce": [None, "ring", "recursive_doubling"],
        "reduce": [None, "tree", "chain"],
        "reduce_scatter": [None, "ring", "halving_doubling"],
    }
    found = []
    for what, names in by.items():
        for name in names:
            for number, (dtype, op) in enumerate(MEANINGFUL):
                style = STYLES[number % 3]
                size = count if what in WHOLE else count * n
                root = n - 1 if what == "reduce" else 0
                found.append(Case(what, name, n, size, root, dtype, op, style))
    return found


def every_type(n: int, count: int = 21) -> list[Case]:
    """All element types through the collectives that only copy."""
    copying = [w for w in COLLECTIVES if w not in (*REDUCING, "barrier")]
    return [
        Case(what, None, n, count * n, n // 2 if what in ROOTED else 0, dtype)
        for what in copying
        for dtype in DTYPES
    ]
