"""How many connections and threads carry the data from one rank to others.

A stream between hosts has one or more lanes, connections that share its messages. A
rank with cores to spare has I/O threads, which receive, check and add up large messages
while the calling thread sends; with three or more of them, one sends as well. A thread
works on a lane at a time, so there are two lanes where several threads receive. Ranks
may differ in both numbers: the one that opens a stream says how many lanes it has.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from unisono.errors import BadArgument

LANES = "UNISONO_LANES"
"""How many connections carry one stream."""
IO_THREADS = "UNISONO_IO_THREADS"
"""How many threads of a rank move data between hosts, beside the calling one."""

IO_LEAST = "UNISONO_IO_LEAST"
"""How many bytes a message has at least that these threads move."""

MOST_LANES = 64
MOST_IO_THREADS = 16
_LEAST_BYTES = 512 << 10


@dataclass(frozen=True)
class Lanes:
    """What one rank uses, and why."""

    lanes: int = 1
    io_threads: int = 0
    why: str = ""
    least_bytes: int = _LEAST_BYTES
    """A smaller message is left to the calling thread."""
    adders: int = MOST_IO_THREADS
    """How many of these threads have work in a call that adds up."""

    def __str__(self) -> str:
        """As `explain` shows it."""
        few = f" ({self.adders} for sums)" if self.adders < self.io_threads else ""
        return (
            f"{_counted(self.lanes, 'connection')} to each rank that is sent to, "
            f"{_counted(self.io_threads, 'I/O thread')}{few}: {self.why}"
        )


def choose_lanes(cores: int, ranks: int) -> Lanes:
    """By the environment; otherwise by the cores that this machine has for each rank.

    `cores` are those that this process may run on, `ranks` those of the job that run on
    this machine. Of its share a rank keeps one for the calling thread.
    """
    spare = cores // max(1, ranks) - 1
    # Of few cores what is copied gains most by several threads that share one, what is
    # added up by a single one that receives while the calling thread sends.
    useful = 3 if spare >= 1 else 0
    threads = number(IO_THREADS, useful, MOST_IO_THREADS, 0)
    lanes = number(LANES, 2 if threads > 1 else 1, MOST_LANES)
    given = [each for each in (LANES, IO_THREADS) if os.environ.get(each)]
    why = f"{_counted(cores, 'core')} for {_counted(ranks, 'rank')} of this machine"
    if given:
        why = " and ".join(f"{each}={os.environ[each]}" for each in given)
    least = number(IO_LEAST, _LEAST_BYTES, 1 << 40)
    adders = threads if spare >= 3 or IO_THREADS in given else min(threads, 1)
    return Lanes(lanes, threads, why, least, adders)


def number(variable: str, usual: int, most: int, least: int = 1) -> int:
    """A whole number from the environment."""
    value = os.environ.get(variable, "")
    if not value:
        return usual
    if not value.isdecimal() or not least <= int(value) <= most:
        raise BadArgument(
            f"{variable}={value}: expected a number from {least} to {most}"
        )
    return int(value)


def _counted(count: int, what: str) -> str:
    return f"{count or 'no'} {what}{'' if count == 1 else 's'}"
