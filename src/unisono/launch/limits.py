"""How many processes this host can start, by what its kernel allows.

Without this check a launcher would fail at some rank in the middle, with thousands of
processes running.
"""

from __future__ import annotations

import contextlib
import os
import resource
from pathlib import Path

from unisono.errors import BadArgument

_DESCRIPTORS_PER_RANK = 3  # two pipes and a pidfd
_OWN_DESCRIPTORS = 64
_BYTES_PER_RANK = 1 << 20  # less than any process needs


def refuse_too_many(ranks: int) -> None:
    """BadArgument if so many ranks cannot be started here; raises our own limits."""
    most, why = min(_limits(), default=(ranks, ""))
    if ranks > most:
        raise BadArgument(
            f"-n {ranks}: this host can start at most {max(most, 0)} ranks: {why}; use "
            "more hosts (--hosts), ranks that are threads (unisono.testing.world), or "
            "unisono simulate"
        )
    needed = ranks * _DESCRIPTORS_PER_RANK + _OWN_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _limits() -> list[tuple[int, str]]:
    """The most ranks that each limit allows, and the limit in words."""
    found = []
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        most = (hard - _OWN_DESCRIPTORS) // _DESCRIPTORS_PER_RANK
        found.append((most, f"three of {hard} descriptors for each (ulimit -Hn)"))
    processes, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if processes != resource.RLIM_INFINITY and os.geteuid():
        found.append((processes, f"{processes} processes of this user (ulimit -u)"))
    for file in ("/proc/sys/kernel/pid_max", "/proc/sys/kernel/threads-max"):
        with contextlib.suppress(OSError, ValueError):
            number = int(Path(file).read_text())
            found.append((number, f"{number} processes ({file})"))
    with contextlib.suppress(OSError, ValueError):
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        gib = f"{total / (1 << 30):.0f} GiB of memory"
        found.append((total // _BYTES_PER_RANK, f"{gib}, of which each takes a MiB"))
    return found
