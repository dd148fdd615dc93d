"""Whether a trial went as promised."""

from __future__ import annotations

import signal
import socket
from collections.abc import Sequence

from unisono.runtime.plan.plans import CODES
from unisono.testing._faults.records import Report, Seen


def judge(report: Report, *, ended: Sequence[int | None], told: Sequence[bool]) -> None:
    """Add what is wrong to the report's problems."""
    trial = report.trial
    for seen, status, spoke in zip(report.seen, ended, told, strict=True):
        if seen.rank == trial.victim and trial.action == "kill":
            if seen.error:
                report.problems.append(f"the victim failed before: {seen.message}")
            if status != -signal.SIGKILL:
                report.problems.append(f"the victim was not killed, but: {status}")
            continue
        if not spoke and status == -signal.SIGKILL:
            report.problems.append(f"rank {seen.rank} hangs")
        elif not spoke or status != 0:
            report.problems.append(f"rank {seen.rank} ended by itself with {status}")
        else:
            report.problems += _misread(seen, report)


def _misread(seen: Seen, report: Report) -> list[str]:
    """What is wrong with how one rank ended."""
    action = report.trial.action
    if action == "dawdle":
        expected: tuple[str, ...] = ("",)
    elif seen.rank == report.trial.victim:  # was stopped, and has found the others gone
        expected = ("PeerLost", "CollectiveTimeout", "TransportError")
    else:
        expected = ("PeerLost",) if action == "kill" else ("CollectiveTimeout",)
    if seen.error == "ConnectFailed" and seen.ranks == [report.trial.victim]:
        return []  # it was still on its way when the victim was lost
    if seen.error not in expected:
        ended = f"{seen.error}: {seen.message}" if seen.error else "nothing"
        return [f"rank {seen.rank} ended with {ended}, expected {expected[0]}"]
    if seen.rank == report.trial.victim or not seen.error:
        return []
    return _misnamed(seen, report)


def _misnamed(seen: Seen, report: Report) -> list[str]:
    """What is wrong with whom and what a survivor's error names."""
    trial, wrong = report.trial, []
    named = [seen.members[r] for r in seen.ranks]
    if named != [trial.victim]:
        wrong.append(f"rank {seen.rank} names ranks {named}: {seen.message}")
    if trial.action == "kill":
        if seen.pids != [report.pids[trial.victim]]:
            wrong.append(f"rank {seen.rank} names processes {seen.pids}")
        places = trial.places
        host = f"host{places[trial.victim]}" if places else socket.gethostname()
        if seen.host != host:
            wrong.append(f"rank {seen.rank} names the host {seen.host!r}")
    if seen.collective not in (*CODES, "empty", "split"):
        wrong.append(f"rank {seen.rank} names the call {seen.collective!r}")
    if seen.seq < 1 and seen.collective not in ("send", "recv"):
        wrong.append(f"rank {seen.rank} names the sequence number {seen.seq}")
    return wrong
