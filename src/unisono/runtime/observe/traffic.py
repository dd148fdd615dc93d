"""The bytes that a rank has sent to each peer, computed only on request.

The native core counts how much a rank has sent, not to which peer; that would cost time
in every call. But it keeps a record of the last 2,000 calls, and a plan's schedule has
the bytes of a call for each peer. So on each request the new records are matched with
the plans they ran, and the bytes of these are added:

    record    all_reduce, float32, 4096 elements, ring
    plan      in that ring rank 1 sends 8192 bytes to rank 2
    link      1 -> 2: 8192 bytes more

A record and a plan belong together if their fingerprints are equal. The sum over all
peers is always the core's count. Bytes without a record (over 2,000 calls since the
last request) or without a plan are distributed like the rest; `guessed` is the number
of these bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np

from unisono import _native
from unisono.algorithms import Spec
from unisono.dtypes import DTYPES
from unisono.runtime.call.arguments import Call
from unisono.runtime.call.buffers import Buffer
from unisono.runtime.call.notes import Note
from unisono.runtime.call.options import CallOptions
from unisono.runtime.call.reductions import as_reduction
from unisono.runtime.observe.subject import ObservedCore
from unisono.runtime.plan.codec_options import as_coding
from unisono.runtime.plan.codec_plans import chunk_sizes, coded_kind
from unisono.runtime.plan.plans import CODES, CallKind, content, verified
from unisono.schedule.coding import Scope
from unisono.schedule.collective import Ints
from unisono.schedule.counts import sends_per_chunk
from unisono.transports.session import Session

_SEND = CODES["send"]
_STARTED, _COMPLETED = 1, 2
_DEVICE: Final = 12
"""Where a record has its device. What goes between devices is not counted."""
_BY_CODE = {dtype.code: dtype for dtype in DTYPES.values()}


def sent_to(kind: CallKind, n: int, rank: int, hosts: tuple[int, ...] = ()) -> Ints:
    """The bytes of one such call that a rank sends to each of n."""
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


def _sizes(kind: CallKind, n: int) -> Ints:
    contract = verified(kind.collective, kind.algorithm, n, kind.root).contract
    if kind.coding is None:
        return contract.chunk_sizes(kind.counts)
    return chunk_sizes(contract, kind.counts, kind.coding.codec.block)


def _fingerprint(kind: CallKind, n: int) -> int:
    key = kind.collective, kind.algorithm, n, kind.root
    return kind.fingerprint(content(*key))


def _kind_of(core: ObservedCore, key: Any) -> CallKind:
    """The kind of call whose plan a communicator caches under this key."""
    how, shape = CallOptions(), None
    if len(key) == 7:
        collective, code, op, root, counts, shape, how = key
    else:  # a key of `Core.start`
        collective, code, counts, op, root = key
    nothing = Buffer(None, 0, (), _BY_CODE[code])
    call = Call(collective, counts, nothing, nothing, None, None, root, shape)
    if how.codec is None:
        kind: CallKind = core.kind(call, as_reduction(op), how)
        return kind
    coding = as_coding(how.codec, how.coded)
    what = call, as_reduction(op), how, coding
    hosts, links = core.hosts_if_several, core.session.links_between(core.world_ranks)
    return coded_kind(*what, core.world_size, hosts, core.spec, links)


class _CommunicatorTraffic:
    """The bytes that one communicator's calls have sent, by its ranks."""

    def __init__(self, core: ObservedCore) -> None:
        n = core.world_size
        self.to = np.zeros(n, dtype=np.int64)
        self._guesses = np.zeros_like(self.to)
        self._sent_by_plan: dict[int, Ints] = {}  # by fingerprint
        self._keys: dict[object, int] = {}

    def learn(self, core: ObservedCore, in_flight: list[Any]) -> None:
        """Read the plans; calls in flight may run by one that is no longer cached."""
        keys = {}
        for key in [*core.plans, *core.single_use]:
            known = self._keys.get(key)
            keys[key] = self._learned(core, key) if known is None else known
        # A plan that is not cached any more may have calls in flight or just done.
        kept = {*keys.values(), *self._keys.values()}
        kept.update(Note(*r[2]).fingerprint for r in in_flight)
        self._sent_by_plan = {
            p: sent for p, sent in self._sent_by_plan.items() if p in kept
        }
        self._keys = keys

    def _learned(self, core: ObservedCore, key: object) -> int:
        kind = _kind_of(core, key)
        fingerprint = _fingerprint(kind, core.world_size)
        if fingerprint not in self._sent_by_plan:
            sent = sent_to(kind, core.world_size, core.rank, core.hosts_if_several)
            self._sent_by_plan[fingerprint] = sent
        return fingerprint

    def add(self, core: ObservedCore, done: list[Any], counted: int, at: int) -> None:
        """Add the calls that have completed since the last request.

        `counted` is the core's count at a time; some of them may have ended later.
        """
        known = self._sum(core, done)
        self.to += known
        later = int(self._sum(core, [r for r in done if r[5] > at]).sum())
        rest = counted + later - int(self.to.sum())
        if rest > 0:
            self._guess(_spread(rest, known if known.any() else self.to))
        else:  # a call was counted a moment before its record was updated
            self._guess(-_spread(min(-rest, self.guessed), self._guesses))

    def _guess(self, sent: Ints) -> None:
        self.to += sent
        self._guesses += sent

    @property
    def guessed(self) -> int:
        """The number of bytes whose destination is a guess."""
        return int(self._guesses.sum())

    def _sum(self, core: ObservedCore, records: list[Any]) -> Ints:
        """The bytes of these calls by destination, as far as there are plans."""
        total = np.zeros_like(self.to)
        for record in records:
            note = Note(*record[2])
            if note.collective == _SEND:
                away = record[7] != core.rank
                total[record[7]] += note.elements * _BY_CODE[note.dtype].itemsize * away
            elif note.fingerprint in self._sent_by_plan:
                total += self._sent_by_plan[note.fingerprint]
        return total


def _spread(total: int, weights: Ints) -> Ints:
    """Distribute a number of bytes in these proportions, exactly."""
    whole = int(weights.sum())
    shares = [total * int(w) // whole if whole else 0 for w in weights]
    if whole:
        shares[int(weights.argmax())] += total - sum(shares)
    return np.array(shares, dtype=np.int64)


class TrafficCounter:
    """Counts the bytes that one rank has sent to each peer, by open communicator."""

    def __init__(self) -> None:
        """No requests yet."""
        self._groups: dict[int, _CommunicatorTraffic] = {}
        self._upto = 0
        self._in_flight: set[int] = set()

    def report(self, session: Session, comms: Sequence[Any]) -> dict[str, Any]:
        """The counts, by world rank; for JSON."""
        # Read before the records: whatever is counted has a record, or had one.
        counted = {core.native.id(): core.native.sent_bytes() for core in comms}
        at = _native.now_ns()
        records = sorted(r for r in session.engine.records() if r[_DEVICE] < 0)
        fresh = [r for r in records if r[0] > self._upto or r[0] in self._in_flight]
        done = [r for r in fresh if r[6] == _COMPLETED]
        in_flight = [r for r in fresh if r[6] <= _STARTED]
        self._in_flight = {r[0] for r in in_flight}
        self._upto = max((r[0] for r in records), default=self._upto)
        groups = {}
        for core in comms:
            number = core.native.id()
            group = self._groups.get(number) or _CommunicatorTraffic(core)
            groups[number] = group
            group.learn(core, [r for r in in_flight if r[1] == number])
            mine = [r for r in done if r[1] == number]
            group.add(core, mine, counted[number], at)
        self._groups = groups
        return {
            "rank": session.rank,
            "time_ns": at,
            "hosts": list(session.hosts),
            "names": [peer.host for peer in session.peers],
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
