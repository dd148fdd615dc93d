"""A job whose ranks are repeatedly killed and replaced from outside.

    report = Churn([sys.executable, "elastic.py", "200"], ranks=4).run(kills=6, seed=1)

The program is one like examples/elastic.py: it prints "at <step>" for each step, then
"end:" and its result, and joins a running world if UNISONO_JOIN is set. Every few steps
a rank drawn from the seed is killed, and a new process started in its place at once.
With `hosts` the ranks are on that many emulated hosts.
"""

from __future__ import annotations

import os
import random
import re
import secrets
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from unisono.launch.processes import Reaper
from unisono.runtime.world.address import free_port

_POLL_S = 0.005
_DOUBLES = 0.4


@dataclass
class ChurnReport:
    """The results of the last ranks, and the output of all."""

    ends: list[str] = field(default_factory=list)
    kills: int = 0
    seconds: float = 0.0
    statuses: list[int] = field(default_factory=list)
    output: str = ""


@dataclass
class _RankProcess:
    process: subprocess.Popen[bytes]
    out: IO[bytes]

    def text(self) -> str:
        """The output so far."""
        self.out.flush()
        size = os.fstat(self.out.fileno()).st_size
        return os.pread(self.out.fileno(), size, 0).decode(errors="replace")


class Churn:
    """A job and the environment of its ranks."""

    def __init__(
        self, command: Sequence[str], *, ranks: int, hosts: int = 0, pause_s: float = 0
    ) -> None:
        """`hosts` 0: one host, without an address."""
        self.command, self.ranks, self.hosts = list(command), ranks, hosts
        self.started = 0
        self.environ = {
            **os.environ,
            "UNISONO_JOB": secrets.token_hex(8),
            "UNISONO_TIMEOUT_S": "60",
            "ELASTIC_WORLD": str(ranks),
            "ELASTIC_PAUSE_S": str(pause_s),
        }
        if hosts:
            self.environ["UNISONO_SECRET"] = secrets.token_hex(32)
            self.environ["UNISONO_ADDRESS"] = f"127.0.0.1:{free_port()}"

    def run(
        self, *, kills: int, seed: int, every: int = 20, timeout_s: float = 60.0
    ) -> ChurnReport:
        """Kill a rank each `every` steps, `kills` times, and wait for the end.

        Sometimes a second one follows while the others still shrink or grow.
        """
        rng = random.Random(seed)
        report = ChurnReport()
        rounds = 0
        began = time.monotonic()
        with Reaper() as reaper:
            living = [self._start(reaper, rank) for rank in range(self.ranks)]
            gone: list[_RankProcess] = []
            while any(one.process.poll() is None for one in living):
                if time.monotonic() - began > timeout_s:
                    _end_stuck(living)
                    break
                steps = max(map(_steps, living))
                if report.kills < kills and steps >= every * (rounds + 1):
                    rounds += 1
                    doubles = rng.random() < _DOUBLES and self._can_lose(2)
                    for delay_s in (0.05, 1.0)[: 1 + doubles]:
                        time.sleep(rng.random() * delay_s)
                        if any(_ends(one.text()) for one in living):
                            break  # a new process would find no world to join
                        victim = living.pop(rng.randrange(len(living)))
                        os.kill(victim.process.pid, signal.SIGKILL)
                        victim.process.wait()
                        gone.append(victim)
                        report.kills += 1
                        living.append(self._start(reaper, None))
                time.sleep(_POLL_S)
            report.statuses = [one.process.wait() for one in living]
            texts = [one.text() for one in living]
            report.ends = [line for text in texts for line in _ends(text)]
            everything = [*gone, *living]
            report.output = "\n".join(
                f"--- pid {one.process.pid}\n{one.text()}" for one in everything
            )
            for one in everything:
                one.out.close()
        report.seconds = time.monotonic() - began
        return report

    def _can_lose(self, killed: int) -> bool:
        """Whether the survivors may continue: across hosts they must be a majority."""
        return not self.hosts or 2 * (self.ranks - killed) > self.ranks

    def _start(self, reaper: Reaper, rank: int | None) -> _RankProcess:
        environ = dict(self.environ)
        if self.hosts:
            environ["UNISONO_HOST_ID"] = f"host{self.started % self.hosts}"
        if rank is None:
            environ["UNISONO_JOIN"] = "1"
        else:
            environ["UNISONO_RANK"] = str(rank)
            environ["UNISONO_WORLD_SIZE"] = str(self.ranks)
        self.started += 1
        out: Any = tempfile.TemporaryFile()  # noqa: SIM115  (closed when all have ended)
        process = subprocess.Popen(
            self.command,
            env=environ,
            stdout=out,
            stderr=out,
            preexec_fn=reaper.register,
            process_group=0,
        )
        return _RankProcess(process, out)


def _steps(rank: _RankProcess) -> int:
    found = re.findall(r"^at (\d+)", rank.text(), re.MULTILINE)
    return int(found[-1]) if found else 0


def _ends(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("end:")]


def _end_stuck(ranks: Sequence[_RankProcess]) -> None:
    """Abort ranks that hang: with faulthandler they write all threads' stacks."""
    for number in (signal.SIGABRT, signal.SIGKILL):
        for one in ranks:
            if one.process.poll() is None:
                os.kill(one.process.pid, number)
        time.sleep(0.5)
