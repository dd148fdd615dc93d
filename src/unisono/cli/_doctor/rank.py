"""One rank of the doctor's world: checks of results, clocks, and pairs of ranks.

All ranks compute the same small collectives and compare with NumPy, then every pair is
measured alone while the others wait in a barrier: latency by messages of 8 bytes in
both directions, bandwidth by large ones. In large worlds one rank of each host
represents it. Rank 0 prints the findings of all.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any

import msgspec
import numpy as np

import unisono
from unisono.cli._doctor.host import MARK
from unisono.errors import UnisonoError
from unisono.runtime.communicator import Communicator

_MOST_RANKS = 12  # of which every pair is measured
_WARM, _ROUNDS = 10, 60
_LARGE, _LARGE_ROUNDS = 1 << 22, 4


class WorldFindings(msgspec.Struct):
    """What a world has found. Matrices are symmetric, with None for a rank itself."""

    hosts: list[str]  # of every rank
    wrong: dict[str, int]  # elements, by test
    offsets_s: dict[str, float]  # of hosts' clocks, from rank 0's
    measured: list[int]  # the ranks of the matrices
    latency_us: list[list[float | None]]
    bandwidth_gbs: list[list[float | None]]
    failed: str = ""


def main() -> int:
    """Connect, check, measure, print."""
    try:
        comm = unisono.init()
        findings = _examine(comm)
        comm.close()
    except UnisonoError as error:
        message = f"{type(error).__name__}: {error}"
        findings = WorldFindings([], {}, {}, [], [], [], failed=message)
    if os.environ.get("UNISONO_RANK", "0") == "0" or findings.failed:
        sys.stdout.write(MARK + msgspec.json.encode(findings).decode() + "\n")
    return 1 if findings.failed else 0


def _examine(comm: Communicator) -> WorldFindings:
    host = os.environ.get("UNISONO_HOST_ID") or os.uname().nodename
    me = (host, os.environ.get("UNISONO_LOCAL_RANK", "0"))
    everyone = comm.all_gather_objects(me)
    hosts = [host for host, _ in everyone]
    wrong = _wrong(comm)
    first = [rank for rank, (_, local) in enumerate(everyone) if local == "0"]
    offsets = _offsets(comm, first, hosts)
    measured = list(range(comm.world_size))
    if comm.world_size > _MOST_RANKS:
        measured = first[:_MOST_RANKS] if len(first) > 1 else measured[:_MOST_RANKS]
    latency, bandwidth = _pairs(comm, measured)
    return WorldFindings(hosts, wrong, offsets, measured, latency, bandwidth)


# Answers


def _wrong(comm: Communicator) -> dict[str, int]:
    """Elements that differ from NumPy's, summed over all ranks."""
    mine = {name: int(test()) for name, test in _tests(comm)}
    everyone = comm.all_gather_objects(mine)
    return {name: sum(wrong[name] for wrong in everyone) for name in mine}


def _tests(comm: Communicator) -> Iterator[tuple[str, Callable[[], int]]]:
    for dtype in ("int64", "float32"):
        for count in (1, 1000, 1 << 18):
            of = f"{count} {dtype}"
            values = [_values(rank, count, dtype) for rank in range(comm.world_size)]
            yield f"all_reduce of {of}", lambda v=values: _all_reduce(comm, v)  # type: ignore[misc]
            yield f"broadcast of {of}", lambda v=values: _broadcast(comm, v)  # type: ignore[misc]
            yield f"all_gather of {of}", lambda v=values: _all_gather(comm, v)  # type: ignore[misc]


def _values(rank: int, count: int, dtype: str) -> Any:
    """Whole numbers small enough that every sum of them is exact in any order."""
    return (np.random.default_rng(rank).integers(-99, 99, count)).astype(dtype)


def _all_reduce(comm: Communicator, values: list[Any]) -> int:
    got = comm.all_reduce(values[comm.rank].copy())
    return int(np.count_nonzero(got != np.sum(values, axis=0)))


def _broadcast(comm: Communicator, values: list[Any]) -> int:
    root = comm.world_size - 1
    got = comm.broadcast(values[comm.rank].copy(), root=root)
    return int(np.count_nonzero(got != values[root]))


def _all_gather(comm: Communicator, values: list[Any]) -> int:
    got = comm.all_gather(values[comm.rank])
    return int(np.count_nonzero(got != np.concatenate(values)))


# Clocks


def _offsets(
    comm: Communicator, ranks: list[int], hosts: list[str]
) -> dict[str, float]:
    """How far each host's clock is ahead of rank 0's, from the quickest round."""
    offsets = {}
    for rank in ranks:
        if rank and comm.rank in (0, rank):
            offset = _offset(comm, rank)
            offsets[f"{hosts[rank]} (rank {rank})"] = offset
        comm.barrier()
    return offsets if comm.rank == 0 else {}


def _offset(comm: Communicator, rank: int) -> float:
    there, best = np.zeros(1), (float("inf"), 0.0)
    for _ in range(_WARM):
        if comm.rank == 0:
            sent = time.time()
            comm.send(there, rank)
            comm.recv(there, rank)
            got = time.time()
            best = min(best, (got - sent, float(there[0]) - (sent + got) / 2))
        else:
            comm.recv(there, 0)
            comm.send(np.array([time.time()]), 0)
    return best[1]


# Pairs

_Matrix = list[list[float | None]]


def _pairs(comm: Communicator, ranks: list[int]) -> tuple[_Matrix, _Matrix]:
    mine: dict[tuple[int, int], tuple[float, float]] = {}
    for a, b in combinations(ranks, 2):
        if comm.rank in (a, b):
            other = b if comm.rank == a else a
            leads = comm.rank == a
            latency = _rounds(comm, other, leads, 8, _WARM, _ROUNDS) / 2
            each_way = _rounds(comm, other, leads, _LARGE, 1, _LARGE_ROUNDS) / 2
            if leads:
                mine[a, b] = latency * 1e6, _LARGE / each_way / 1e9
        comm.barrier()
    gathered = comm.all_gather_objects([[*pair, *both] for pair, both in mine.items()])
    at = {rank: index for index, rank in enumerate(ranks)}
    latency_us: _Matrix = [[None] * len(ranks) for _ in ranks]
    bandwidth: _Matrix = [[None] * len(ranks) for _ in ranks]
    for a, b, us, gbs in (row for rows in gathered for row in rows):
        for i, j in ((at[a], at[b]), (at[b], at[a])):
            latency_us[i][j], bandwidth[i][j] = us, gbs
    return latency_us, bandwidth


def _rounds(
    comm: Communicator, other: int, leads: bool, size: int, warm: int, rounds: int
) -> float:
    """The median time of a message to and fro."""
    out, back, times = np.ones(size, np.uint8), np.empty(size, np.uint8), []
    for _ in range(warm + rounds):
        began = time.perf_counter()
        if leads:
            comm.send(out, other)
            comm.recv(back, other)
        else:
            comm.recv(back, other)
            comm.send(out, other)
        times.append(time.perf_counter() - began)
    return statistics.median(times[warm:])


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())
