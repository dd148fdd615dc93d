"""`unisono top`: a job that runs, looked at while it runs."""

from __future__ import annotations

import os
import time

from rich.console import Console
from rich.live import Live
from rich.table import Table

from unisono.cli.output import print_json, seconds_of
from unisono.errors import BadArgument
from unisono.trace import ask
from unisono.trace.live import Glance, Row, look
from unisono.units import format_bandwidth, format_bytes, format_seconds


def top(
    pid: str = "", /, *, every: str = "1", once: bool = False, json: bool = False
) -> int:
    """Where the ranks of a job are: calls, who is behind, how much is sent.

    Only asks: nothing of the job is changed. A rank can be asked if unisono run has
    started it, or if UNISONO_WATCH=1 was set. It ends by Ctrl-C, or with the job.

    Example: unisono top

    Parameters
    ----------
    pid
        A process of the job, or its launcher, if several run.
    every
        Seconds between two looks.
    once
        Look twice, for the rates, print that, and end.
    json
        Print what was seen as one JSON object; implies --once.
    """
    seconds = seconds_of("--every", every, zero=False)
    if pid and not (pid.isascii() and pid.isdigit()):
        raise BadArgument(f"top {pid}: expected the number of a process")
    doors = ask.one_job(int(pid) if pid else None)
    glance = look(doors)
    if once or json:
        time.sleep(min(seconds, 0.2))
        glance = look(doors, glance)
        if json:
            print_json(glance.as_dict())
        else:
            _console().print(drawn(glance))
        return 0
    with Live(drawn(glance), console=_console(), auto_refresh=False) as live:
        while any(os.path.exists(f"/proc/{door.pid}") for door in doors):
            time.sleep(seconds)
            glance = look(doors, glance)
            live.update(drawn(glance), refresh=True)
    return 0


def _console() -> Console:
    return Console(highlight=False)


def drawn(glance: Glance) -> Table:
    """The table; who is late is marked by a word, not by a colour alone."""
    late = glance.late
    names = {row.rank for row in glance.rows}
    told = f"{len(names)} of {glance.world_size} ranks"
    if late:
        told += f"; others wait for rank {', '.join(map(str, late))}"
    table = Table(title=told, title_justify="left")
    for head in ("rank", "pid", "group", "call", "behind", "sent", "rate", "doing"):
        table.add_column(head, justify="left" if head == "doing" else "right")
    for row in glance.rows:
        style = "bold" if row.rank in late else ""
        table.add_row(*_cells(row, late=row.rank in late), style=style)
    return table


def _cells(row: Row, *, late: bool) -> list[str]:
    since = f", {format_seconds(row.seconds)}" if row.seconds else ""
    return [
        str(row.rank),
        str(row.pid),
        row.group,
        str(row.seq),
        f"{row.behind} late" if late and row.behind else str(row.behind or ""),
        format_bytes(row.sent),
        "" if row.rate is None else format_bandwidth(row.rate),
        f"{row.doing}{since}",
    ]
