"""One rank of a world across hosts, in its parent: a process and four files.

Files rather than pipes: the parent need not read while ranks run, no rank waits for a
reader, and all that a killed rank has written is there. They have no names, so nothing
is left behind.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
import signal
import subprocess
import tempfile
from dataclasses import dataclass, field
from typing import IO, Any

from unisono.errors import BadArgument
from unisono.launch.exceptions import RankReport
from unisono.launch.outcome import RankEnd
from unisono.launch.output import stderr_tail


@dataclass(frozen=True)
class EndedRank(RankEnd):
    """How a rank ended, what it returned or raised, and all that it wrote.

    `ended_by_launcher` means that it was stuck; its stacks are then in `stderr`.
    """

    host: int = 0
    result: Any = None
    error: BaseException | None = None
    stdout: str = field(default="", repr=False)
    stderr: str = field(default="", repr=False)


class RankProcess:
    """The process of one rank, in its parent."""

    def __init__(self, number: int, host: int) -> None:
        self.number, self.host = number, host
        self.order, self.report, self.out, self.err = (_file() for _ in range(4))
        self.process: subprocess.Popen[Any] | None = None
        self.ended_s: float | None = None
        self.status = 0
        self.stuck = False

    @property
    def pid(self) -> int:
        """The process id; it must have been started."""
        assert self.process is not None
        return self.process.pid

    def look(self, now: float) -> None:
        """Check whether it has exited, but leave it a zombie: its pid is not reused."""
        how = os.WEXITED | os.WNOHANG | os.WNOWAIT
        seen = os.waitid(os.P_PID, self.pid, how)
        if seen is not None and self.ended_s is None:
            exited = seen.si_code == os.CLD_EXITED
            self.status = seen.si_status if exited else -seen.si_status
            self.ended_s = now

    def show_stacks(self) -> None:
        """Make it write the stacks of all its threads and exit."""
        self.stuck = True
        # A limit of one byte: no core dump, neither to a file nor to a program.
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(self.pid, resource.RLIMIT_CORE, (1, 1))
        for number in (signal.SIGABRT, signal.SIGCONT):
            os.kill(self.pid, number)

    def end(self) -> EndedRank:
        """Its outcome, once it has exited."""
        report = self._report()
        stderr = contents(self.err)
        return EndedRank(
            rank=self.number,
            pid=self.pid,
            status=self.status,
            seconds=self.ended_s or 0.0,
            ended_by_launcher=self.stuck,
            stderr_tail=stderr_tail(stderr.splitlines()) if self.status else "",
            host=self.host,
            result=report.result,
            error=report.error,
            stdout=contents(self.out).decode(errors="replace"),
            stderr=stderr.decode(errors="replace"),
        )

    def _report(self) -> RankReport:
        """Its report; an empty one if it died before writing it."""
        data = contents(self.report)
        if not data:
            return RankReport()
        try:
            found: RankReport = pickle.loads(data)
        except Exception as why:
            text = f"what rank {self.number} returned cannot be read here: {why}"
            return RankReport(failed=True, error=BadArgument(f"world_across: {text}"))
        return found

    def close(self) -> None:
        """Kill the rest of its process group, and close its files."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            self.process.wait()
        for file in (self.order, self.report, self.out, self.err):
            file.close()


def _file() -> IO[bytes]:
    return tempfile.TemporaryFile()


def contents(file: IO[bytes]) -> bytes:
    """The whole content of the file, without moving its offset."""
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0)
