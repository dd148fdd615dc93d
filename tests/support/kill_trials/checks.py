"""Checks of a trial's outcomes."""

from __future__ import annotations

import signal
import socket
from collections.abc import Sequence

from kill_trials.records import RankOutcome, TrialReport
from unisono.runtime.plan.plans import CODES


def check_outcomes(
    report: TrialReport, *, statuses: Sequence[int | None], reported: Sequence[bool]
) -> None:
    """Add every wrong outcome to the report's problems."""
    trial = report.trial
    for outcome, status, has_reported in zip(
        report.outcomes, statuses, reported, strict=True
    ):
        if outcome.rank == trial.victim and trial.action == "kill":
            if outcome.error:
                report.problems.append(f"the victim failed before: {outcome.message}")
            if status != -signal.SIGKILL:
                report.problems.append(f"the victim was not killed, but: {status}")
            continue
        if not has_reported and status == -signal.SIGKILL:
            report.problems.append(f"rank {outcome.rank} hangs")
        elif not has_reported or status != 0:
            report.problems.append(f"rank {outcome.rank} ended by itself with {status}")
        else:
            report.problems += _wrong_outcome(outcome, report)


def _wrong_outcome(outcome: RankOutcome, report: TrialReport) -> list[str]:
    """What is wrong with one rank's outcome."""
    action = report.trial.action
    if action == "delay":
        expected: tuple[str, ...] = ("",)
    elif outcome.rank == report.trial.victim:  # stopped until the others had left
        expected = ("PeerLost", "CollectiveTimeout", "TransportError")
    else:
        expected = ("PeerLost",) if action == "kill" else ("CollectiveTimeout",)
    if outcome.error == "ConnectFailed" and outcome.ranks == [report.trial.victim]:
        return []  # the victim was lost while this rank still connected
    if outcome.error not in expected:
        got = f"{outcome.error}: {outcome.message}" if outcome.error else "no error"
        return [f"rank {outcome.rank} ended with {got}, expected {expected[0]}"]
    if outcome.rank == report.trial.victim or not outcome.error:
        return []
    return _wrong_names(outcome, report)


def _wrong_names(outcome: RankOutcome, report: TrialReport) -> list[str]:
    """What is wrong in the ranks, processes and call that a survivor's error names."""
    trial, wrong = report.trial, []
    named = [outcome.members[r] for r in outcome.ranks]
    if named != [trial.victim]:
        wrong.append(f"rank {outcome.rank} names ranks {named}: {outcome.message}")
    if trial.action == "kill":
        if outcome.pids != [report.pids[trial.victim]]:
            wrong.append(f"rank {outcome.rank} names processes {outcome.pids}")
        hosts = trial.host_of_rank
        host = f"host{hosts[trial.victim]}" if hosts else socket.gethostname()
        if outcome.host != host:
            wrong.append(f"rank {outcome.rank} names the host {outcome.host!r}")
    if outcome.collective not in (*CODES, "empty", "split"):
        wrong.append(f"rank {outcome.rank} names the call {outcome.collective!r}")
    if outcome.seq < 1 and outcome.collective not in ("send", "recv"):
        wrong.append(f"rank {outcome.rank} names the sequence number {outcome.seq}")
    return wrong
