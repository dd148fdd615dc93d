"""A process that has everything imported, and forks the ranks of trials.

It reads trials from its standard input, one in a line, and answers with reports. It has
one thread, so that forking is safe, and never starts the engine itself. Ranks begin
within milliseconds this way, where starting an interpreter for each would take seconds.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product

import msgspec

from unisono.algorithms import read
from unisono.runtime.plan.plans import native_program
from unisono.runtime.plan.select import choose
from unisono.runtime.world.address import free_port
from unisono.schedule.placement import numbered
from unisono.testing._faults.judge import judge
from unisono.testing._faults.programs import COLLECTIVE_PROGRAMS
from unisono.testing._faults.ranks import Life, Meeting, Post, run_rank
from unisono.testing._faults.records import Report, Seen, Trial
from unisono.transports.unix import readable


@dataclass
class _Child:
    """A rank as the server sees it."""

    rank: int
    pid: int
    handle: int
    told: int
    text: bytes = b""
    seen: Seen | None = None
    ended: int | None = None


@dataclass
class _Scene:
    """A trial while it runs."""

    trial: Trial
    life: Life
    children: list[_Child]
    release: list[int]
    stderr: int
    deadline: float
    struck_at: float = 0.0
    exact: bool = True
    problems: list[str] = field(default_factory=list)

    @property
    def victim(self) -> _Child:
        """The rank that it is about."""
        return self.children[self.trial.victim]

    def awaited(self, with_victim: bool) -> list[_Child]:
        """Those that live and have not yet told what they saw."""
        return [
            c
            for c in self.children
            if c.seen is None
            and c.ended is None
            and (with_victim or c is not self.victim)
        ]


def run(trial: Trial) -> Report:
    """Run one trial from beginning to end."""
    began = time.monotonic()
    _warm(trial)
    scene = _begin(trial)
    passed = False
    try:
        if trial.action != "dawdle":
            passed = _strike(scene)
            _listen(scene, with_victim=False)
        if trial.action == "stop":
            os.kill(scene.victim.pid, signal.SIGCONT)
        if trial.action != "kill":
            _listen(scene, with_victim=True)
        if scene.awaited(with_victim=trial.action != "kill"):
            _show_stacks(scene)
    finally:
        _end(scene)
    report = _report(scene, passed)
    report.seconds = time.monotonic() - began
    return report


def _warm(trial: Trial) -> None:
    """Make the lowered programs once here, so that children find them made."""
    sizes = {4 * count for count in (1, trial.count, trial.n * trial.count)}
    everybody = numbered(trial.places)
    groups = {everybody} if trial.hosts else {(0,) * trial.n}
    if trial.program in ("split", "medley"):
        groups |= {numbered(everybody[half::2]) for half in range(2)}
    if not trial.hosts:
        groups |= {(0,) * (trial.n // 2), (0,) * (trial.n - trial.n // 2)}
    for hosts in groups:
        for collective, nbytes in product(COLLECTIVE_PROGRAMS, sizes):
            _lower(collective, nbytes, hosts, None)
    if trial.algorithm is not None:
        _lower(trial.program, 0, everybody or (0,) * trial.n, trial.algorithm)


@cache
def _lower(
    collective: str, nbytes: int, hosts: tuple[int, ...], algorithm: str | None
) -> None:
    n = len(hosts)
    told = hosts if len(set(hosts)) > 1 else ()
    found = choose(
        *(collective, nbytes, n),
        named=algorithm,
        reproducible=False,
        hosts=told or None,
    ).algorithm
    spec = read(found)
    rooted = collective in ("broadcast", "reduce", "gather", "scatter")
    for root, lent in product(range(n if rooted else 1), (0, 3) if told else range(4)):
        for rank in range(n):
            native_program(collective, spec, n, root, lent, told, None, rank)


def _begin(trial: Trial) -> _Scene:
    life = Life(trial.n)
    address = f"127.0.0.1:{free_port()}"
    meeting = Meeting(secrets.token_hex(8), address, secrets.token_hex(32))
    stderr = os.memfd_create("stderr")
    children: list[_Child] = []
    release: list[int] = []
    for rank in range(trial.n):
        told, tell = os.pipe()
        released, let_go = os.pipe()
        pid = os.fork()
        if pid == 0:
            for fd in [let_go, *release]:  # held by the server alone, so that it ends
                os.close(fd)
            run_rank(trial, rank, meeting, life, Post(tell, released, stderr))
        os.close(tell)
        os.close(released)
        release.append(let_go)
        children.append(_Child(rank, pid, os.pidfd_open(pid), told))
    deadline = time.monotonic() + trial.limit_s
    return _Scene(trial, life, children, release, stderr, deadline)


def _strike(scene: _Scene) -> bool:
    """See the victim lost; whether that was at its failpoint."""
    trial, victim = scene.trial, scene.victim
    while not scene.life.all_began() and time.monotonic() < scene.deadline:
        if _has_ended(victim) or _is_stopped(victim) or victim.seen is not None:
            break
        _hear(scene, 0.001)
    passed = bool(trial.failpoint) and _passes_failpoint(scene)
    if not trial.failpoint:
        time.sleep(trial.after_s)
    scene.struck_at = time.monotonic()
    if _has_ended(victim):
        scene.struck_at = scene.life.last(victim.rank)
        scene.exact = False
    elif trial.action == "kill":
        os.kill(victim.pid, signal.SIGKILL)
    elif not passed:
        os.kill(victim.pid, signal.SIGSTOP)
    return passed


def _passes_failpoint(scene: _Scene) -> bool:
    until = time.monotonic() + scene.trial.patience_s
    while time.monotonic() < until and scene.awaited(with_victim=False):
        if _has_ended(scene.victim) or _is_stopped(scene.victim):
            return True
        _hear(scene, 0.002)
    # If all have told already, it is dying: its sockets end before its process does.
    return not scene.awaited(with_victim=False) and _has_ended(scene.victim, 5.0)


def _listen(scene: _Scene, *, with_victim: bool) -> None:
    while scene.awaited(with_victim) and time.monotonic() < scene.deadline:
        _hear(scene, 0.05)


def _hear(scene: _Scene, seconds: float) -> None:
    """Take in what children tell, for a while."""
    open_pipes = {c.told: c for c in scene.children if c.seen is None and c.told >= 0}
    for fd in readable(open_pipes, seconds):
        child = open_pipes[fd]
        data = os.read(fd, 1 << 16)
        child.text += data
        if child.text.endswith(b"\n"):
            child.seen = msgspec.json.decode(child.text, type=Seen)
        elif not data:
            os.close(fd)
            child.told = -1
            child.ended = _status(child, os.WEXITED)


def _has_ended(child: _Child, within_s: float = 0.0) -> bool:
    return bool(readable([child.handle], within_s))


def _is_stopped(child: _Child) -> bool:
    try:
        how = os.WSTOPPED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, child.pid, how) is not None
    except ChildProcessError:  # has ended just now
        return False


def _status(child: _Child, how: int) -> int | None:
    """How a child ended, as subprocess has it: a signal is negative."""
    found = os.waitid(os.P_PID, child.pid, how)
    if found is None:
        return None
    exited = found.si_code == os.CLD_EXITED
    return int(found.si_status if exited else -found.si_status)


def _show_stacks(scene: _Scene) -> None:
    """Have those that hang write where they are."""
    for child in scene.children:
        if child.ended is None and not _has_ended(child):
            os.kill(child.pid, signal.SIGUSR1)
    time.sleep(0.2)


def _end(scene: _Scene) -> None:
    """Let all go, and wait until they are gone."""
    hang = scene.awaited(with_victim=True)
    for fd in scene.release:
        os.close(fd)
    until = time.monotonic() + 20.0
    for child in scene.children:
        left = 0.0 if child in hang else max(0.0, until - time.monotonic())
        if child.ended is None and not readable([child.handle], left):
            if child not in hang:
                scene.problems.append(f"rank {child.rank} did not end when let go")
            os.kill(child.pid, signal.SIGKILL)
        if child.ended is None:
            child.ended = _status(child, os.WEXITED)
        os.close(child.handle)
        if child.told >= 0:
            os.close(child.told)


def _report(scene: _Scene, passed: bool) -> Report:
    seen = [c.seen or Seen(c.rank) for c in scene.children]
    with os.fdopen(scene.stderr, "rb") as file:
        file.seek(0)
        text = file.read().decode(errors="replace")
    report = Report(
        scene.trial,
        problems=scene.problems,
        passed_failpoint=passed,
        exact=scene.exact,
        pids=[c.pid for c in scene.children],
        seen=seen,
        stderr=text,
    )
    report.detection_s = [
        max(0.0, s.at - scene.struck_at)
        for s in seen
        if s.at and s.rank != scene.trial.victim
    ]
    judge(report, ended=[c.ended for c in scene.children], told=_told(scene.children))
    return report


def _told(children: Sequence[_Child]) -> list[bool]:
    return [c.seen is not None for c in children]


def serve() -> None:
    """Answer until the input ends."""
    for line in sys.stdin.buffer:
        report = run(msgspec.json.decode(line, type=Trial))
        sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    serve()
