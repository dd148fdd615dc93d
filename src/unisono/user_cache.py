"""Files in the user's cache folder that nobody else may have made or changed.

What is kept there is loaded and runs as this user, so the folders and the files belong
to this user, and others cannot write to them. A file that is not so is made anew; a
folder that is not so is refused. What was checked is what is loaded: a file is opened
first, and its descriptor is examined.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from unisono.errors import UsageError

_LOG = logging.getLogger("unisono")
_POLL_S = 0.05


@dataclass(frozen=True)
class UserCache:
    """One folder of the cache; errors name what is kept there."""

    name: str
    subject: str

    def folder(self) -> Path:
        """Where it is, or would be: under XDG_CACHE_HOME, or ~/.cache."""
        try:
            base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        except RuntimeError:
            raise UsageError(
                f"there is no home folder to keep {self.subject} in; set XDG_CACHE_HOME"
            ) from None
        return Path(base) / "unisono" / self.name

    def make_folders(self, folder: Path) -> None:
        """Make `folder`, this one or one below it; UsageError if it is not safe."""
        for one in self._ours(folder):
            one.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.refuse_folders(folder)

    def refuse_folders(self, folder: Path) -> None:
        """Raise UsageError if another user could put a file into one of the folders."""
        for one in self._ours(folder):
            descriptor = os.open(one, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                wrong = _not_ours(os.fstat(descriptor)) or _foreign_link(one)
            finally:
                os.close(descriptor)
            if wrong:
                raise UsageError(
                    f"{self.subject} is not loaded from {one}, which {wrong}; "
                    f"see who has changed it, then remove it or `chmod go-w {one}`, or "
                    "set XDG_CACHE_HOME to a folder of your own"
                )

    def is_ours(self, target: Path) -> bool:
        """Whether a file is there and can be trusted; otherwise it is made anew."""
        try:
            os.close(opened(target))
        except FileNotFoundError:
            return False
        except (UsageError, OSError) as why:
            _LOG.warning("%s is built anew: %s", self.subject, why)
            return False
        return True

    def _ours(self, folder: Path) -> list[Path]:
        """The folders that are ours to make, from the outermost: unisono, this one."""
        top = self.folder().parent
        below = folder.relative_to(top).parts
        return [top.joinpath(*below[:depth]) for depth in range(len(below) + 1)]


def opened(target: Path) -> int:
    """A descriptor of the file; UsageError if it is not this user's alone."""
    descriptor = os.open(target, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    status = os.fstat(descriptor)
    wrong = _not_ours(status) or ("" if stat.S_ISREG(status.st_mode) else "is no file")
    if wrong:
        os.close(descriptor)
        raise UsageError(f"{target} {wrong}")
    return descriptor


@contextmanager
def alone(lock: Path, timeout_s: float | None = None) -> Iterator[None]:
    """One process at a time; the lock goes with the process.

    With `timeout_s` the wait is bounded: the holder may have been stopped. Whoever has
    waited so long goes on, so what it then does must be right beside the holder.
    """
    with lock.open("w") as file:
        if timeout_s is None:
            fcntl.flock(file, fcntl.LOCK_EX)
        else:
            _lock_for(file.fileno(), timeout_s)
        yield


def _lock_for(descriptor: int, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        else:
            return True


def _not_ours(found: os.stat_result) -> str:
    """What is wrong with a file or folder, in words; empty if nothing is."""
    if found.st_uid != os.geteuid():
        return f"belongs to user {found.st_uid}, this is {os.geteuid()}"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others can write to (mode {stat.S_IMODE(found.st_mode):o})"
    return ""


def _foreign_link(folder: Path) -> str:
    link = folder.lstat()
    if stat.S_ISLNK(link.st_mode) and link.st_uid not in (0, os.geteuid()):
        return f"is a link that belongs to user {link.st_uid}"
    return ""
