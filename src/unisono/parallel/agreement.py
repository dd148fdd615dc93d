"""Do all ranks mean the same, and can they all? If one cannot go on, all hear of it.

A strategy is set up by every rank for itself: shapes, buckets, axes. If the ranks
differ there, the collectives of a later step would fail or, worse, fit by chance. So
they compare in words what they are about to do: one number each if they agree, and the
words themselves only if they do not.

    with prepared(comm, "DDP") as told:      each by itself; then all, or none
        told.append(f"bucket_cap_mb = {cap}")

A mistake that only one rank has made is found by that rank alone, while the others are
already waiting for it. In a preparation it is told to them in words. In a step that
would cost a message each time, so there the rank makes a call that matches nobody's
(`heard`): all raise at once, and see who made it and what for. Where ranks wait for
messages and not for calls, it leaves (`or_leaves`), and they raise PeerLost.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import numpy as np

from unisono.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    TransportError,
    UnisonoError,
)
from unisono.runtime.communicator import Communicator

_BROKEN = CollectiveMismatch, CollectiveTimeout, TransportError
"""After these a communicator has failed, and everybody knows."""


def agree(comm: Communicator, where: str, told: Sequence[str]) -> None:
    """Raise CollectiveMismatch on every rank if `told` is not the same on all."""
    with prepared(comm, where) as mine:
        mine += told


@contextmanager
def prepared(comm: Communicator, where: str) -> Iterator[list[str]]:
    """A preparation in which nothing is sent: if it fails on any rank, all raise.

    What is put into the list must be the same on all ranks.
    """
    told: list[str] = []
    problem: Exception | None = None
    try:
        yield told
    except Exception as error:  # whatever it is, the others wait for this rank
        problem = error
    _compare(comm, where, told, "" if problem is None else _said(problem))
    if problem is not None:
        raise problem


@contextmanager
def heard(comm: Communicator, what: str) -> Iterator[None]:
    """A check within a step: if it fails on this rank, all others raise as well.

    `what` is what they see of it, in 28 letters at most. If all fail in the same place
    they are in step, and each raises its own error.
    """
    try:
        yield
    except _BROKEN:
        raise
    except UnisonoError:
        with suppress(UnisonoError):  # which the others get; the caller, its own
            comm.barrier(label=what)
        raise


@contextmanager
def or_leaves(comm: Communicator) -> Iterator[None]:
    """Work for which others wait in `recv`: if it fails, this rank leaves them."""
    try:
        yield
    except Exception as error:
        leave(comm, error)
        raise


def leave(comm: Communicator, error: BaseException) -> None:
    """Let the others know that this rank has failed, if they do not know it yet."""
    if comm.world_size > 1 and not isinstance(error, _BROKEN):
        comm.close()


def _compare(comm: Communicator, where: str, told: Sequence[str], problem: str) -> None:
    text = "\n".join(["problem: " + problem] if problem else told).encode()
    digest = hashlib.blake2b(text, digest_size=8).digest()
    mine = np.frombuffer(digest, dtype=np.int64)
    every = comm.all_gather(mine.copy())
    if (every == every[0]).all():
        return
    lists: list[tuple[str, list[str]]] = comm.all_gather_objects((problem, list(told)))
    problems = {rank: why for rank, (why, _) in enumerate(lists) if why}
    if problem:
        return  # this rank raises that
    if problems:
        raise CollectiveMismatch(
            f"{where}: {_grouped(problems, 'cannot go on')}; see to it there",
            calls=problems,
            seq=0,
        )
    calls = _first_difference([said for _, said in lists])
    raise CollectiveMismatch(
        f"{where}: the ranks differ: {_grouped(calls)}; build the same on every rank",
        calls=calls,
        seq=0,
    )


def _said(problem: Exception) -> str:
    if isinstance(problem, UnisonoError):
        return str(problem)
    return f"{type(problem).__name__}: {problem}"


def _first_difference(lists: list[list[str]]) -> dict[int, str]:
    """What each rank has in the first line that is not the same on all."""
    for i in range(max(map(len, lists))):
        lines = [said[i] if i < len(said) else "no more" for said in lists]
        if len(set(lines)) > 1:
            return dict(enumerate(lines))
    raise AssertionError("the ranks said the same")


def _grouped(calls: dict[int, str], verb: str = "") -> str:
    """Who says what, as in: ranks 0, 2 have one thing, rank 1 has another."""
    said: dict[str, list[int]] = {}
    for rank, what in calls.items():
        said.setdefault(what, []).append(rank)
    told = []
    for what, ranks in said.items():
        numbers = ", ".join(map(str, ranks))
        does = f"{verb}:" if verb else "have" if len(ranks) > 1 else "has"
        told.append(f"rank{'s' * (len(ranks) > 1)} {numbers} {does} {what}")
    return ", ".join(told)
