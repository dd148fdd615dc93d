"""The compiled adapter, built beside the first program that could have used it.

That program goes on with the adapter in Python and waits for nothing; those that begin
later find the compiled one. The compiler runs in a process of its own, at the lowest
priority, which outlives the program. All ranks of a host may ask for it: one process
holds the lock as long as it builds. If it cannot be built, the reason is kept, and
nobody tries again until it is built by hand or torch or unisono are others.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from unisono.errors import UsageError
from unisono.interop.torch import compiled
from unisono.service_threads import ServiceThread

_LOG = logging.getLogger("unisono")


def begin() -> bool:
    """Begin to build it, and return at once; whether a process was started.

    None is where there is no compiler, where it failed before, where it cannot be kept,
    or where another process is at it.
    """
    if compiled.compiler() is None or not sys.executable:
        return False
    try:
        folder = compiled.make_folder()
        if compiled.is_built() or _failure(folder).exists():
            return False
        with _only_one(folder) as descriptor:
            if descriptor is None:
                return False
            _start(descriptor)
    except (UsageError, OSError) as why:
        _LOG.info("the compiled torch adapter is not built: %s", why)
        return False
    _LOG.info("the compiled torch adapter is being built for later programs")
    return True


def state() -> str:
    """Where it stands while it is not built, in words."""
    try:
        folder = compiled.path().parent
        if _failure(folder).exists():
            return f"not built; it failed, see {_failure(folder)}"
        with _only_one(folder) as descriptor:
            return "being built" if descriptor is None else "not built"
    except (UsageError, OSError):
        return "not built"


def forget_failure() -> None:
    """It was built after all."""
    _failure(compiled.path().parent).unlink(missing_ok=True)


def main() -> int:
    """The process that builds it."""
    os.nice(19)
    try:
        compiled.build()
    except UsageError as why:
        with contextlib.suppress(OSError):
            _failure(compiled.make_folder()).write_text(f"{why}\n")
        return 1
    return 0


def _failure(folder: Path) -> Path:
    return folder / "failed"


@contextlib.contextmanager
def _only_one(folder: Path) -> Iterator[int | None]:
    """A descriptor, locked as long as a process has it; None if another has it."""
    with (folder / "background").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
        else:
            yield file.fileno()


def _start(descriptor: int) -> None:
    """Start the process, which holds the lock by its copy of the descriptor."""
    process = subprocess.Popen(
        [sys.executable, "-m", "unisono.interop.torch.background"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=[descriptor],
        start_new_session=True,
        cwd="/",
    )
    # Somebody has to take note of its end, if this process lives so long.
    ServiceThread(target=process.wait, name="unisono-torch-build", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
