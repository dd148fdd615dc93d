"""The checks of `check_transport`, as each rank runs them.

A check is a function of `Ranks`. All ranks of a world run the same checks in the same
order, each in a world of its own, and look for what is left after each.
"""

from __future__ import annotations

import gc
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono import _native
from unisono.errors import CollectiveTimeout, ConnectFailed, PeerLost
from unisono.runtime.communicator import Communicator
from unisono.runtime.world.first import first_communicator
from unisono.transports.interface import ConnectOptions, Transport

Array = NDArray[Any]

SIZES = (0, 1, 7, 1001, 300_007)
"""Elements of an array: none, one, odd, and more than a frame holds."""
MESSAGES = (0, 1, 3, 65_537, 3_000_001)
"""Bytes of a message."""

_LATE_S = 1.0
"""The timeout of calls and connections that are meant to fail."""
_SETTLE_S = 20.0
"""How long to wait for threads and descriptors to go; exceeded only by a leak."""
_COUNT = re.compile(r"\d+")


@dataclass(frozen=True)
class Ranks:
    """One rank of a world that is yet to be connected."""

    transport: Transport
    options: ConnectOptions
    timeout_s: float

    @property
    def rank(self) -> int:
        """Of this rank."""
        return self.options.rank

    @property
    def size(self) -> int:
        """Of the world."""
        return self.options.world_size

    def connect(self, **options: Any) -> Communicator:
        """The communicator of all ranks; `options` replace those of the connection."""
        session = self.transport.connect(replace(self.options, **options))
        try:
            return first_communicator(session, timeout_s=self.timeout_s)
        except BaseException:
            session.close()
            raise

    @contextmanager
    def communicator(self) -> Iterator[Communicator]:
        """The same for `with`; it is closed at the end, after all ranks are done."""
        comm = self.connect()
        try:
            yield comm
            comm.barrier()
        finally:
            comm.close()


def numbers(size: int, dtype: str, rank: int) -> Array:
    """What a rank has at first: whole numbers, whose sums are exact in any order."""
    return ((np.arange(size) * 7 + rank * 31) % 61).astype(dtype)


def require(holds: bool, what: str) -> None:
    """Fail unless it holds; not by `assert`, which python -O leaves out."""
    if not holds:
        raise AssertionError(what)


def expect(found: Array, expected: Array, what: str) -> None:
    """Fail if two arrays differ anywhere."""
    if not np.array_equal(found, expected):
        at = int(np.flatnonzero(found.ravel() != expected.ravel())[0])
        raise AssertionError(
            f"{what}: element {at} is {found.ravel()[at]}, expected "
            f"{expected.ravel()[at]}"
        )


# --- collectives


def reductions(comm: Communicator, size: int, dtype: str) -> None:
    """all_reduce, reduce, reduce_scatter, scan and exscan."""
    n, rank = comm.world_size, comm.rank
    given = [numbers(size, dtype, r) for r in range(n)]
    total = np.sum(given, axis=0, dtype=dtype)
    expect(comm.all_reduce(given[rank].copy()), total, f"all_reduce of {size}")
    largest = comm.all_reduce(given[rank].copy(), op="max")
    expect(largest, np.max(given, axis=0), f"all_reduce max of {size}")
    for root in range(n):
        made = comm.reduce(given[rank].copy(), root=root)
        if rank == root:
            expect(made, total, f"reduce of {size} to {root}")
    before = np.sum(given[:rank], axis=0, dtype=dtype) if rank else 0 * given[0]
    expect(comm.exscan(given[rank].copy()), before, f"exscan of {size}")
    expect(comm.scan(given[rank].copy()), before + given[rank], f"scan of {size}")
    wide = [numbers(size * n, dtype, r) for r in range(n)]
    share = np.sum(wide, axis=0, dtype=dtype)[rank * size : (rank + 1) * size]
    expect(comm.reduce_scatter(wide[rank]), share, f"reduce_scatter of {size}")


def copies(comm: Communicator, size: int, dtype: str) -> None:
    """broadcast, gather, scatter, all_gather, all_to_all and redistribute."""
    n, rank = comm.world_size, comm.rank
    given = [numbers(size, dtype, r) for r in range(n)]
    wide = [numbers(size * n, dtype, r) for r in range(n)]
    everything = np.concatenate(given)
    expect(comm.all_gather(given[rank]), everything, f"all_gather of {size}")
    for root in range(n):
        made = comm.broadcast(given[rank].copy(), root=root)
        expect(made, given[root], f"broadcast of {size} from {root}")
        gathered = comm.gather(given[rank], root=root)
        if rank == root:
            expect(gathered, everything, f"gather of {size} to {root}")
        x = wide[root] if rank == root else None
        out = np.empty(size, dtype)
        comm.scatter(x, root=root, out=out)
        part = wide[root][rank * size : (rank + 1) * size]
        expect(out, part, f"scatter of {size} from {root}")
    shares = [each[rank * size : (rank + 1) * size] for each in wide]
    expect(comm.all_to_all(wide[rank]), np.concatenate(shares), f"all_to_all of {size}")
    columns = comm.redistribute(wide[rank][np.newaxis], 0, 1)
    expect(columns, np.stack(shares), f"redistribute of {size}")


def collectives(ranks: Ranks) -> None:
    """Every collective, of all sizes and of several types."""
    with ranks.communicator() as comm:
        for size in SIZES:
            for dtype in (
                ("float32", "int64", "uint8") if size == 1001 else ("float32",)
            ):
                reductions(comm, size, dtype)
                copies(comm, size, dtype)
        thing = {"rank": comm.rank, "text": "é" * 1000}
        found = comm.all_gather_objects(thing)
        require(
            found == [{**thing, "rank": r} for r in range(comm.world_size)],
            "all_gather_objects",
        )


# --- messages


def payload(size: int, source: int, tag: int) -> Array:
    """The bytes of a message, which tell where it is from."""
    return ((np.arange(size) + 17 * source + 5 * tag) % 251).astype(np.uint8)


def messages(ranks: Ranks) -> None:
    """From every rank to every other, one at a time."""
    with ranks.communicator() as comm:
        for source in range(comm.world_size):
            for target in range(comm.world_size):
                if source != target:
                    exchange(comm, source, target)


def exchange(comm: Communicator, source: int, target: int) -> None:
    """Messages of all sizes from one rank to another."""
    for size in MESSAGES:
        if comm.rank == source:
            comm.send(payload(size, source, 3), target, tag=3)
        elif comm.rank == target:
            out = np.empty(size, np.uint8)
            comm.recv(out, source, tag=3)
            expect(out, payload(size, source, 3), f"{size} bytes from {source}")


def both_directions(ranks: Ranks) -> None:
    """Large messages that cross: each rank sends to the next and receives meanwhile."""
    with ranks.communicator() as comm:
        n, rank = comm.world_size, comm.rank
        for size in MESSAGES:
            sent = payload(size, rank, 0)
            out = np.empty(size, np.uint8)
            comm.sendrecv(sent, (rank + 1) % n, out, (rank - 1) % n)
            expect(out, payload(size, (rank - 1) % n, 0), f"{size} bytes that cross")


def any_source(ranks: Ranks) -> None:
    """Rank 0 receives from any rank."""
    with ranks.communicator() as comm:
        if comm.rank > 0:
            comm.send(payload(100, comm.rank, 0), 0)
            return
        sources = set()
        for _ in range(1, comm.world_size):
            out = np.empty(100, np.uint8)
            work = comm.recv(out, async_op=True)
            work.wait()
            sources.add(work.source)
            expect(out, payload(100, work.source, 0), f"from {work.source}")
        require(sources == set(range(1, comm.world_size)), f"received from {sources}")


def tags(ranks: Ranks) -> None:
    """Messages of several tags, received in another order; order within a tag."""
    with ranks.communicator() as comm:
        if comm.rank == 0:
            works = [
                comm.send(payload(50 + i, 0, tag), 1, tag=tag, async_op=True)
                for i in range(3)
                for tag in (1, 2)
            ]
            for work in works:
                work.wait()
        if comm.rank == 1:
            for tag in (2, 1):
                for i in range(3):
                    out = np.empty(50 + i, np.uint8)
                    comm.recv(out, 0, tag=tag)
                    expect(out, payload(50 + i, 0, tag), f"message {i} of tag {tag}")


# --- calls in flight, groups, pieces


def in_flight(ranks: Ranks) -> None:
    """Asynchronous calls, waited for in another order than they were made."""
    with ranks.communicator() as comm:
        given = [numbers(1001 * (k + 1), "int64", comm.rank) for k in range(6)]
        works = [comm.all_reduce(x, async_op=True) for x in given]
        for k in reversed(range(6)):
            works[k].wait()
            each = [numbers(1001 * (k + 1), "int64", r) for r in range(comm.world_size)]
            expect(given[k], np.sum(each, axis=0), f"call {k} in flight")


def split(ranks: Ranks) -> None:
    """Communicators of some ranks, in reverse order, beside that of all."""
    with ranks.communicator() as comm:
        n, rank = comm.world_size, comm.rank
        group = comm.split(rank % 2, key=-rank)
        if group is None:
            raise AssertionError("split returned no communicator")
        members = [r for r in reversed(range(n)) if r % 2 == rank % 2]
        found = group.all_gather(np.array([rank]))
        expect(found, np.array(members), "the ranks of a group")
        for _ in range(3):
            total = group.all_reduce(np.full(5000, rank, np.int64))
            expect(total, np.full(5000, sum(members)), "all_reduce of a group")
            whole = comm.all_reduce(np.full(5000, rank, np.int64))
            expect(whole, np.full(5000, sum(range(n))), "all_reduce of all")
        group.close()


def cut(ranks: Ranks) -> None:
    """Bytes that move in pieces of any size, where this build has failpoints."""
    if not _native.TEST_HOOKS:
        return
    names = _native.byte_limit_names()
    for how in ("short=3", "cut=1"):
        with world_of(ranks, how).communicator() as comm:
            comm.barrier()
            try:
                _native.arm_failpoints(",".join(f"{name}:*:{how}" for name in names))
                for size in (1, 301):
                    reductions(comm, size, "int64")
                    copies(comm, size, "uint8")
                out = np.empty(997, np.uint8)
                n, rank = comm.world_size, comm.rank
                comm.sendrecv(payload(997, rank, 0), (rank + 1) % n, out)
                expect(out, payload(997, (rank - 1) % n, 0), f"a message, {how}")
            finally:
                _native.arm_failpoints("")


def world_of(ranks: Ranks, name: str) -> Ranks:
    """The ranks of one more world of the same check."""
    job = f"{ranks.options.job}/{name}"
    return replace(ranks, options=replace(ranks.options, job=job))


# --- failures


def closed(ranks: Ranks) -> None:
    """One rank closes its communicator: the others get its rank, at once."""
    comm = ranks.connect()
    try:
        comm.barrier()
        victim = ranks.size - 1
        if ranks.rank == victim:
            return
        try:
            comm.all_reduce(np.ones(1001))
        except PeerLost as error:
            require(victim in error.ranks, f"PeerLost names {error.ranks}")
        else:
            raise AssertionError(f"all_reduce without rank {victim} has succeeded")
    finally:
        comm.close()


def late(ranks: Ranks) -> None:
    """One rank does not call: the others time out, and the error names it."""
    comm = ranks.connect()
    try:
        comm.barrier()
        victim = 0
        try:
            if ranks.rank == victim:
                time.sleep(2 * _LATE_S)
            comm.all_reduce(np.ones(1001), timeout_s=_LATE_S)
        except (CollectiveTimeout, PeerLost) as error:
            named = victim in error.ranks or ranks.rank == victim
            require(named, f"{type(error).__name__} names {error.ranks}")
        else:
            raise AssertionError(f"all_reduce without rank {victim} has succeeded")
    finally:
        comm.close()


def missing(ranks: Ranks) -> None:
    """One rank does not connect: the others raise ConnectFailed within the timeout."""
    absent = ranks.size - 1
    with ranks.communicator():  # so that all are here at the same time
        pass
    if ranks.rank == absent:
        return
    try:
        world_of(ranks, "missing").connect(timeout_s=_LATE_S).close()
    except ConnectFailed as error:
        named = absent in error.missing or ranks.rank > 0
        require(named, f"ConnectFailed names {error.missing}")
    else:
        raise AssertionError(f"connected without rank {absent}")


def killed(ranks: Ranks) -> None:
    """One rank is killed in the middle of a call: the others learn which."""
    comm = ranks.connect()
    victim = ranks.size - 1
    try:
        comm.barrier()  # it may end there sooner than here
        if ranks.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            comm.all_reduce(np.ones(1001))
    except PeerLost as error:
        require(victim in error.ranks, f"PeerLost names {error.ranks}")
    finally:
        comm.close()


CHECKS: dict[str, Callable[[Ranks], None]] = {
    check.__name__: check
    for check in (
        collectives,
        messages,
        both_directions,
        any_source,
        tags,
        in_flight,
        split,
        cut,
        closed,
        late,
        missing,
    )
}


# --- what is left


def held() -> Counter[str]:
    """Descriptors, threads and shared memory of this process, by what they are."""
    found: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:  # the one that lists them
            continue
        if target.startswith("/proc/"):  # another rank, a thread here, looks likewise
            continue
        found["descriptor of " + _COUNT.sub("", target)] += 1
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/comm") as file:
                found["thread " + file.read().strip()] += 1
        except OSError:  # it has just ended
            continue
    with open("/proc/self/maps") as file:
        found["shared memory"] += sum("memfd:unisono" in line for line in file)
    return found


def await_release(before: Counter[str]) -> Counter[str]:
    """Fail unless everything that was not there before goes; what is there then."""
    until = time.monotonic() + _SETTLE_S
    while left := (now := held()) - before:
        if time.monotonic() > until:
            text = ", ".join(f"{count} × {what}" for what, count in left.items())
            raise AssertionError(f"left after all ranks have closed: {text}")
        gc.collect()
        time.sleep(0.01)
    return now


def run_checks(
    ranks: Ranks, checks: tuple[str, ...], all_arrive: Callable[[], object]
) -> None:
    """Run checks one after another; AssertionError names the first that fails.

    `all_arrive` waits for the other ranks of this process, if there are any.
    """
    before: Counter[str] = Counter()
    for number, name in enumerate(["split", *checks]):  # the first is a warm-up
        options = replace(ranks.options, epoch=number)
        try:
            CHECKS[name](replace(ranks, options=options))
            all_arrive()
            if number == 0:
                gc.collect()
                before = held()
            before &= await_release(before)  # what others held may have gone
            all_arrive()
        except Exception as error:
            raise AssertionError(
                f"check {name!r} on rank {ranks.rank} of {ranks.size}: "
                f"{type(error).__name__}: {error}"
            ) from error
