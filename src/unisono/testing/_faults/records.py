"""What is asked for and what was seen, as it travels between processes."""

from __future__ import annotations

import msgspec


class Trial(msgspec.Struct, frozen=True):
    """One experiment: ranks run a program until something befalls the victim.

    With a `failpoint` that happens inside the victim's native core, at its `hit`-th
    passage; if the program does not pass there for `patience_s` seconds, or if none is
    given, it comes from outside, `after_s` seconds after all ranks have begun. `action`
    is "kill" or "stop"; who is stopped goes on when the others have told what they saw.
    With `hold` the victim is stopped at its failpoint and killed there from outside, so
    that the time of its death is known.

    `hosts` are the numbers of ranks on each of several hosts, which are pretended:
    shared memory within them, streams over loopback between them. Without it all ranks
    are on one.

    With the action "dawdle" nobody is struck: all ranks run `rounds` rounds, and sleep
    for moments at failpoints that `seed` decides, so that they get out of step.
    """

    n: int
    victim: int
    program: str
    count: int = 1000
    algorithm: str | None = None
    shared: bool = False
    hosts: tuple[int, ...] = ()
    failpoint: str = ""
    hit: int = 1
    patience_s: float = 0.25
    after_s: float = 0.005
    action: str = "kill"
    hold: bool = False
    rounds: int = 0
    seed: int = 0
    leave_at_once: bool = False
    timeout_s: float = 60.0
    late_s: float = 5.0
    limit_s: float = 90.0

    @property
    def places(self) -> tuple[int, ...]:
        """The host of each rank, by number; empty if there is but one."""
        return tuple(h for h, ranks in enumerate(self.hosts) for _ in range(ranks))


class Seen(msgspec.Struct):
    """How one rank ended: `error` is the class of what it raised, "" for nothing.

    `members` are the world's ranks of the communicator that it was using, `at` is when
    it raised, on the monotonic clock.
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
    calls: int = 0
    at: float = 0.0


class Report(msgspec.Struct):
    """What came of a trial; `problems` is empty if all went as promised.

    `detection_s` has, for each survivor, the time from the death to its error: from
    when the kill was sent, which is exact, or from the victim's last sign of life.
    """

    trial: Trial
    problems: list[str] = []
    passed_failpoint: bool = False
    exact: bool = True
    pids: list[int] = []
    seen: list[Seen] = []
    detection_s: list[float] = []
    stderr: str = ""
    seconds: float = 0.0
