"""A server process that has imported everything and forks the ranks of trials.

It reads trials from its standard input, one in a line, and answers with reports. It has
one thread, so that forking is safe, and never starts the engine itself. Ranks start
within milliseconds; a new interpreter for each would take seconds.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import time
from dataclasses import dataclass, field
from functools import cache
from itertools import product

import msgspec

from kill_trials.checks import check_outcomes
from kill_trials.programs import COLLECTIVE_PROGRAMS
from kill_trials.rank import Heartbeats, Rendezvous, ServerPipes, run_rank
from kill_trials.records import RankOutcome, Trial, TrialReport
from unisono.algorithms import read
from unisono.runtime.plan.plans import rank_program
from unisono.runtime.plan.select import choose
from unisono.runtime.world.address import free_port
from unisono.schedule.placement import numbered
from unisono.transports.unix import readable


@dataclass
class _RankProcess:
    """The process of one rank."""

    rank: int
    pid: int
    handle: int
    pipe: int
    text: bytes = b""
    outcome: RankOutcome | None = None
    ended: int | None = None


@dataclass
class _RunningTrial:
    """The state of a running trial."""

    trial: Trial
    heartbeats: Heartbeats
    children: list[_RankProcess]
    release: list[int]
    stderr: int
    deadline: float
    lost_at: float = 0.0
    exact: bool = True
    problems: list[str] = field(default_factory=list)

    @property
    def victim(self) -> _RankProcess:
        """The process of the rank that is killed or stopped."""
        return self.children[self.trial.victim]

    def awaited(self, with_victim: bool) -> list[_RankProcess]:
        """The live ranks that have not yet reported an outcome."""
        return [
            c
            for c in self.children
            if c.outcome is None
            and c.ended is None
            and (with_victim or c is not self.victim)
        ]


def run_trial(trial: Trial) -> TrialReport:
    """Run one trial and check it."""
    began = time.monotonic()
    _warm(trial)
    run = _begin(trial)
    passed = False
    try:
        if trial.action != "delay":
            passed = _lose_victim(run)
            _await_outcomes(run, with_victim=False)
        if trial.action == "stop":
            os.kill(run.victim.pid, signal.SIGCONT)
        if trial.action != "kill":
            _await_outcomes(run, with_victim=True)
        if run.awaited(with_victim=trial.action != "kill"):
            _show_stacks(run)
    finally:
        _end(run)
    report = _report(run, passed)
    report.seconds = time.monotonic() - began
    return report


def _warm(trial: Trial) -> None:
    """Lower the trial's programs before the fork: children share the cache."""
    sizes = {4 * count for count in (1, trial.count, trial.n * trial.count)}
    everybody = numbered(trial.host_of_rank)
    groups = {everybody} if trial.hosts else {(0,) * trial.n}
    if trial.program in ("split", "mixed"):
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
    several = hosts if len(set(hosts)) > 1 else ()
    found = choose(
        *(collective, nbytes, n),
        named=algorithm,
        reproducible=False,
        hosts=several or None,
    ).algorithm
    spec = read(found)
    rooted = collective in ("broadcast", "reduce", "gather", "scatter")
    for root, exposed in product(
        range(n if rooted else 1), (0, 3) if several else range(4)
    ):
        for rank in range(n):
            rank_program(collective, spec, n, root, exposed, several, rank)


def _begin(trial: Trial) -> _RunningTrial:
    heartbeats = Heartbeats(trial.n)
    address = f"127.0.0.1:{free_port()}"
    rendezvous = Rendezvous(secrets.token_hex(8), address, secrets.token_hex(32))
    stderr = os.memfd_create("stderr")
    children: list[_RankProcess] = []
    release: list[int] = []
    for rank in range(trial.n):
        outcome_read, outcome_write = os.pipe()
        release_read, release_write = os.pipe()
        pid = os.fork()
        if pid == 0:
            for fd in [release_write, *release]:  # held by the server alone
                os.close(fd)
            run_rank(
                trial,
                rank,
                rendezvous,
                heartbeats,
                ServerPipes(outcome_write, release_read, stderr),
            )
        os.close(outcome_write)
        os.close(release_read)
        release.append(release_write)
        children.append(_RankProcess(rank, pid, os.pidfd_open(pid), outcome_read))
    deadline = time.monotonic() + trial.limit_s
    return _RunningTrial(trial, heartbeats, children, release, stderr, deadline)


def _lose_victim(run: _RunningTrial) -> bool:
    """Kill or stop the victim; whether that happened at its failpoint."""
    trial, victim = run.trial, run.victim
    while not run.heartbeats.all_began() and time.monotonic() < run.deadline:
        if _has_ended(victim) or _is_stopped(victim) or victim.outcome is not None:
            break
        _read_outcomes(run, 0.001)
    passed = bool(trial.failpoint) and _passes_failpoint(run)
    if not trial.failpoint:
        time.sleep(trial.after_s)
    run.lost_at = time.monotonic()
    if _has_ended(victim):
        run.lost_at = run.heartbeats.last(victim.rank)
        run.exact = False
    elif trial.action == "kill":
        os.kill(victim.pid, signal.SIGKILL)
    elif not passed:
        os.kill(victim.pid, signal.SIGSTOP)
    return passed


def _passes_failpoint(run: _RunningTrial) -> bool:
    until = time.monotonic() + run.trial.failpoint_timeout_s
    while time.monotonic() < until and run.awaited(with_victim=False):
        if _has_ended(run.victim) or _is_stopped(run.victim):
            return True
        _read_outcomes(run, 0.002)
    # All have reported: the victim is exiting; its sockets close before it ends.
    return not run.awaited(with_victim=False) and _has_ended(run.victim, 5.0)


def _await_outcomes(run: _RunningTrial, *, with_victim: bool) -> None:
    while run.awaited(with_victim) and time.monotonic() < run.deadline:
        _read_outcomes(run, 0.05)


def _read_outcomes(run: _RunningTrial, seconds: float) -> None:
    """Read outcomes from the children's pipes for up to `seconds`."""
    open_pipes = {c.pipe: c for c in run.children if c.outcome is None and c.pipe >= 0}
    for fd in readable(open_pipes, seconds):
        child = open_pipes[fd]
        data = os.read(fd, 1 << 16)
        child.text += data
        if child.text.endswith(b"\n"):
            child.outcome = msgspec.json.decode(child.text, type=RankOutcome)
        elif not data:
            os.close(fd)
            child.pipe = -1
            child.ended = _status(child, os.WEXITED)


def _has_ended(child: _RankProcess, within_s: float = 0.0) -> bool:
    return bool(readable([child.handle], within_s))


def _is_stopped(child: _RankProcess) -> bool:
    try:
        how = os.WSTOPPED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, child.pid, how) is not None
    except ChildProcessError:  # it has just exited
        return False


def _status(child: _RankProcess, how: int) -> int | None:
    """A child's exit status as `subprocess` gives it: a signal is negative."""
    found = os.waitid(os.P_PID, child.pid, how)
    if found is None:
        return None
    exited = found.si_code == os.CLD_EXITED
    return int(found.si_status if exited else -found.si_status)


def _show_stacks(run: _RunningTrial) -> None:
    """Make ranks that hang write their stacks to stderr."""
    for child in run.children:
        if child.ended is None and not _has_ended(child):
            os.kill(child.pid, signal.SIGUSR1)
    time.sleep(0.2)


def _end(run: _RunningTrial) -> None:
    """Release all ranks and wait until they have exited."""
    hang = run.awaited(with_victim=True)
    for fd in run.release:
        os.close(fd)
    until = time.monotonic() + 20.0
    for child in run.children:
        left = 0.0 if child in hang else max(0.0, until - time.monotonic())
        if child.ended is None and not readable([child.handle], left):
            if child not in hang:
                run.problems.append(f"rank {child.rank} did not exit when released")
            os.kill(child.pid, signal.SIGKILL)
        if child.ended is None:
            child.ended = _status(child, os.WEXITED)
        os.close(child.handle)
        if child.pipe >= 0:
            os.close(child.pipe)


def _report(run: _RunningTrial, passed: bool) -> TrialReport:
    outcomes = [c.outcome or RankOutcome(c.rank) for c in run.children]
    with os.fdopen(run.stderr, "rb") as file:
        file.seek(0)
        text = file.read().decode(errors="replace")
    report = TrialReport(
        run.trial,
        problems=run.problems,
        passed_failpoint=passed,
        exact=run.exact,
        pids=[c.pid for c in run.children],
        outcomes=outcomes,
        stderr=text,
    )
    report.detection_s = [
        max(0.0, o.raised_at - run.lost_at)
        for o in outcomes
        if o.raised_at and o.rank != run.trial.victim
    ]
    check_outcomes(
        report,
        statuses=[c.ended for c in run.children],
        reported=[c.outcome is not None for c in run.children],
    )
    return report


def serve() -> None:
    """Answer trials with reports until the input ends."""
    for line in sys.stdin.buffer:
        report = run_trial(msgspec.json.decode(line, type=Trial))
        sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    serve()
