"""How a job ended: which rank failed first, and the exit code to keep.

First is the earliest rank that was killed or raised an error of its own. Those which
raised PeerLost come after it even if they ended earlier: they tell of its end. Ranks
that the launcher had to end are no failures at all.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from unisono.launch.output import reports_a_lost_peer
from unisono.launch.processes import signal_name


@dataclass(frozen=True)
class RankEnd:
    """How one rank ended, so many seconds after the job began.

    `status` is an exit code, or a signal's number with a minus sign. `words` are the
    last of its stderr: the traceback if there is one. `where` is the host it ran
    on, if the job was started on hosts by name.
    """

    rank: int
    pid: int
    status: int
    seconds: float
    ended_by_launcher: bool = False
    words: str = field(default="", repr=False)
    where: str = ""

    @property
    def code(self) -> int:
        """What a shell would call it: 128 more than the signal, if it was one."""
        return self.status if self.status >= 0 else 128 - self.status

    @property
    def signal(self) -> str | None:
        """The signal that ended it, as SIGKILL."""
        return signal_name(-self.status) if self.status < 0 else None

    @property
    def lost_a_peer(self) -> bool:
        """Whether it merely reports the end of another rank."""
        return self.status > 0 and reports_a_lost_peer(self.words)

    @property
    def how(self) -> str:
        """In words: exit code 3, or SIGKILL."""
        if self.ended_by_launcher:
            return f"ended by the launcher ({self.signal or f'exit code {self.code}'})"
        also = ", for the loss of a peer" if self.lost_a_peer else ""
        return self.signal or f"exit code {self.status}{also}"

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {
            "rank": self.rank,
            **({"host": self.where} if self.where else {}),
            "pid": self.pid,
            "exit_code": self.status if self.status >= 0 else None,
            "signal": self.signal,
            "seconds": round(self.seconds, 6),
            "ended_by_launcher": self.ended_by_launcher,
            "lost_a_peer": self.lost_a_peer,
        }


@dataclass(frozen=True)
class Outcome:
    """How a job ended. `asked` is the signal that asked the launcher to end, if any.

    It holds the time it came at, too: what failed before it is a failure; what ended
    after it ended because of it.
    """

    ranks: Sequence[RankEnd]
    seconds: float
    asked: tuple[float, signal.Signals] | None = None

    @property
    def first_failure(self) -> RankEnd | None:
        """The failure that is not merely a consequence."""
        until = self.asked[0] if self.asked else self.seconds
        failed = [
            end
            for end in self.ranks
            if end.status and not end.ended_by_launcher and end.seconds <= until
        ]
        return min(failed, key=lambda e: (e.lost_a_peer, e.seconds), default=None)

    @property
    def exit_code(self) -> int:
        """That of the first failure; 130 after Ctrl-C; 0 if all is well.

        When SIGTERM asked for the end, it is what the first rank made of it.
        """
        first = self.first_failure
        if first is not None:
            return first.code
        if self.asked and (self.asked[1] == signal.SIGINT or not self.ranks):
            return 128 + self.asked[1]
        bad = [end for end in self.ranks if end.status]
        bad.sort(key=lambda end: (end.ended_by_launcher, end.seconds))
        return bad[0].code if bad else 0

    def report(self) -> str:
        """The first failure with its last words, or why it ended early, or nothing."""
        first = self.first_failure
        if first is None:
            return f"ended by {self.asked[1].name}" if self.asked else ""
        where = f" on host {first.where}" if first.where else ""
        lines = [
            f"rank {first.rank}{where} (pid {first.pid}) failed first, after "
            f"{first.seconds:.1f} s: {first.how}"
        ]
        others = _together(end for end in self.ranks if end.status and end != first)
        if others:
            lines.append(f"after it: {others}")
        return "\n".join([*lines, first.words]).rstrip("\n")

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        first = self.first_failure
        told = None if first is None else {**first.as_dict(), "traceback": first.words}
        return {
            "exit_code": self.exit_code,
            "seconds": round(self.seconds, 6),
            "interrupted": self.asked[1].name if self.asked else None,
            "first_failure": told,
            "ranks": [end.as_dict() for end in self.ranks],
        }


def _together(ends: Iterable[RankEnd]) -> str:
    """Ranks that ended alike in one breath: ranks 0, 3..9 exit code 1; rank 2 SIGKILL.

    They come in the order of their numbers.
    """
    alike: dict[str, list[int]] = {}
    for end in ends:
        alike.setdefault(end.how, []).append(end.rank)
    return "; ".join(
        f"rank{'s' if len(ranks) > 1 else ''} {_ranges(ranks)} {how}"
        for how, ranks in alike.items()
    )


def _ranges(numbers: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(
        ", ".join(map(str, run)) if len(run) < 3 else f"{run[0]}..{run[-1]}"
        for run in runs
    )
