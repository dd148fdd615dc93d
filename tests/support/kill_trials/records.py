"""Trials and their outcomes, as they travel between processes."""

from __future__ import annotations

import msgspec


class Trial(msgspec.Struct, frozen=True):
    """One trial: ranks run a program until the victim is killed or stopped.

    With a `failpoint` that happens inside the victim's native core, at the `hit`-th
    pass; if the program does not pass it within `failpoint_timeout_s` seconds, or if
    none is given, it happens from outside, `after_s` seconds after all ranks have
    begun. `action` is "kill" or "stop"; a stopped rank continues when the others have
    reported. With `hold` the victim is stopped at its failpoint and killed there from
    outside, so that the time of its death is known.

    `hosts` are the numbers of ranks on each of several emulated hosts: shared memory
    within a host, TCP over loopback between hosts. Without it all ranks are on one.

    With `io_threads` every rank has so many, and two lanes, for messages of any size.

    With the action "delay" no rank is lost: all ranks run `rounds` rounds, and sleep
    briefly at failpoints that `seed` draws, so that they get out of step.
    """

    n: int
    victim: int
    program: str
    count: int = 1000
    algorithm: str | None = None
    shared: bool = False
    hosts: tuple[int, ...] = ()
    io_threads: int = 0
    failpoint: str = ""
    hit: int = 1
    failpoint_timeout_s: float = 0.25
    after_s: float = 0.005
    action: str = "kill"
    hold: bool = False
    rounds: int = 0
    seed: int = 0
    close_on_error: bool = False
    timeout_s: float = 60.0
    late_s: float = 5.0
    limit_s: float = 90.0

    @property
    def host_of_rank(self) -> tuple[int, ...]:
        """The number of each rank's host; empty if there is only one."""
        return tuple(h for h, ranks in enumerate(self.hosts) for _ in range(ranks))


class RankOutcome(msgspec.Struct):
    """How one rank ended: `error` is the class of its exception, "" for none.

    `members` are the world ranks of the communicator that it was using; `raised_at` is
    the time of the exception on the monotonic clock.
    """

    rank: int
    error: str = ""
    message: str = ""
    ranks: list[int] = []
    pids: list[int] = []
    host: str = ""
    collective: str = ""
    seq: int = 0
    members: list[int] = []
    rounds: int = 0
    raised_at: float = 0.0


class TrialReport(msgspec.Struct):
    """The result of a trial; `problems` is empty if all guarantees held.

    `detection_s` has, for each survivor, the time from the death to its error: from
    when the kill was sent, which is exact, or from the victim's last heartbeat.
    """

    trial: Trial
    problems: list[str] = []
    passed_failpoint: bool = False
    exact: bool = True
    pids: list[int] = []
    outcomes: list[RankOutcome] = []
    detection_s: list[float] = []
    stderr: str = ""
    seconds: float = 0.0
