"""Processes and their groups: the warden, what is alive, who reads the terminal."""

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

# A shell rather than Python: it is there within a millisecond and takes no memory to
# speak of. Nothing in it bears a name that `pkill -f` might be aimed at.
_WARDEN = """
trap '' HUP INT QUIT TERM
groups=
while read -r line; do
  [ "$line" = farewell ] && exit
  groups="$groups $line"
done
for group in $groups; do kill -s KILL -- "-$group"; done
"""


class Warden:
    """A sleeping process that ends all enrolled groups when its owner is gone.

    Used as a context; leaving it, in whatever way, is the farewell.
    """

    def __enter__(self) -> Warden:
        """Start it, out of reach of the terminal."""
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _WARDEN],
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

    def enrol(self) -> None:
        """Called by a new process before it becomes its program: its group is mine.

        Until then it holds the pipe open, and so the warden waits for this line.
        """
        os.write(self._pipe.fileno(), b"%d\n" % os.getpid())

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        """Send it home."""
        with contextlib.suppress(BrokenPipeError):
            self._pipe.write(b"farewell\n")
        self._pipe.close()
        self._process.wait()


def signal_name(number: int) -> str:
    """SIGKILL for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def group_is_alive(group: int) -> bool:
    """Whether any process of the group still runs; zombies do not."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return any(
        member == group and state not in "ZX" for member, state in _groups_and_states()
    )


def _groups_and_states() -> Iterator[tuple[int, str]]:
    """Of every process. The name before them is in brackets and may contain any."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it may end at any moment
            stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
            state, _, group = stat.rpartition(")")[2].split()[:3]
            yield int(group), state


def input_of_rank_0() -> int | None:
    """Our own standard input, or none of it.

    A terminal gives its lines only to the group in the foreground, which is ours: from
    there they are pumped. In the background there is nothing to read.
    """
    try:
        if not os.isatty(0):
            os.fstat(0)
            return None
        return subprocess.PIPE if _in_foreground() else subprocess.DEVNULL
    except OSError:
        return subprocess.DEVNULL


def pump_terminal(pipe: IO[bytes]) -> None:
    """Pass what is typed on to `pipe`, until either side ends or we lose the screen."""
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
    """Our own standard input in pieces, for a rank elsewhere; see `input_of_rank_0`."""
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
