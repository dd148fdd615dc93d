"""How a job ended: which rank failed first, and the job's exit code.

The first failure is the earliest rank that was killed or raised an error of its own.
Ranks that raised PeerLost come after it even if they exited earlier: they report its
failure. Ranks that the launcher ended are not failures. If all only report the loss of
a peer, a rank that ended before them without an error is named first.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from unisono.launch.output import reports_a_lost_peer
from unisono.launch.processes import signal_name
from unisono.units import format_ranks


@dataclass(frozen=True)
class RankEnd:
    """How one rank ended, `seconds` after the job began.

    `status` is an exit code, or a signal's number with a minus sign. `stderr_tail` is
    the end of its stderr: the traceback if there is one. `hostname` is the host it ran
    on, if the job was started on named hosts; `why` is what the kernel says of its end.
    """

    rank: int
    pid: int
    status: int
    seconds: float
    ended_by_launcher: bool = False
    stderr_tail: str = field(default="", repr=False)
    hostname: str = ""
    why: str = ""

    @property
    def code(self) -> int:
        """The exit code as a shell has it: 128 plus the signal, if it was one."""
        return self.status if self.status >= 0 else 128 - self.status

    @property
    def signal(self) -> str | None:
        """The name of the signal that ended it, as in SIGKILL."""
        return signal_name(-self.status) if self.status < 0 else None

    @property
    def lost_a_peer(self) -> bool:
        """Whether it only reports the failure of another rank."""
        return self.status > 0 and reports_a_lost_peer(self.stderr_tail)

    @property
    def name(self) -> str:
        """As text: rank 2 on host b (pid 77)."""
        where = f" on host {self.hostname}" if self.hostname else ""
        return f"rank {self.rank}{where} (pid {self.pid})"

    @property
    def how(self) -> str:
        """As text: exit code 3, or SIGKILL."""
        if self.ended_by_launcher:
            return f"ended by the launcher ({self.signal or f'exit code {self.code}'})"
        also = ", for the loss of a peer" if self.lost_a_peer else ""
        why = f", {self.why}" if self.why else ""
        return f"{self.signal or f'exit code {self.status}'}{also}{why}"

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {
            "rank": self.rank,
            **({"host": self.hostname} if self.hostname else {}),
            "pid": self.pid,
            "exit_code": self.status if self.status >= 0 else None,
            "signal": self.signal,
            "why": self.why or None,
            "seconds": round(self.seconds, 6),
            "ended_by_launcher": self.ended_by_launcher,
            "lost_a_peer": self.lost_a_peer,
        }


@dataclass(frozen=True)
class Outcome:
    """How a job ended. `stop_request` is the signal that stopped the launcher, if any.

    It has the time of the signal, too: ranks that failed before it are failures; those
    that ended after it ended because of it.
    """

    ranks: Sequence[RankEnd]
    seconds: float
    stop_request: tuple[float, signal.Signals] | None = None

    @property
    def first_failure(self) -> RankEnd | None:
        """The earliest failure that is not a consequence of another."""
        until = self.stop_request[0] if self.stop_request else self.seconds
        failed = [
            end
            for end in self.ranks
            if end.status and not end.ended_by_launcher and end.seconds <= until
        ]
        return min(failed, key=lambda e: (e.lost_a_peer, e.seconds), default=None)

    @property
    def first_to_leave(self) -> RankEnd | None:
        """The rank that ended without an error while others needed it, if that is why.

        All failures are then the loss of a peer, and it ended before them.
        """
        first = self.first_failure
        if first is None or not first.lost_a_peer:
            return None
        left = [end for end in self.ranks if not end.status]
        left = [end for end in left if end.seconds <= first.seconds]
        return min(left, key=lambda end: end.seconds, default=None)

    @property
    def exit_code(self) -> int:
        """That of the first failure; 130 after Ctrl-C; 0 if all succeeded.

        After SIGTERM it is that of the first rank that ended.
        """
        first = self.first_failure
        if first is not None:
            return first.code
        if self.stop_request and (
            self.stop_request[1] == signal.SIGINT or not self.ranks
        ):
            return 128 + self.stop_request[1]
        bad = [end for end in self.ranks if end.status]
        bad.sort(key=lambda end: (end.ended_by_launcher, end.seconds))
        return bad[0].code if bad else 0

    def report(self) -> str:
        """The first failure with the end of its stderr, or the signal, or nothing."""
        first = self.first_failure
        if first is None:
            return f"ended by {self.stop_request[1].name}" if self.stop_request else ""
        lines = []
        left = self.first_to_leave
        if left is not None:
            lines.append(
                f"{left.name} left first, after {left.seconds:.1f} s: exit code 0, "
                "while others still called collectives"
            )
        order = "first" if left is None else "then"
        lines.append(
            f"{first.name} failed {order}, after {first.seconds:.1f} s: {first.how}"
        )
        others = _grouped(end for end in self.ranks if end.status and end != first)
        if others:
            lines.append(f"after it: {others}")
        return "\n".join([*lines, first.stderr_tail]).rstrip("\n")

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        first = self.first_failure
        failure, left = None, self.first_to_leave
        if first is not None:
            failure = {**first.as_dict(), "traceback": first.stderr_tail}
        return {
            "exit_code": self.exit_code,
            "seconds": round(self.seconds, 6),
            "interrupted": self.stop_request[1].name if self.stop_request else None,
            "first_failure": failure,
            "first_to_leave": left.as_dict() if left is not None else None,
            "ranks": [end.as_dict() for end in self.ranks],
        }


def _grouped(ends: Iterable[RankEnd]) -> str:
    """Ranks by how they ended, in order: ranks 0, 3..9 exit code 1; rank 2 SIGKILL."""
    groups: dict[str, list[int]] = {}
    for end in ends:
        groups.setdefault(end.how, []).append(end.rank)
    return "; ".join(
        f"rank{'s' if len(ranks) > 1 else ''} {format_ranks(ranks)} {how}"
        for how, ranks in groups.items()
    )
