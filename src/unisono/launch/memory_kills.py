"""Evidence that the kernel killed a rank because memory had run out.

The kernel names such a process in its log, which only some users may read, and counts
the kills: in every control group (cgroup), and for the whole system. A rank that got
SIGKILL while a counter rose was killed for memory, or another process was at the same
time; the log tells them apart.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from unisono.units import format_bytes

_ROOT = Path("/")


class MemoryKills:
    """The kernel's counters when a job began, to be compared when a rank was killed."""

    def __init__(self, root: Path = _ROOT) -> None:
        """Read the counters."""
        self._root = root
        self._groups = _groups(root)
        self._before = self._counts()

    def evidence(self, pid: int) -> str:
        """Why SIGKILL of this process was for lack of memory; empty if unknown."""
        if text := self._logged(pid):
            return text
        for place, count in self._counts().items():
            if count > self._before.get(place, 0):
                return _in_words(place)
        return ""

    def _counts(self) -> dict[Path, int]:
        """The kills counted in each file, the group of this process first."""
        files = [
            group / name
            for group in self._groups
            for name in ("memory.events", "memory.oom_control")
        ]
        files.append(self._root / "proc/vmstat")
        found = {}
        for file in files:
            with contextlib.suppress(OSError):
                if match := re.search(r"(?m)^oom_kill (\d+)$", file.read_text()):
                    found[file] = int(match[1])
        return found

    def _logged(self, pid: int) -> str:
        """What the kernel's log says of this process."""
        try:
            log = os.open(self._root / "dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            return ""
        found = ""
        try:
            while record := os.read(log, 1 << 13):
                if match := re.search(rb"[Kk]illed process %d \(.*" % pid, record):
                    found = match[0].decode(errors="replace")
        except OSError:  # read to its end, or overwritten meanwhile
            pass
        finally:
            os.close(log)
        sizes = re.search(r"anon-rss:(\d+)kB", found)
        used = f", with {format_bytes(int(sizes[1]) << 10)} in use" if sizes else ""
        return f"out of memory: the kernel's log names it{used}" if found else ""


def _in_words(file: Path) -> str:
    if file.name == "vmstat":
        return "probably out of memory: the kernel killed for memory on this host"
    limit = ""
    for name in ("memory.max", "memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            nbytes = int((file.parent / name).read_text())
            limit = f" of {format_bytes(nbytes)}"
    return f"out of memory: the limit{limit} of cgroup {file.parent} was reached"


def _groups(root: Path) -> list[Path]:
    """The folders of this process's cgroups that limit memory, inner ones first."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    base, folders = root / "sys/fs/cgroup", []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in ("memory", ""):
            folder = base / controllers
            inside = folder / path.strip("/")
            above = (p for p in inside.parents if p.is_relative_to(folder))
            folders += [inside, *above]
    return [folder for folder in folders if folder.is_dir()]
