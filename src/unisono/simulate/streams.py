"""Tasks on concurrent streams, with their start and end times.

Tasks of one stream run one after the other, in the order in which they are listed, and
may wait for tasks of other streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unisono.errors import BadArgument, unknown

STREAMS = ("compute", "tensor", "data")


@dataclass(frozen=True)
class Task:
    """Some seconds on a stream, after other tasks (by their place in the plan)."""

    name: str
    stream: str
    seconds: float
    after: tuple[int, ...] = ()


@dataclass(frozen=True)
class Ran:
    """A task with its times."""

    name: str
    stream: str
    start: float
    end: float


def run(tasks: Sequence[Task]) -> list[Ran]:
    """Give every task its time: when its stream is free and all it waits for is done.

    Tasks wait for earlier ones only, so one pass does it.
    """
    free = dict.fromkeys(STREAMS, 0.0)
    ran: list[Ran] = []
    for place, task in enumerate(tasks):
        if task.stream not in free:
            raise unknown("stream", task.stream, STREAMS)
        if any(not 0 <= other < place for other in task.after):
            raise BadArgument(f"task {task.name}: can only wait for earlier ones")
        start = max([free[task.stream], *(ran[other].end for other in task.after)])
        free[task.stream] = start + task.seconds
        ran.append(Ran(task.name, task.stream, start, free[task.stream]))
    return ran
