"""Process groups, the reaper that kills them, and reading from the terminal."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO

from unisono.transports.unix import readable

# A shell rather than Python: it starts within a millisecond and takes little memory.
# Nothing in it has a name that a user's `pkill -f` might match.
_REAPER = """
trap '' HUP INT QUIT TERM
groups=
while read -r line; do
  [ "$line" = done ] && exit
  groups="$groups $line"
done
for group in $groups; do kill -s KILL -- "-$group"; done
"""


class Reaper:
    """A process that kills all registered process groups when its owner is gone.

    Used as a context; leaving it, also by an exception, ends the reaper without a kill.
    """

    def __enter__(self) -> Reaper:
        """Start it in a session of its own: the terminal's signals do not reach it."""
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _REAPER],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={},
            start_new_session=True,
        )
        assert self._process.stdin is not None
        self._pipe = self._process.stdin
        return self

    def register(self) -> None:
        """Register the process group of a new process; called between fork and exec.

        Until then the new process holds the pipe open, so the reaper waits for it.
        """
        os.write(self._pipe.fileno(), b"%d\n" % os.getpid())

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        """End the reaper without killing anything."""
        with contextlib.suppress(BrokenPipeError):
            self._pipe.write(b"done\n")
        self._pipe.close()
        self._process.wait()


def signal_name(number: int) -> str:
    """The name of a signal: SIGKILL for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def group_is_alive(group: int) -> bool:
    """Whether any process of the group still runs; zombies do not count."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return any(
        rank == group and state not in "ZX" for rank, state in _groups_and_states()
    )


def _groups_and_states() -> Iterator[tuple[int, str]]:
    """Group and state of every process, from /proc/*/stat.

    The name before them is in parentheses and may contain any character.
    """
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it may exit at any moment
            stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
            state, _, group = stat.rpartition(")")[2].split()[:3]
            yield int(group), state


def input_of_rank_0() -> int | None:
    """Rank 0's standard input: this process's own, a pipe that we fill, or none.

    Only the foreground process group may read from a terminal, and that is ours: so
    lines are forwarded through a pipe. In the background there is nothing to read.
    """
    try:
        if not os.isatty(0):
            os.fstat(0)
            return None
        return subprocess.PIPE if _in_foreground() else subprocess.DEVNULL
    except OSError:
        return subprocess.DEVNULL


def pump_terminal(pipe: IO[bytes]) -> None:
    """Forward the terminal to `pipe` until either side ends or we leave foreground."""
    with contextlib.suppress(OSError), pipe:
        while True:
            readable([0])
            data = os.read(0, 1 << 12) if _in_foreground() else b""
            if not data:
                return
            os.write(pipe.fileno(), data)


def _in_foreground() -> bool:
    return os.tcgetpgrp(0) == os.getpgrp()


def read_input() -> Iterator[bytes]:
    """This process's standard input in pieces, for a rank on another host.

    See `input_of_rank_0`.
    """
    kind = input_of_rank_0()
    if kind == subprocess.DEVNULL:
        return
    with contextlib.suppress(OSError):
        while True:
            if kind == subprocess.PIPE:
                readable([0])
                if not _in_foreground():
                    return
            data = os.read(0, 1 << 16)
            if not data:
                return
            yield data
