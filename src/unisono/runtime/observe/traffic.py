"""To whom a rank's bytes went: worked out when somebody asks, and only then.

The native core adds up how much a rank has sent, not to whom; that would cost something
in every call. But it keeps a record of the last 2,000 calls, and a plan's schedule says
how much of a call goes to each peer. So at every look the new records are matched with
the plans they ran, and what these send is added up:

    record    all_reduce, float32, 4096 elements, ring
    plan      in that ring rank 1 sends 8192 bytes to rank 2
    link      1 -> 2: 8192 bytes more

A record and a plan belong together if their fingerprints are the same. The sum over all
peers is always what the core has counted. What no record tells of any more (over 2,000
calls since the last look), and what ran by a plan that is gone, is taken to have gone
as the rest did; `guessed` says how many bytes that are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from unisono import _native
from unisono.algorithms import Spec
from unisono.dtypes import DTYPES
from unisono.runtime.call.arguments import Call
from unisono.runtime.call.buffers import Buffer
from unisono.runtime.call.notes import Note
from unisono.runtime.call.options import How
from unisono.runtime.call.reductions import as_reduction
from unisono.runtime.observe.subject import Subject
from unisono.runtime.plan.codec_options import as_coding
from unisono.runtime.plan.codec_plans import chunk_sizes, coded_kind
from unisono.runtime.plan.plans import CODES, Kind, content, verified
from unisono.schedule.coding import Scope
from unisono.schedule.collective import Ints
from unisono.schedule.counts import sends_per_chunk
from unisono.transports.session import Session

_SEND = CODES["send"]
_STARTED, _COMPLETED = 1, 2
_BY_CODE = {dtype.code: dtype for dtype in DTYPES.values()}


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
def _times(collective: str, algorithm: Spec, n: int, root: int, rank: int) -> Ints:
    """How often a rank sends each chunk to each peer: a row per peer."""
    schedule = verified(collective, algorithm, n, root)
    return sends_per_chunk(schedule, n, lambda src, dst: np.where(src == rank, dst, -1))


def _sizes(kind: Kind, n: int) -> Ints:
    contract = verified(kind.collective, kind.algorithm, n, kind.root).contract
    if kind.coding is None:
        return contract.chunk_sizes(kind.counts)
    return chunk_sizes(contract, kind.counts, kind.coding.codec.block)


def _fingerprint(kind: Kind, n: int) -> int:
    key = kind.collective, kind.algorithm, n, kind.root
    return kind.fingerprint(content(*key))


def _kind_of(core: Subject, key: Any) -> Kind:
    """The kind of call that a communicator keeps a plan for under this key."""
    how, shape = How(), None
    if len(key) == 7:
        collective, code, op, root, counts, shape, how = key
    else:  # as `start` has it
        collective, code, counts, op, root = key
    nothing = Buffer(None, 0, (), _BY_CODE[code])
    call = Call(collective, counts, nothing, nothing, None, None, root, shape)
    if how.codec is None:
        kind: Kind = core.kind(call, as_reduction(op), how)
        return kind
    coding = as_coding(how.codec, how.coded)
    what = call, as_reduction(op), how, coding
    return coded_kind(*what, core.world_size, core.hosts_if_several, core.spec)


class _Group:
    """What one communicator's calls have sent, by its own ranks."""

    def __init__(self, core: Subject) -> None:
        n = core.world_size
        self.to = np.zeros(n, dtype=np.int64)
        self._guesses = np.zeros_like(self.to)
        self._ways: dict[int, Ints] = {}  # by fingerprint
        self._keys: dict[object, int] = {}

    def learn(self, core: Subject, flying: list[Any]) -> None:
        """What there are plans for; what is in flight may run by one that is gone."""
        keys = {}
        for key in [*core.plans, *core.single_use]:
            known = self._keys.get(key)
            keys[key] = self._learned(core, key) if known is None else known
        # A plan that is gone may have calls that are done only now, or in flight.
        kept = {*keys.values(), *self._keys.values()}
        kept.update(Note(*r[2]).fingerprint for r in flying)
        self._ways = {p: way for p, way in self._ways.items() if p in kept}
        self._keys = keys

    def _learned(self, core: Subject, key: object) -> int:
        kind = _kind_of(core, key)
        fingerprint = _fingerprint(kind, core.world_size)
        if fingerprint not in self._ways:
            sent = sent_to(kind, core.world_size, core.rank, core.hosts_if_several)
            self._ways[fingerprint] = sent
        return fingerprint

    def add(self, core: Subject, done: list[Any], counted: int, at: int) -> None:
        """Take in the records of calls that are done since the last look.

        What was `counted` at a time is theirs, but for those that ended later.
        """
        known = self._sum(core, done)
        self.to += known
        later = int(self._sum(core, [r for r in done if r[5] > at]).sum())
        rest = counted + later - int(self.to.sum())
        if rest > 0:
            self._guess(_spread(rest, known if known.any() else self.to))
        else:  # some call was counted a moment before its record said so
            self._guess(-_spread(min(-rest, self.guessed), self._guesses))

    def _guess(self, way: Ints) -> None:
        self.to += way
        self._guesses += way

    @property
    def guessed(self) -> int:
        """How many of the bytes are where they are by a guess."""
        return int(self._guesses.sum())

    def _sum(self, core: Subject, records: list[Any]) -> Ints:
        """Where the bytes of these calls went, as far as there are plans."""
        total = np.zeros_like(self.to)
        for record in records:
            note = Note(*record[2])
            if note.collective == _SEND:
                away = record[7] != core.rank
                total[record[7]] += note.elements * _BY_CODE[note.dtype].itemsize * away
            elif note.fingerprint in self._ways:
                total += self._ways[note.fingerprint]
        return total


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

    def told(self, transport: Session, comms: Sequence[Any]) -> dict[str, Any]:
        """What is known now, by ranks of the world; for JSON."""
        # Before the records: whatever was counted by then has one, or had.
        counted = {core.native.id(): core.native.sent_bytes() for core in comms}
        at = _native.now_ns()
        records = sorted(transport.engine.records())
        fresh = [r for r in records if r[0] > self._upto or r[0] in self._flying]
        done = [r for r in fresh if r[6] == _COMPLETED]
        flying = [r for r in fresh if r[6] <= _STARTED]
        self._flying = {r[0] for r in flying}
        self._upto = max((r[0] for r in records), default=self._upto)
        groups = {}
        for core in comms:
            number = core.native.id()
            group = self._groups.get(number) or _Group(core)
            groups[number] = group
            group.learn(core, [r for r in flying if r[1] == number])
            mine = [r for r in done if r[1] == number]
            group.add(core, mine, counted[number], at)
        self._groups = groups
        return {
            "rank": transport.rank,
            "time_ns": at,
            "hosts": list(transport.hosts),
            "names": [peer.host for peer in transport.peers],
            "groups": [
                {
                    "name": core.name,
                    "ranks": list(core.world_ranks),
                    "sent_to": groups[core.native.id()].to.tolist(),
                    "guessed": groups[core.native.id()].guessed,
                    "sent_bytes": counted[core.native.id()],
                }
                for core in comms
            ],
        }
