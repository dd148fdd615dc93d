"""To whom a rank's bytes went: worked out when somebody asks, and only then.

The native core adds up how much a rank has sent, not to whom; that would cost something
in every call. But it keeps a record of the last 2,000 calls, and a plan's schedule says
how much of a call goes to each peer. So at every look the new records are matched with
the plans they ran, and what these send is added up:

    record    all_reduce, float32, 4096 elements, ring
    plan      in that ring rank 1 sends 8192 bytes to rank 2
    link      1 -> 2: 8192 bytes more

The sum over all peers is always what the core has counted. What no record tells of any
more (over 2,000 calls since the last look) is taken to have gone as the rest did. Plans
that differ in their uneven shares alone are not told apart by records: if each has run
once since it was made, all is clear, and if not the last calls are taken to have run
the last plans. `guessed` says how many bytes are where they are for such a reason.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from unisono import _native
from unisono.dtypes import DTYPES, OPS
from unisono.runtime.buffers import Buffer
from unisono.runtime.calls import Call
from unisono.runtime.coded_plans import chunk_sizes, coded_kind
from unisono.runtime.coding import as_coding
from unisono.runtime.operations import as_reduction
from unisono.runtime.options import How
from unisono.runtime.plans import CODES, Kind, in_short, verified
from unisono.schedule.coding import Scope
from unisono.schedule.collective import Ints
from unisono.transports.base import Transport

_SEND = CODES["send"]
_STARTED, _COMPLETED = 1, 2
_BY_CODE = {dtype.code: dtype for dtype in DTYPES.values()}
_UNEVEN = 256
"""So many plans are kept apart that records do not tell apart."""

Note = tuple[int, int, int, int, int, str]
"""What a record tells of a call: collective, type, op, root, elements, algorithm."""


def sent_to(kind: Kind, n: int, rank: int, hosts: tuple[int, ...] = ()) -> Ints:
    """How many bytes of one such call a rank sends to each of n."""
    key = kind.collective, kind.algorithm, n, kind.root
    times = _times(*key, rank)
    sizes, coding = _sizes(kind, n), kind.coding
    values = times @ (sizes * kind.dtype.itemsize)
    if coding is None:
        return np.asarray(values)
    codes = times @ np.array([coding.codec.nbytes(int(s)) for s in sizes], np.int64)
    if coding.scope is Scope.ALL:
        return np.asarray(codes)
    host = np.array(hosts or [0] * n)
    return np.where(host == host[rank], values, codes)


@lru_cache(maxsize=256)
def _times(collective: str, algorithm: str, n: int, root: int, rank: int) -> Ints:
    """How often a rank sends each chunk to each peer: a row per peer."""
    schedule = verified(collective, algorithm, n, root)
    chunks = schedule.num_chunks
    times = np.zeros(n * chunks, dtype=np.int64)
    for step in schedule:
        src, dst, slot, _, _ = step.flat()
        ours = (src == rank) & (dst != rank)
        # A temporary is as large as the chunk it stands in for.
        cell = dst[ours] * chunks + slot[ours] % chunks
        times += np.bincount(cell, minlength=times.size)
    return times.reshape(n, chunks)


def _sizes(kind: Kind, n: int) -> Ints:
    contract = verified(kind.collective, kind.algorithm, n, kind.root).contract
    if kind.coding is None:
        return contract.chunk_sizes(kind.counts)
    return chunk_sizes(contract, kind.counts, kind.coding.codec.block)


def _note(kind: Kind, n: int) -> Note:
    coding = str(kind.coding) if kind.coding is not None else ""
    return (
        CODES[kind.collective],
        kind.dtype.code,
        OPS.index(kind.reduction.op),
        kind.root,
        int(_sizes(kind, n).sum()),
        in_short(kind.algorithm, kind.label, coding),
    )


def _kind_of(comm: Any, key: Any) -> Kind:
    """The kind of call that a communicator keeps a plan for under this key."""
    how = How()
    if len(key) == 6:
        collective, code, op, root, counts, how = key
    else:  # as `start` has it
        collective, code, counts, op, root = key
    nothing = Buffer(None, 0, (), _BY_CODE[code])
    call = Call(collective, counts, nothing, nothing, None, None, root)
    if how.codec is None:
        kind: Kind = comm._kind(call, as_reduction(op), how)
        return kind
    coding = as_coding(how.codec, how.coded)
    what = call, as_reduction(op), how, coding
    return coded_kind(*what, comm.world_size, comm._hosts)


class _Group:
    """What one communicator's calls have sent, by its own ranks."""

    def __init__(self, comm: Any) -> None:
        n = comm.world_size
        self.to = np.zeros(n, dtype=np.int64)
        self._guesses = np.zeros_like(self.to)
        self._ways: dict[Note, deque[Ints]] = {}
        self._keys: set[object] = set()
        self._fresh: Counter[Note] = Counter()

    def learn(self, comm: Any) -> None:
        """What there are plans for, those made last at the end."""
        keys, self._fresh = [*comm._plans, *comm._once], Counter()
        for key in keys:
            if key not in self._keys:
                kind = _kind_of(comm, key)
                note = _note(kind, comm.world_size)
                ways = self._ways.setdefault(note, deque(maxlen=_UNEVEN))
                sent = sent_to(kind, comm.world_size, comm.rank, comm._hosts)
                if not ways or (ways[-1] != sent).any():
                    ways.append(sent)
                    self._fresh[note] += 1
        self._keys = set(keys)

    def add(
        self, comm: Any, done: list[Any], flying: list[Any], counted: int, at: int
    ) -> None:
        """Take in the records of calls that are done since the last look.

        What was `counted` at a time is theirs, but for those that ended later.
        """
        known, likely = np.zeros_like(self.to), np.zeros_like(self.to)
        clear = self._clear(done, flying)
        for note, way in self._ways_of(comm, done):
            part = known if note is None or note in clear else likely
            part += way
        self.to += known
        ended_later = [r for r in done if r[5] > at]
        later = sum(int(way.sum()) for _, way in self._ways_of(comm, ended_later))
        left = counted + later - int(self.to.sum())
        explained = min(max(left, 0), int(likely.sum()))
        self._guess(_spread(explained, likely))
        rest = left - explained
        if rest > 0:
            weights = known + likely
            self._guess(_spread(rest, weights if weights.any() else self.to))
        else:  # some call was counted a moment before its record said so
            self._guess(-_spread(min(-rest, self.guessed), self._guesses))

    def _guess(self, way: Ints) -> None:
        self.to += way
        self._guesses += way

    @property
    def guessed(self) -> int:
        """How many of the bytes are where they are by a guess."""
        return int(self._guesses.sum())

    def _clear(self, done: list[Any], flying: list[Any]) -> set[Note]:
        """Of which calls it is certain what plan they ran."""
        calls = Counter(r[2][1:] for r in done)
        return {
            note
            for note, ways in self._ways.items()
            if len(ways) == 1 or calls[note] == self._fresh[note]
        } - {r[2][1:] for r in flying if len(self._ways.get(r[2][1:], ())) > 1}

    def _ways_of(
        self, comm: Any, records: list[Any]
    ) -> Iterator[tuple[Note | None, Ints]]:
        """Where the bytes of each went; a message has no note."""
        used: dict[Note, int] = {}
        for record in reversed(records):  # the last plans go with the last records
            _, code, dtype, *_, count, _ = record[2]
            if code == _SEND:
                way = np.zeros_like(self.to)
                away = record[7] != comm.rank
                way[record[7]] = count * _BY_CODE[dtype].itemsize * away
                yield None, way
                continue
            note = record[2][1:]
            ways = self._ways.get(note)
            if ways:
                at = min(used.get(note, 0), len(ways) - 1)
                used[note] = at + 1
                yield note, ways[-1 - at]


def _spread(total: int, weights: Ints) -> Ints:
    """A number of bytes in these proportions, to the last one."""
    whole = int(weights.sum())
    shares = [total * int(w) // whole if whole else 0 for w in weights]
    if whole:
        shares[int(weights.argmax())] += total - sum(shares)
    return np.array(shares, dtype=np.int64)


class Destinations:
    """To whom one rank has sent, as far as its communicators are open."""

    def __init__(self) -> None:
        """Nothing has been asked yet."""
        self._groups: dict[int, _Group] = {}
        self._upto = 0
        self._flying: set[int] = set()

    def told(self, transport: Transport, comms: Sequence[Any]) -> dict[str, Any]:
        """What is known now, by ranks of the world; for JSON."""
        # Before the records: whatever was counted by then has one, or had.
        counted = {comm._native.id(): comm._native.sent_bytes() for comm in comms}
        at = _native.now_ns()
        records = sorted(transport.engine.records())
        fresh = [r for r in records if r[0] > self._upto or r[0] in self._flying]
        done = [r for r in fresh if r[6] == _COMPLETED]
        flying = [r for r in fresh if r[6] <= _STARTED]
        self._flying = {r[0] for r in flying}
        self._upto = max((r[0] for r in records), default=self._upto)
        groups = {}
        for comm in comms:
            number = comm._native.id()
            group = self._groups.get(number) or _Group(comm)
            groups[number] = group
            group.learn(comm)
            mine = [r for r in done if r[1] == number]
            open_ones = [r for r in flying if r[1] == number]
            group.add(comm, mine, open_ones, counted[number], at)
        self._groups = groups
        return {
            "rank": transport.rank,
            "time_ns": at,
            "hosts": list(transport.hosts),
            "names": [peer.host for peer in transport.peers],
            "groups": [
                {
                    "name": comm.name,
                    "ranks": list(comm.world_ranks),
                    "sent_to": groups[comm._native.id()].to.tolist(),
                    "guessed": groups[comm._native.id()].guessed,
                    "sent_bytes": counted[comm._native.id()],
                }
                for comm in comms
            ],
        }
