"""Plans: a verified schedule made concrete for one call's sizes, type and reduction.

The expensive part (finding the schedule, verifying it, lowering it, laying out its
chunks) is done once for each kind of call, and cached. All of it follows from arguments
on which the ranks agree, so that every rank makes the same plan; the fingerprint is a
64-bit hash of those arguments.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from unisono import _native
from unisono.algorithms import Spec, read
from unisono.algorithms import schedule as make_schedule
from unisono.dtypes import OPS, DType
from unisono.errors import BadArgument
from unisono.runtime.call.arguments import Call
from unisono.runtime.call.buffers import IN_PLACE_FROM
from unisono.runtime.call.coding import Coding
from unisono.runtime.call.notes import CallNames, in_short, remember, shape_text
from unisono.runtime.call.reductions import Reduction
from unisono.runtime.plan import programs
from unisono.runtime.plan.programs import RankProgram, tables
from unisono.schedule import Schedule
from unisono.schedule.coding import Scope
from unisono.schedule.collective import BARRIER, COLLECTIVES, Contract, Holders, Ints
from unisono.schedule.counts import sends_per_chunk
from unisono.schedule.lower import lower
from unisono.schedule.notices import joined_notices
from unisono.schedule.program import Lowered

CODES: dict[str, int] = {
    name: code for code, name in enumerate([*COLLECTIVES, "send", "recv"])
}
"""The numbers of collectives in the native core's notes and warnings."""

HEADER_BYTES = 40
LINE = 64
PAGE = 4096
ZERO_COPY_FROM = IN_PLACE_FROM
"""Below this many bytes copying is as fast as reading others' buffers directly."""
SINGLE_COPY_FROM = 16 << 10
"""The same for buffers that only the kernel can access, for each pair of ranks."""
SINGLE_COPY = "UNISONO_SINGLE_COPY"
"""0: never use the kernel's copies between processes."""
ZERO_COPY_PIECE = 1 << 20
"""Bytes of a chunk that are processed at a time where no window is used."""
STREAMS_FROM = 4 << 20
"""From this many bytes on, outputs are written with non-temporal stores."""
_MANY_RANKS = 64
"""From this many ranks on, a barrier on one host is made of joined notices, too."""
MOST_ACTIONS = _native.MOST_ACTIONS
"""The native core can count this many actions of a program."""


ONE_AT_A_TIME = threading.Lock()


@dataclass(frozen=True)
class CallKind:
    """All arguments of a call on which the ranks must agree.

    `counts` is the number of elements, or one number per rank (per pair of ranks in
    all_to_all) if they differ. `shape` is that of all ranks' rows together, or None if
    the caller gave only a number of elements.
    """

    collective: str
    dtype: DType
    reduction: Reduction
    root: int
    counts: int | tuple[int, ...]
    algorithm: Spec
    label: str = ""
    coding: Coding | None = None
    shape: tuple[int, ...] | None = None

    @classmethod
    def of(
        cls,
        call: Call,
        reduction: Reduction,
        algorithm: Spec,
        label: str,
        coding: Coding | None = None,
    ) -> CallKind:
        """What the ranks must agree on in a call."""
        what = call.collective, call.dtype, reduction, call.root, call.counts
        return cls(*what, algorithm, label, coding, call.shape)

    def fingerprint(self, content: int) -> int:
        """A 64-bit hash of these; `content` is that of the algorithm's steps."""
        text = repr(
            (
                self.collective,
                self.dtype.name,
                self.reduction.op,
                self.root,
                self.counts,
                self.shape,
                self.algorithm.name,
                content,
                self.label,
                str(self.coding),
            )
        )
        return _digest(text.encode())

    def names(self) -> CallNames:
        """Its names, as text."""
        coding = str(self.coding) if self.coding is not None else ""
        shape = shape_text(self.shape)
        return CallNames(self.algorithm.name, self.label, coding, shape)


def _digest(*parts: bytes) -> int:
    made = hashlib.blake2b(digest_size=8)
    for part in parts:
        made.update(part)
    return int.from_bytes(made.digest(), "little")


@dataclass(frozen=True, eq=False)
class VerifiedContent:
    """A verified schedule, with its steps as they were verified, and their hash."""

    schedule: Schedule
    content: int


def verified(collective: str, algorithm: str | Spec, n: int, root: int) -> Schedule:
    """The verified schedule by that name: no other is ever run."""
    return _verified(collective, _as_spec(algorithm), n, root).schedule


def content(collective: str, algorithm: str | Spec, n: int, root: int) -> int:
    """A 64-bit hash of its steps: equal on two ranks if they run the same."""
    return _verified(collective, _as_spec(algorithm), n, root).content


def _as_spec(algorithm: str | Spec) -> Spec:
    return read(algorithm) if isinstance(algorithm, str) else algorithm


@lru_cache(maxsize=256)
def _verified(collective: str, algorithm: Spec, n: int, root: int) -> VerifiedContent:
    made = make_schedule(collective, algorithm, n, root=root)
    # Copied, so that what is verified is what ranks compare and run, whatever the
    # algorithm yields the next time, or does with its arrays after it has yielded.
    steps = [step.copy() for step in made]
    made = made.but(make=lambda: steps)
    made.verify()
    return VerifiedContent(made, content_of(made))


def content_of(schedule: Schedule) -> int:
    """A hash of a schedule's steps, without its name."""
    about = schedule.n, schedule.num_chunks, schedule.num_temporaries, schedule.root
    parts = [repr((schedule.collective.name, *about)).encode()]
    for step in schedule:
        parts.append(len(step).to_bytes(8, "little"))
        parts += [column.tobytes() for column in step.flat()]
    return _digest(*parts)


def lowered(
    collective: str,
    algorithm: str | Spec,
    n: int,
    root: int,
    exposed: int = 0,
    hosts: tuple[int, ...] = (),
    coded: Scope | None = None,
) -> Lowered:
    """Its programs; `exposed` has bit 0 for shared inputs, bit 1 for shared outputs.

    `coded` says between which ranks values are sent encoded, if any.
    """
    spec = _as_spec(algorithm)
    return _lowered(collective, spec, n, root, exposed, hosts, coded)


@lru_cache(maxsize=512)
def _lowered(
    collective: str,
    algorithm: Spec,
    n: int,
    root: int,
    exposed: int,
    hosts: tuple[int, ...],
    coded: Scope | None,
) -> Lowered:
    made = lower(
        _to_lower(collective, algorithm, n, root, hosts),
        input_shared=bool(exposed & 1),
        output_shared=bool(exposed & 2),
        hosts=hosts,
        coded=coded,
    )
    longest = max((len(p.actions) for p in made.programs), default=0)
    _refuse_too_long(collective, algorithm, longest)
    return made


def _to_lower(
    collective: str, algorithm: Spec, n: int, root: int, hosts: tuple[int, ...]
) -> Schedule:
    """The verified schedule; of a barrier of many with one notice from rank to rank."""
    schedule = verified(collective, algorithm, n, root)
    if collective == BARRIER.name and (hosts or n >= _MANY_RANKS):
        return joined_notices(schedule)
    return schedule


def _refuse_too_long(collective: str, algorithm: Spec, longest: int) -> None:
    if longest > MOST_ACTIONS:
        raise BadArgument(
            f"{collective} by {algorithm}: a rank would have {longest} actions, at "
            f"most {MOST_ACTIONS} are supported; choose another algorithm, or fewer "
            "segments"
        )


@lru_cache(maxsize=2048)
def rank_program(
    collective: str,
    algorithm: Spec,
    n: int,
    root: int,
    exposed: int,
    hosts: tuple[int, ...],
    rank: int,
) -> RankProgram:
    """The program of one rank alone, which `lowered` makes together with the others'.

    `exposed` and `hosts` are as there; values are sent as they are.
    """
    schedule = _to_lower(collective, algorithm, n, root, hosts)
    made = programs.rank_program(schedule, rank, exposed, hosts)
    _refuse_too_long(collective, algorithm, made.longest)
    return made


@lru_cache(maxsize=2048)
def sends(collective: str, algorithm: Spec, n: int, root: int, rank: int) -> Ints:
    """How many times a rank sends each chunk, counted from the steps."""
    schedule = verified(collective, algorithm, n, root)
    by_rank = sends_per_chunk(schedule, 1, lambda src, _: np.where(src == rank, 0, -1))
    return np.asarray(by_rank[0])


@lru_cache(maxsize=2048)
def coded_program(
    collective: str,
    algorithm: Spec,
    n: int,
    root: int,
    hosts: tuple[int, ...],
    coded: Scope,
    rank: int,
) -> _native.Program:
    """The program of one rank that sends values encoded, in the native core's form."""
    made = lowered(collective, algorithm, n, root, 0, hosts, coded)
    return tables(made.programs[rank])


def common_fields(kind: CallKind, n: int, rank: int, sizes: Ints) -> dict[str, Any]:
    """The fields of any plan: its buffers, and what ranks compare and note."""
    found = _verified(kind.collective, kind.algorithm, n, kind.root)
    contract = found.schedule.contract
    input_at, output_at = offsets(contract, sizes)
    input_count, output_count = held(contract, sizes, rank)
    return {
        "input_at": input_at,
        "output_at": output_at,
        "size": sizes,
        "input_bytes": input_count * kind.dtype.itemsize,
        "output_bytes": output_count * kind.dtype.itemsize,
        "divisor": n if kind.reduction.op == "mean" else 1,
        **noted_fields(kind, found.content, int(sizes.sum())),
    }


def noted_fields(kind: CallKind, content: int, count: int) -> dict[str, Any]:
    """What ranks compare and note of a call."""
    fingerprint, names = kind.fingerprint(content), kind.names()
    texts = in_short(names)
    if texts != list(names):
        remember(fingerprint, names)
    return {
        "fingerprint": fingerprint,
        "collective": CODES[kind.collective],
        "dtype": kind.dtype.code,
        "op": OPS.index(kind.reduction.op),
        "root": kind.root,
        "count": count,
        "content": content,
        "texts": texts,
    }


def make_plan(
    kind: CallKind,
    n: int,
    rank: int,
    *,
    window: int,
    hosts: tuple[int, ...] = (),
    reaches: bool = False,
    noted: CallKind | None = None,
) -> tuple[_native.Plan, Sequence[int]]:
    """The plan of one rank for one kind of call, and the ranks that it sends to.

    `hosts` are the ranks' hosts, if there are several. `reaches`: on every host the
    ranks can read each other's private memory. `noted` is what the ranks compare and
    note instead, if this call stands for one that is carried out elsewhere.
    """
    with ONE_AT_A_TIME:  # of ranks that are threads only one verifies a schedule
        return _make_plan(kind, n, rank, window, hosts, reaches, noted)


def _make_plan(
    kind: CallKind,
    n: int,
    rank: int,
    window: int,
    hosts: tuple[int, ...],
    reaches: bool,
    noted: CallKind | None,
) -> tuple[_native.Plan, Sequence[int]]:
    key = kind.collective, kind.algorithm, n, kind.root
    sizes = verified(*key).contract.chunk_sizes(kind.counts)
    fields = common_fields(kind, n, rank, sizes)
    if noted is not None:
        fields |= noted_fields(noted, 0, _total(noted.counts))
    itemsize = kind.dtype.itemsize
    largest = int(sizes.max(initial=0))
    total = int(sizes.sum()) * itemsize
    staged = rank_program(*key, 0, hosts, rank)
    header = (
        not hosts
        and staged.depth <= 1
        and staged.places * largest * itemsize <= HEADER_BYTES
    )
    zero_copy = not header and total >= ZERO_COPY_FROM
    modes = list(range(4)) if zero_copy else [0]
    if hosts:
        # Whether buffers are exposed must not depend on one host alone: all hosts cut
        # chunks into the same pieces.
        alone = len(set(hosts)) == n
        modes = [3] if alone or (zero_copy and reaches) else [0]
    piece = [largest] * len(modes)
    if not header:
        # A rank that does not expose its input may publish it before it knows whether
        # outputs are exposed: so those pieces are the same.
        places = [
            rank_program(*key, mode if mode & 1 else 0, hosts, rank).places
            for mode in modes
        ]
        piece = [_piece(window, p, itemsize, largest) for p in places]
    made = [rank_program(*key, mode, hosts, rank) for mode in modes]
    pieces = [max(1, -(-largest // p)) if p else 1 for p in piece]
    plan = _native.Plan(
        programs=[one.program for one in made],
        piece=piece,
        pieces=pieces,
        sent_bytes=int(sends(*key, rank) @ sizes) * itemsize,
        in_header=header,
        may_expose=modes[-1] == 3,
        may_cross_memory=zero_copy and _uses_single_copy(kind.collective, total, n),
        always_exposed=modes[0] if hosts else -1,
        streams=fields["output_bytes"] >= STREAMS_FROM,
        coding=None,
        **fields,
    )
    return plan, made[0].destinations


def _total(counts: int | tuple[int, ...]) -> int:
    return counts if isinstance(counts, int) else sum(counts)


def _uses_single_copy(collective: str, total: int, n: int) -> bool:
    """Whether one copy by the kernel is faster than two through a window.

    A window that is written once and read by three or more ranks is as fast.
    """
    if os.environ.get(SINGLE_COPY, "1") == "0":
        return False
    if n > 3 and collective in ("all_gather", "broadcast"):
        return False
    # Sums of many sources are as well off in windows for longer (docs/performance.md).
    many = 2 if collective == "all_reduce" and n > 4 else 1
    return total >= many * SINGLE_COPY_FROM * n * (n - 1)


def _piece(window: int, places: int, itemsize: int, largest: int) -> int:
    """The number of elements of a chunk that use the window at a time."""
    room = window // places if places else ZERO_COPY_PIECE
    if room < itemsize:
        raise BadArgument(
            f"this schedule keeps {places} values in flight, too many for a window of "
            f"{window} bytes: choose another algorithm"
        )
    # Whole pages where there are many, so that all pieces have the same alignment.
    grain = PAGE if room >= 4 * PAGE else LINE
    room -= room % grain if room >= grain else room % itemsize
    # Equal pieces: a short last one would mostly wait.
    pieces = max(1, -(-largest * itemsize // room))
    even = -(-largest // pieces)
    grain = PAGE if even * itemsize >= 4 * PAGE else LINE
    per_grain = max(1, grain // itemsize)
    return min(-(-even // per_grain) * per_grain, room // itemsize)


def offsets(contract: Contract, sizes: Ints) -> tuple[Ints, Ints]:
    """The offset of each chunk, in elements, in its holder's input and output."""
    places = contract.collective.before, contract.collective.after
    if contract.collective is BARRIER:
        nowhere = np.zeros_like(sizes)
        return nowhere, nowhere
    before, after = (_begins(contract, place, sizes) for place in places)
    return before, after


def _begins(contract: Contract, place: Holders, sizes: Ints) -> Ints:
    chunks = np.arange(contract.num_chunks)
    whole = np.cumsum(sizes) - sizes
    if place is Holders.OWNER:
        owner = contract.owner(chunks)
        return np.asarray(whole - whole[np.searchsorted(owner, owner)], dtype=np.int64)
    if place is Holders.TARGET:
        target = contract.target(chunks)
        order = np.argsort(target, kind="stable")
        begins = np.empty_like(whole)
        run = np.cumsum(sizes[order]) - sizes[order]
        first = np.searchsorted(target[order], target[order])
        begins[order] = run - run[first]
        return begins
    return np.asarray(whole, dtype=np.int64)


def held(contract: Contract, sizes: Ints, rank: int) -> tuple[int, int]:
    """The number of elements of a rank's input and output."""
    chunks = np.arange(contract.num_chunks)

    def count(place: Holders) -> int:
        holder = contract.holder(place, chunks)
        return int(sizes.sum() if holder is None else sizes[holder == rank].sum())

    return count(contract.collective.before), count(contract.collective.after)
