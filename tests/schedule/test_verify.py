"""The fast verifier: its two twins, its lots, its primes, and what its proof says."""

import sys
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import unisono
from unisono.algorithms import library
from unisono.errors import ScheduleError
from unisono.schedule import Schedule, Step, Transfer, check_exactly, from_steps, verify
from unisono.schedule.collective import ALL_GATHER, ALL_REDUCE
from unisono.schedule.domains import (
    ChunkState,
    PresenceState,
    ValueState,
    is_prime,
    random_prime,
)

law = settings(max_examples=80)
VERIFIER = sys.modules["unisono.schedule.verify"]  # the name in the package: a function
NATIVE = sys.modules["unisono.schedule.domains"].__dict__["_native"] is not None
both_built = pytest.mark.skipif(not NATIVE, reason="unisono._native was not built")
KEYS = list(library())
CASES = [*KEYS, ("all_reduce", "dissemination:carry"), ("all_reduce", "direct:rotate")]


def scheduled(case: tuple[str, str], n: int) -> Schedule:
    what, name = case
    return unisono.schedule(what, name, n)


def twins(
    schedule: Schedule, lo: int, hi: int, *, exact: bool
) -> tuple[ChunkState, ChunkState]:
    """The same lot, run by the native core and by NumPy."""
    if exact:
        one, two = (PresenceState(schedule, lo, hi, native=b) for b in (True, False))
        return one, two
    seed = 7
    native = ValueState(schedule, lo, hi, seed)
    return native, ValueState(schedule, lo, hi, seed, native=False)


def steps_from(rows: list[list[Transfer]]) -> list[Step]:
    return [step_from(step) for step in rows if step]


def step_from(rows: list[Transfer]) -> Step:
    src, dst, chunk, reduces, into = np.array(rows, dtype=np.int64).T
    return Step(src, dst, chunk, into, reduces.astype(bool))


@both_built
@pytest.mark.parametrize(("what", "name"), CASES)
def test_native_and_numpy_end_every_step_in_the_same_state(what, name):
    for n in (1, 2, 7, 8):
        made = unisono.schedule(what, name, n)
        exact = not made.collective.reduces
        native, plain = twins(made, 0, made.num_slots, exact=exact)
        assert np.array_equal(native.expected, plain.expected)
        for step in made:
            assert native.run(step) == plain.run(step) == -1
            assert np.array_equal(native.state, plain.state)
        assert native.first_wrong() is plain.first_wrong() is None


def transfers(ranks: int, slots: int) -> st.SearchStrategy[Transfer]:
    return st.builds(
        Transfer,
        src=st.integers(-1, ranks),
        dst=st.integers(0, ranks - 1),
        chunk=st.integers(0, slots - 1),
        reduces=st.booleans(),
        into=st.integers(0, slots),
    )


def kept(t: Transfer, n: int) -> Transfer:
    """Much the same transfer, but under one name and between two ranks."""
    return t._replace(into=t.chunk, src=(t.dst + 1 + t.src % (n - 1)) % n)


@pytest.mark.cases(1)
@both_built
@pytest.mark.parametrize(("exact", "temporaries"), [(True, 0), (False, 0), (False, 2)])
@law
@given(data=st.data(), keep_names=st.booleans())
def test_native_and_numpy_agree_on_any_steps(exact, temporaries, data, keep_names):
    n, chunks = 3, 6
    what = ALL_GATHER if exact else ALL_REDUCE
    lo, hi = (0, 6 + temporaries) if temporaries else (2, 5)
    made = from_steps(what, n, [], num_chunks=chunks, num_temporaries=temporaries)
    one, two = twins(made, lo, hi, exact=exact)
    rows = data.draw(st.lists(st.lists(transfers(n, 6), max_size=8), max_size=5))
    if keep_names:
        rows = [[kept(t, n) for t in step] for step in rows]
    for step in steps_from(rows):
        broken = one.run(step)
        assert broken == two.run(step)
        if broken >= 0:
            return
        assert np.array_equal(one.state, two.state)
    assert one.first_wrong() == two.first_wrong()


def wrong_ones() -> list[Schedule]:
    """Schedules with a transfer too few, a transfer too many, and a second copy."""
    made = []
    for what, name in (("all_reduce", "ring"), ("all_gather", "circulant")):
        right = unisono.schedule(what, name, 6)
        steps = list(right)
        for at in (0, len(steps) - 1):
            less = steps[at].where(np.arange(len(steps[at])).reshape(-1) != 1)
            made.append(right.but(make=lambda s=steps, a=at, x=less: replaced(s, a, x)))
        again = [*steps, steps[-1]]
        made.append(right.but(make=lambda s=again: s))
        twice = step_from([*steps[-1], *steps[-1]])
        made.append(right.but(make=lambda s=steps, x=twice: [*s[:-1], x]))
    return made


def replaced(steps: list[Step], at: int, by: Step) -> list[Step]:
    return [*steps[:at], by, *steps[at + 1 :]]


def outcome(schedule: Schedule) -> str:
    try:
        proof = verify(schedule)
    except ScheduleError as wrong:
        return f"{wrong} {wrong.step} {wrong.rank} {wrong.chunk} {wrong.missing}"
    return f"{proof.steps} steps, {proof.transfers} transfers, {proof.doubt}"


def test_random_faults_are_of_several_kinds():
    outcomes = {outcome(schedule) for schedule in wrong_ones()}
    assert len(outcomes) >= 6
    assert any("second copy" in text for text in outcomes)


@pytest.mark.cases(1)
@pytest.mark.parametrize("state_bytes", [1, 100, 1000])
def test_verification_in_several_batches_gives_the_same_result(
    monkeypatch, state_bytes
):
    right = [unisono.schedule(what, name, 6) for what, name in KEYS]
    wrong = wrong_ones()
    at_once = [outcome(schedule) for schedule in (*right, *wrong)]
    monkeypatch.setattr(VERIFIER, "STATE_BYTES", state_bytes)
    assert [outcome(schedule) for schedule in (*right, *wrong)] == at_once


def test_budget_decides_how_many_chunks_are_taken_at_a_time(monkeypatch):
    ring = unisono.schedule("all_reduce", "ring", 6)
    asked = []

    def make() -> Iterable[Step]:
        asked.append(1)
        return ring.make()

    watched = ring.but(make=make)
    monkeypatch.setattr(VERIFIER, "STATE_BYTES", 2 * 6 * 8)
    verify(watched)
    assert len(asked) == 3


def test_chunks_that_may_mix_are_taken_together(monkeypatch):
    carry = unisono.schedule("all_reduce", "dissemination:carry", 7)
    monkeypatch.setattr(VERIFIER, "STATE_BYTES", 1)
    assert carry.num_temporaries == 1
    assert verify(carry)


def test_results_without_the_native_core_are_the_same(monkeypatch):
    schedules = [unisono.schedule(what, name, 5) for what, name in CASES]
    schedules += wrong_ones()
    result = [outcome(schedule) for schedule in schedules]
    monkeypatch.setattr(sys.modules["unisono.schedule.domains"], "_native", None)
    assert [outcome(schedule) for schedule in schedules] == result


def test_algorithm_that_is_wrong_in_some_iterations_is_reported():
    ring = unisono.schedule("all_gather", "ring", 4)
    asked = []

    def make() -> list[Step]:
        asked.append(1)
        return list(ring)[: 2 if len(asked) == 1 else 3]

    with pytest.raises(
        ScheduleError, match="wrong in one run and right in another"
    ) as caught:
        verify(ring.but(make=make))
    assert caught.value.rank is not None
    assert caught.value.chunk is not None


@law
@given(st.sampled_from(CASES), st.integers(1, 9), st.integers(0, 2**63))
def test_proof_counts_steps_and_transfers_and_keeps_its_seed(case, n, seed):
    made = scheduled(case, n)
    proof = verify(made, seed=seed)
    assert (proof.schedule, proof.seed) == (made, seed)
    assert proof.steps == made.num_steps == len(list(made))
    assert proof.transfers == sum(len(step) for step in made)
    assert proof.exact == (not made.collective.reduces)
    assert proof.doubt == ("none" if proof.exact else "below 2^-60")


@law
@given(st.sampled_from(CASES), st.integers(1, 9))
def test_exact_interpreter_accepts_the_library(case, n):
    check_exactly(scheduled(case, n))


def test_proof_reads_as_one_line():
    proof = unisono.schedule("all_reduce", "ring", 5).verify()
    begin = "verified: all_reduce by ring, n=5: 40 transfers in 8 steps, "
    assert str(proof).startswith(begin)
    assert str(proof).endswith("chance of error: below 2^-60")


def test_exact_proof_of_copies_has_no_error_probability():
    assert "error: none" in str(verify(unisono.schedule("scatter", "tree", 5)))


def sieve(end: int) -> set[int]:
    prime = np.ones(end, dtype=bool)
    prime[:2] = False
    for p in range(2, int(end**0.5) + 1):
        if prime[p]:
            prime[p * p :: p] = False
    return set(np.flatnonzero(prime).tolist())


def test_odd_primes_are_those_of_the_sieve():
    end = 20_000
    assert {x for x in range(3, end, 2) if is_prime(x)} == sieve(end) - {2}


@pytest.mark.parametrize(
    "composite", [41 * 43, 3215031751, (2**31 - 1) ** 2, 3825123056546413051]
)
def test_composites_that_pass_few_bases_are_detected(composite):
    assert not is_prime(composite)


@pytest.mark.parametrize("prime", [41, 2**31 - 1, 2**61 - 1, 2**64 - 59])
def test_large_primes_are_recognised(prime):
    assert is_prime(prime)


@law
@given(st.integers(0, 2**64))
def test_random_primes_lie_where_sums_still_fit(seed):
    prime = random_prime(np.random.default_rng(seed))
    assert 2**61 < prime < 2**62
    assert is_prime(prime)
    assert all(prime % p for p in sieve(1000))
