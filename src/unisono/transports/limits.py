"""How many file descriptors a process may have, and how many a world needs.

A rank holds two descriptors for every other rank of its host: a socket, and one for the
process at its other end. The usual soft limit (1,024) is there for programs that use
select(); nothing here does, so the limit is raised to what the system allows.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource

MOST = 1 << 20
"""Not more than this, where there is no limit: some programs go through all of them."""

_SPARE = 16  # what a process needs for a moment: shared memory, files


def raise_descriptor_limit() -> None:
    """Allow this process, and those it starts, as many as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def are_used_up(why: OSError) -> bool:
    """Whether this error says that there are no descriptors left."""
    return why.errno in (errno.EMFILE, errno.ENFILE)


def too_few_descriptors(rank: int, here: int) -> str:
    """What to say of a rank that has none left, where `here` ranks share a host."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    # Rank 0 of a host has a connection to each of the others at the rendezvous.
    each = 2 if rank else 3
    needed = each * (here - 1) + _SPARE
    return (
        f"rank {rank} has no file descriptors left: among {here} ranks of one host it "
        f"needs about {needed} beside its own files, {_in_use()} are in use, and "
        f"{allowed} are allowed; allow more of them (ulimit -n)"
    )


def _in_use() -> int:
    try:  # to look takes one as well
        return len(os.listdir("/proc/self/fd")) - 1
    except OSError:
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
