"""All ranks pass the same arguments, and if one rank fails, all ranks raise.

Every rank sets up a strategy by itself: shapes, buckets, axes. If ranks differ there,
the collectives of a later step fail or, worse, match by chance. So the ranks compare
descriptions of what they set up: one hash each if they agree, the text only if not.

    with setup_together(comm, "DDP") as settings:      local work, then all or none
        settings.append(f"bucket_cap_mb = {cap}")

An error that occurs on one rank is seen by that rank alone, while the others already
wait for it. During setup, its message is sent to them. In a step that would cost a
message every time, so there the failing rank makes a call that matches no other rank's
call (`runtime/failing.py`): all ranks raise at once, and see which rank made it and
why. Where ranks wait for messages and not for collectives, the failing rank closes its
communicator (`close_on_error`), and they raise PeerLost.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from unisono.errors import CollectiveMismatch, UnisonoError
from unisono.runtime.communicator import Communicator
from unisono.runtime.failing import BROKEN


def check_same(comm: Communicator, where: str, settings: Sequence[str]) -> None:
    """Raise CollectiveMismatch on every rank if `settings` differ between ranks."""
    with setup_together(comm, where) as mine:
        mine += settings


@contextmanager
def setup_together(comm: Communicator, where: str) -> Iterator[list[str]]:
    """Local setup that sends nothing: if it fails on any rank, all ranks raise.

    The lines that are appended to the list must be the same on all ranks.
    """
    settings: list[str] = []
    problem: Exception | None = None
    try:
        yield settings
    except Exception as error:  # any kind: the other ranks wait for this one
        problem = error
    _compare(comm, where, settings, "" if problem is None else _message(problem))
    if problem is not None:
        raise problem


@contextmanager
def close_on_error(comm: Communicator) -> Iterator[None]:
    """Work for which other ranks wait in `recv`: if it fails, close the communicator.

    The other ranks then raise PeerLost.
    """
    try:
        yield
    except Exception as error:
        close_after(comm, error)
        raise


def close_after(comm: Communicator, error: BaseException) -> None:
    """Close the communicator, unless the error shows that it failed on all ranks."""
    if comm.world_size > 1 and not isinstance(error, BROKEN):
        comm.close()


def _compare(
    comm: Communicator, where: str, settings: Sequence[str], problem: str
) -> None:
    text = "\n".join(["problem: " + problem] if problem else settings).encode()
    digest = hashlib.blake2b(text, digest_size=8).digest()
    mine = np.frombuffer(digest, dtype=np.int64)
    every = comm.all_gather(mine.copy())
    if (every == every[0]).all():
        return
    reports: list[tuple[str, list[str]]] = comm.all_gather_objects(
        (problem, list(settings))
    )
    problems = {rank: why for rank, (why, _) in enumerate(reports) if why}
    if problem:
        return  # this rank raises its own error
    if problems:
        raise CollectiveMismatch(
            f"{where}: {_by_rank(problems, 'failed')}; correct it there",
            calls=problems,
            seq=0,
        )
    calls = _first_difference([lines for _, lines in reports])
    raise CollectiveMismatch(
        f"{where}: the ranks differ: {_by_rank(calls)}; pass the same on every rank",
        calls=calls,
        seq=0,
    )


def _message(problem: Exception) -> str:
    if isinstance(problem, UnisonoError):
        return str(problem)
    return f"{type(problem).__name__}: {problem}"


def _first_difference(reports: list[list[str]]) -> dict[int, str]:
    """What each rank has in the first line that is not the same on all ranks."""
    for i in range(max(map(len, reports))):
        lines = [report[i] if i < len(report) else "nothing" for report in reports]
        if len(set(lines)) > 1:
            return dict(enumerate(lines))
    raise AssertionError("the hashes differ, and the lines do not")


def _by_rank(texts: dict[int, str], verb: str = "") -> str:
    """The texts with their ranks, as in: ranks 0, 2 have this, rank 1 has that."""
    ranks_of: dict[str, list[int]] = {}
    for rank, text in texts.items():
        ranks_of.setdefault(text, []).append(rank)
    clauses = []
    for text, ranks in ranks_of.items():
        numbers = ", ".join(map(str, ranks))
        does = f"{verb}:" if verb else "have" if len(ranks) > 1 else "has"
        clauses.append(f"rank{'s' * (len(ranks) > 1)} {numbers} {does} {text}")
    return ", ".join(clauses)
