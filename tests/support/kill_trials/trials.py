"""Failure trials: real processes, one of which is killed or stopped.

    with TrialServer() as server:
        report = server.run(Trial(n=3, victim=1, program="all_reduce", after_s=0.01))
        assert not report.problems

Every survivor must raise PeerLost (CollectiveTimeout, if the victim was only stopped)
that names the victim and no other rank, soon, and no result that a call has returned
may be wrong. The victim is lost at a failpoint of the native core, or at any time from
outside.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType

import msgspec
import numpy as np

from kill_trials.programs import (
    COLLECTIVE_PROGRAMS,
    PROGRAMS,
    SIZES,
    offered,
)
from kill_trials.records import Trial, TrialReport
from unisono import _native
from unisono.errors import UnisonoError
from unisono.transports.unix import readable

__all__ = [
    "PLACEMENTS",
    "PROGRAMS",
    "Trial",
    "TrialReport",
    "TrialServer",
    "TrialSummary",
    "draw",
    "draw_jitter",
    "failpoints_of",
    "summary",
]

_MESSAGES = ("send.header", "send.part", "recv.part")
_STREAMS = ("message.offered", "stream.send", "stream.receive")
_IO_THREADS = ("io.step",)
_SEGMENTS = ("segment.make", "segment.announce")
_ZERO_COPY_FROM = 32 << 10
"""From this many bytes on, peers read shared-memory buffers without a copy."""


def failpoints_of(trial: Trial) -> list[str]:
    """The failpoints that the victim of such a trial may pass."""
    across = list(_STREAMS) if trial.hosts else []
    if trial.program == "star":
        return [*_MESSAGES, *_SEGMENTS, *across[1:]]
    others = _MESSAGES + _SEGMENTS + _STREAMS + _IO_THREADS
    found = [f for f in _native.failpoint_names() if f not in others] + across
    if trial.program in ("mixed", "split"):
        found += _SEGMENTS
    elif trial.program == "send_recv":
        found += [*_MESSAGES, *_SEGMENTS]
    zero_copy = trial.shared and 4 * trial.count >= _ZERO_COPY_FROM
    if not zero_copy or trial.program in ("barrier", "send_recv", "objects"):
        found.remove("exit.wait")
    elif trial.program in COLLECTIVE_PROGRAMS:
        found.remove("lead.done")
    return found


class TrialServer:
    """A server process that forks the ranks of trials, as long as it is open."""

    def __enter__(self) -> TrialServer:
        """Start the server."""
        self._server = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ
            | {
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                "OPENBLAS_NUM_THREADS": "1",
                "OMP_NUM_THREADS": "1",
            },
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the server."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()
        try:
            self._server.wait(10)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
        self._server.stdout.close()

    def run(self, trial: Trial) -> TrialReport:
        """Run one trial and check it."""
        send, receive = self._server.stdin, self._server.stdout
        assert send is not None
        assert receive is not None
        send.write(msgspec.json.encode(trial) + b"\n")
        send.flush()
        if not readable([receive], 3 * trial.limit_s + 20):
            self._server.kill()
            raise UnisonoError(f"the trial server hangs in {trial}")
        line = receive.readline()
        if not line:
            raise UnisonoError(f"the trial server died in {trial}")
        return msgspec.json.decode(line, type=TrialReport)


PLACEMENTS = (
    *((1, 1), (2, 1), (1, 2), (2, 2), (1, 3)),
    *((1, 1, 1), (2, 1, 2), (1, 1, 1, 1)),
)
"""Numbers of ranks per host, for trials across hosts."""


def draw(
    seed: int, count: int, *, placements: Sequence[tuple[int, ...]] = ((),)
) -> Iterator[Trial]:
    """Random trials of every kind, the same for the same seed.

    A trial's hosts are drawn from `placements`; () is a single host.
    """
    rng = random.Random(seed)
    names = [*COLLECTIVE_PROGRAMS, *PROGRAMS]  # single collectives twice as often
    for _ in range(count):
        program = rng.choice(names)
        n = rng.choice((2, 2, 3, 3, 4, 5))
        hosts = rng.choice(placements)
        n = sum(hosts) or n
        plain = Trial(
            n=n,
            victim=rng.randrange(n),
            program=program,
            count=rng.choice(SIZES),
            algorithm=rng.choice(offered(program, n)),
            shared=rng.random() < 0.3,
            hosts=hosts,
            after_s=rng.random() * 0.02,
            hold=rng.random() < 0.5,
            seed=rng.randrange(1 << 30),
            close_on_error=program in COLLECTIVE_PROGRAMS and rng.random() < 0.5,
        )
        failpoint = rng.choice(("", "", "", *failpoints_of(plain)))
        once = failpoint in _SEGMENTS and program != "split"
        hit = 1 if once else rng.choice((1, 1, 2, 3, 5, 8, 20))
        yield msgspec.structs.replace(plain, failpoint=failpoint, hit=hit)


def draw_jitter(
    seed: int,
    count: int,
    *,
    rounds: int = 40,
    placements: Sequence[tuple[int, ...]] = ((),),
) -> Iterator[Trial]:
    """Random trials in which no rank is lost, but ranks are delayed at random."""
    rng = random.Random(seed)
    for _ in range(count):
        n = rng.choice((2, 3, 3, 4, 5))
        hosts = rng.choice(placements)
        n = sum(hosts) or n
        yield Trial(
            n=n,
            victim=0,
            program="mixed",
            count=rng.choice(SIZES[3:]),
            shared=rng.random() < 0.3,
            hosts=hosts,
            action="delay",
            seed=rng.randrange(1 << 30),
            rounds=rounds,
            limit_s=90.0,
        )


@dataclass(frozen=True)
class TrialSummary:
    """Counts of many trials, and times from a known death to an error, in ms."""

    trials: int
    failures: int
    at_failpoints: int
    survivors: int
    p50_ms: float
    p99_ms: float
    max_ms: float
    bound_ms: float

    @property
    def text(self) -> str:
        """A readable report."""
        return (
            f"trials      {self.trials}, {self.at_failpoints} of them at failpoints\n"
            f"failures    {self.failures}\n"
            f"detection   p50 {self.p50_ms:.1f} ms, p99 {self.p99_ms:.1f} ms, "
            f"max {self.max_ms:.1f} ms ({self.survivors} survivors)\n"
            f"            where the time of death is known; in all trials, at most "
            f"{self.bound_ms:.0f} ms after the last heartbeat"
        )


def summary(reports: Sequence[TrialReport]) -> TrialSummary:
    """Counts and times of many trials."""
    exact = [t for r in reports if r.exact for t in r.detection_s]
    p50, p99, most = 1e3 * np.percentile(exact or [np.nan], [50, 99, 100])
    return TrialSummary(
        trials=len(reports),
        failures=sum(bool(r.problems) for r in reports),
        at_failpoints=sum(r.passed_failpoint for r in reports),
        survivors=len(exact),
        p50_ms=float(p50),
        p99_ms=float(p99),
        max_ms=float(most),
        bound_ms=1e3 * max((t for r in reports for t in r.detection_s), default=0.0),
    )
