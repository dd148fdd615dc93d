"""The two value domains of the verifier, and how a step runs in them.

A `ChunkState` is the state of some chunks on all ranks, one row of n slots each. It
runs steps in the native core where that was built, and otherwise in NumPy by the same
rules: each function here has its twin in native/verify/step_runner.hpp, and the tests
hold them equal.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

# Now, not at the first call: where a module of Cython is imported, Ctrl-C can be lost.
from numpy.random import Generator, default_rng
from numpy.typing import NDArray

from unisono.schedule.collective import Ints
from unisono.schedule.oracle import first_invalid
from unisono.schedule.protocol import ReadableSchedule
from unisono.schedule.step import Step

try:
    from unisono import _native
except ImportError:  # built without a compiler: NumPy does it, more slowly
    _native = None  # type: ignore[assignment]

State = NDArray[Any]
_BLOCK = 1 << 20


class ChunkState(ABC):
    """The state of chunks lo..hi-1, and what each must be in the end."""

    def __init__(
        self, schedule: ReadableSchedule, lo: int, hi: int, *, native: bool = True
    ) -> None:
        """Set up the state that the contract gives before the first step."""
        self.schedule, self.lo, self.hi = schedule, lo, hi
        contract = schedule.contract
        self.chunk = np.arange(lo, min(hi, schedule.num_chunks))
        self.before = contract.holder(contract.collective.before, self.chunk)
        self.after = contract.holder(contract.collective.after, self.chunk)
        self.state = self.begin()
        self.expected = self.end()
        self._runner = self.native_runner() if native and _native else None

    @property
    def rows(self) -> State:
        """The state by chunk and rank."""
        return self.state.reshape(self.hi - self.lo, self.schedule.n)

    @abstractmethod
    def begin(self) -> State:
        """The state before the first step, flat."""

    @abstractmethod
    def end(self) -> State:
        """What each chunk must be where the contract wants it."""

    @abstractmethod
    def native_runner(self) -> Any:
        """The native core's runner of steps on this state."""

    @abstractmethod
    def add(self, own: State, got: State) -> State:
        """Element by element, one slot's value and what is added to it."""

    @abstractmethod
    def total(self, values: State, starts: Ints) -> State:
        """The sums of consecutive runs of values that begin at `starts`."""

    def first_wrong(self) -> tuple[int, int] | None:
        """A (rank, chunk) whose slot does not fulfil the contract, if there is one."""
        rows = self.rows[: self.chunk.size]
        if self.after is None:
            right = rows == self.expected[:, None]
        else:
            there = rows[np.arange(self.chunk.size), self.after]
            right = (there == self.expected)[:, None]
        if right.all():
            return None
        row, rank = (int(i) for i in np.argwhere(~right)[0])
        rank = rank if self.after is None else int(self.after[row])
        return rank, self.lo + row

    def run(self, step: Step) -> int:
        """Carry out one step; the index of a transfer that breaks a rule, or -1."""
        if self._runner is None:
            return self._run_numpy(step)
        mixed = not isinstance(step.reduces, bool)
        broken: int = self._runner.run(
            _plane(step.src),
            _plane(step.dst),
            _plane(step.chunk),
            None if step.into is step.chunk else _plane(step.into),
            _plane(step.mask) if mixed else None,
            not mixed and bool(step.reduces),
        )
        return broken

    def _run_numpy(self, step: Step) -> int:
        broken = first_invalid(self.schedule, step)
        if broken >= 0:
            return broken
        src, dst, chunk, mask, into = step.flat()
        mine = np.flatnonzero((chunk >= self.lo) & (chunk < self.hi))
        src, dst, chunk, into = (a[mine] for a in (src, dst, chunk, into))
        mask = mask[mine]
        got = self.rows[chunk - self.lo, src]
        slot = (into - self.lo) * self.schedule.n + dst
        copies = np.flatnonzero(~mask)
        once, first = np.unique(slot[copies], return_index=True)
        if once.size < copies.size:
            second = np.setdiff1d(np.arange(copies.size), first)[0]
            return int(mine[copies[second]])
        self.state[slot[copies]] = got[copies]
        self._accumulate(slot[mask], got[mask])
        return -1

    def _accumulate(self, slot: Ints, got: State) -> None:
        """Add `got` to the slots, several of which may be the same."""
        if not slot.size:
            return
        order = np.argsort(slot, kind="stable")
        slot, got = slot[order], got[order]
        starts = np.flatnonzero(np.diff(slot, prepend=-1))
        if starts.size < slot.size:
            slot, got = slot[starts], self.total(got, starts)
        self.state[slot] = self.add(self.state[slot], got)


class PresenceState(ChunkState):
    """One byte a slot: 1 where the original is, 0 elsewhere."""

    def begin(self) -> State:
        """The original stands where the contract puts it, and nowhere else."""
        state = np.zeros((self.hi - self.lo, self.schedule.n), dtype=np.uint8)
        state[np.arange(self.hi - self.lo), self.before] = 1
        return state.ravel()

    def end(self) -> State:
        """The original."""
        return np.ones(self.chunk.size, dtype=np.uint8)

    def native_runner(self) -> Any:
        """The native twin."""
        s = self.schedule
        return _native.PresenceRunner(
            self.state, s.n, s.num_slots, self.lo, self.hi, may_rename=False
        )

    def add(self, own: State, got: State) -> State:
        """Nothing can be added to an original, or to nothing, and be one."""
        return np.zeros_like(own)

    def total(self, values: State, starts: Ints) -> State:
        """The same for several at once."""
        return np.zeros(starts.size, dtype=np.uint8)


class ValueState(ChunkState):
    """Eight bytes a slot: a random value, and sums of them modulo a random prime."""

    def __init__(
        self,
        schedule: ReadableSchedule,
        lo: int,
        hi: int,
        seed: int,
        *,
        native: bool = True,
    ) -> None:
        """Draw the prime, then the values; slots that begin empty get one as well."""
        self.rng = default_rng((seed, lo))
        self.modulus = random_prime(self.rng)
        super().__init__(schedule, lo, hi, native=native)

    def begin(self) -> State:
        """A value for every slot."""
        size = (self.hi - self.lo) * self.schedule.n
        return self.rng.integers(1 << 61, size=size, dtype=np.uint64)

    def end(self) -> State:
        """The sum over all ranks, or the one original."""
        rows, n = self.rows[: self.chunk.size], self.schedule.n
        if self.before is not None:
            return rows[np.arange(self.chunk.size), self.before].copy()
        some = max(1, _BLOCK // n)  # rows at a time, as the sums need copies of them
        blocks = [rows[at : at + some].ravel() for at in range(0, len(rows), some)]
        return np.concatenate([self.total(b, np.arange(0, b.size, n)) for b in blocks])

    def native_runner(self) -> Any:
        """The native twin."""
        s = self.schedule
        return _native.ValueRunner(
            self.state,
            self.modulus,
            s.n,
            s.num_slots,
            self.lo,
            self.hi,
            may_rename=s.num_temporaries > 0,
        )

    def add(self, own: State, got: State) -> State:
        """The sum of two values, each below the modulus."""
        both = own + got
        wrapped: State = np.minimum(both, both - np.uint64(self.modulus))
        return wrapped

    def total(self, values: State, starts: Ints) -> State:
        """In two halves of 32 bits, so that the sums of many still fit."""
        low = np.add.reduceat(values & np.uint64(0xFFFFFFFF), starts)
        high = np.add.reduceat(values >> np.uint64(32), starts)
        for _ in range(32):
            high = self.add(high, high)
        return self.add(high, low)


def random_prime(rng: Generator) -> int:
    """A prime between 2^61 and 2^62 that no schedule can have been made for."""
    while True:
        candidate = int(rng.integers(1 << 61, 1 << 62)) | 1
        if is_prime(candidate):
            return candidate


def is_prime(x: int) -> bool:
    """Miller and Rabin's test for odd x, with bases that make it exact below 2^64."""
    bases = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)
    odd, twos = x - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    return x in bases or all(_no_witness(pow(b, odd, x), twos, x) for b in bases)


def _no_witness(power: int, twos: int, x: int) -> bool:
    if power in (1, x - 1):
        return True
    for _ in range(twos - 1):
        power = power * power % x
        if power == x - 1:
            return True
    return False


def _plane(array: NDArray[Any]) -> NDArray[Any]:
    """Two dimensions, by a view where the strides allow it."""
    if array.ndim == 2:
        return array
    return (
        array.reshape(1, -1) if array.ndim < 2 else array.reshape(-1, array.shape[-1])
    )
