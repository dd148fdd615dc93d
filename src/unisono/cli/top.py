"""`unisono top`: a live view of a running job."""

from __future__ import annotations

import os
import sys
import threading
import time
import webbrowser
from collections.abc import Sequence
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from unisono.cli.output import print_json, seconds_of
from unisono.errors import BadArgument
from unisono.trace import ask
from unisono.trace.links import HostPair, LinkTraffic
from unisono.trace.live import RankStatus, Snapshot, look
from unisono.units import format_bandwidth, format_bytes, format_seconds
from unisono.view.server import LOOPBACK
from unisono.view.top_page import TopPage

NOTES = 3
"""Lines below the tables, for notes."""
FRAME = 3
"""Lines of a table besides its rows: its title, its head, and what was left out."""
_LAST_S = 2.0
"""How much longer than an update a page may take to ask once more, at the end."""


def top(
    pid: str = "",
    /,
    *,
    every: Annotated[str, Parameter(metavar="SECONDS")] = "1",
    once: bool = False,
    web: bool = False,
    port: int = 0,
    listen: str = "",
    open_: Annotated[bool, Parameter(name="--open")] = False,
    json: bool = False,
) -> int:
    """Where the ranks of a job are: calls, which are late, traffic by link.

    Only asks: nothing of the job is changed. A rank can be asked if unisono run has
    started it, or if UNISONO_MONITOR=1 was set. It ends by Ctrl-C, or with the job.
    --web serves the same as a page, on loopback.

    Example: unisono top

    Parameters
    ----------
    pid
        A process of the job, or its launcher, if several run.
    every
        Seconds between two updates.
    once
        Look twice, for the rates, print that, and end.
    web
        Serve a page that shows it, to who has the address with its token.
    port
        Where to listen, with --web; 0 is any port that is free.
    listen
        An address of this machine to listen at, with --web, instead of 127.0.0.1.
    open_
        Open the page in the default browser, with --web.
    json
        Print what was seen as one JSON object; implies --once. With --web, print the
        address.
    """
    seconds = seconds_of("--every", every, zero=False)
    _check(web=web, once=once, only_web={"port": port, "listen": listen, "open": open_})
    if pid and not (pid.isascii() and pid.isdigit()):
        raise BadArgument(f"top {pid}: expected the number of a process")
    sockets = ask.one_job(int(pid) if pid else None)
    if web:
        page = {"every": seconds, "port": port, "listen": listen or LOOPBACK}
        return _serve(sockets, page, opened=open_, json=json)
    snapshot = look(sockets)
    if once or json:
        time.sleep(min(seconds, 0.2))
        snapshot = look(sockets, snapshot)
        if json:
            print_json(snapshot.as_dict())
        else:
            _console().print(drawn(snapshot))
        return 0
    console = _console()
    first = drawn(snapshot, console.height)
    with Live(first, console=console, auto_refresh=False) as live:
        while _runs(sockets):
            time.sleep(seconds)
            snapshot = look(sockets, snapshot)
            live.update(drawn(snapshot, console.height), refresh=True)
    return 0


def _check(*, web: bool, once: bool, only_web: dict[str, object]) -> None:
    """Refuse options that do not go together."""
    given = [f"--{name}" for name, value in only_web.items() if value]
    if given and not web:
        raise BadArgument(f"top {given[0]}: only with --web")
    if once and web:
        raise BadArgument("top --once --web: a page goes on; leave one of them out")


def _runs(sockets: Sequence[ask.MonitorSocket]) -> bool:
    return any(os.path.exists(f"/proc/{socket.pid}") for socket in sockets)


def _serve(
    sockets: Sequence[ask.MonitorSocket],
    page: dict[str, Any],
    *,
    opened: bool,
    json: bool,
) -> int:
    """Serve the page until Ctrl-C, or until the job has ended."""
    last: Snapshot | None = None

    def seen() -> dict[str, object] | None:
        nonlocal last
        if not _runs(sockets):
            return None
        last = look(sockets, last)
        return last.as_dict()

    with TopPage(seen, **page) as server:
        if not server.ip.is_loopback:
            print(
                f"top: {server.ip} is not encrypted: who reads the network sees the "
                "token and the page; `ssh -L` needs no other address than 127.0.0.1",
                file=sys.stderr,
            )
        if json:
            print_json({"address": server.address})
        else:
            print(f"top: {server.address} (Ctrl-C ends it)", flush=True)
        if opened:
            webbrowser.open(server.address)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            while _runs(sockets):
                time.sleep(min(page["every"], 0.5))
            server.told.wait(page["every"] + _LAST_S)
        except KeyboardInterrupt:
            return 0
        finally:
            server.shutdown()
        if not json:
            print("top: the job has ended")
    return 0


def _console() -> Console:
    return Console(highlight=False)


def drawn(snapshot: Snapshot, height: int | None = None) -> Group:
    """The tables, in so many lines; None for as many as it takes."""
    links, hosts = snapshot.traffic.links, snapshot.traffic.hosts
    if height is None:
        shown = len(snapshot.rows), len(links), len(hosts)
    else:
        shown = lines_for(height, len(snapshot.rows), len(links), len(hosts))
    ranks = _ranks(snapshot, shown[0], in_one_line=height is not None)
    parts: list[RenderableType] = [ranks, _links(links, shown[1])]
    if len(hosts) > 1 or shown[1] < len(links):
        parts.append(_hosts(hosts, shown[2]))
    if snapshot.traffic.missing:
        missing = ", ".join(map(str, snapshot.traffic.missing))
        parts.append(f"The destinations of these ranks are not known: {missing}")
    if snapshot.traffic.guessed:
        amount = format_bytes(snapshot.traffic.guessed)
        parts.append(
            f"The destinations of {amount} are estimated from other calls: there were "
            "too many since the last update. Update more often with --every."
        )
    return Group(*parts)


def lines_for(height: int, ranks: int, links: int, hosts: int) -> tuple[int, int, int]:
    """How many rows of each table fit, with their frames; two at least of each."""
    room = height - 3 * FRAME - NOTES
    few = min(hosts, max(2, room // 6))
    half = min(links, max(2, (room - few) // 2))
    some = min(ranks, max(2, room - few - half))
    more = min(links, max(half, room - few - some))
    return some, more, min(hosts, max(few, room - some - more))


def _ranks(snapshot: Snapshot, shown: int, *, in_one_line: bool) -> Table:
    """Where each rank is; a late rank is marked by a word, not by a colour alone."""
    late = snapshot.late
    names = {row.rank for row in snapshot.rows}
    title = f"{len(names)} of {snapshot.world_size} ranks"
    if late:
        title += f"; others wait for rank {', '.join(map(str, late))}"
    table = _table(title, len(snapshot.rows), shown)
    for head in (
        "rank",
        "pid",
        "group",
        "call",
        "/s",
        "behind",
        "sent",
        "rate",
        "doing",
    ):
        last = head == "doing"  # the one that gives way
        table.add_column(head, justify="left" if last else "right", no_wrap=not last)
    # Those that others wait for are not to be cut off.
    chosen = sorted(snapshot.rows, key=lambda row: row.rank not in late)[:shown]
    for row in (row for row in snapshot.rows if row in chosen):
        style = "bold" if row.rank in late else ""
        *cells, doing = _cells(row, late=row.rank in late)
        text = Text(doing, no_wrap=in_one_line, overflow="ellipsis")
        table.add_row(*cells, text, style=style)
    return table


def _links(links: Sequence[LinkTraffic], shown: int) -> Table:
    table = _table("links, the busiest first", len(links), shown)
    for head in ("from", "to", "rate", "sent", "where"):
        table.add_column(head, justify="left" if head == "where" else "right")
    for link in links[:shown]:
        where = "near" if link.near else "between hosts"
        table.add_row(str(link.src), str(link.dst), *_amounts(link), where)
    return table


def _hosts(hosts: Sequence[HostPair], shown: int) -> Table:
    table = _table("hosts", len(hosts), shown)
    for head in ("from", "to", "rate", "sent", "links"):
        table.add_column(head, justify="right")
    for pair in hosts[:shown]:
        table.add_row(pair.src, pair.dst, *_amounts(pair), str(pair.links))
    return table


def _table(title: str, rows: int, shown: int) -> Table:
    left = rows - shown
    caption = f"and {left} more" if left > 0 else None
    return Table(
        title=title,
        title_justify="left",
        caption=caption,
        caption_justify="left",
        box=None,
    )


def _amounts(what: LinkTraffic | HostPair) -> tuple[str, str]:
    rate = "" if what.rate is None else format_bandwidth(what.rate)
    return rate, format_bytes(what.sent)


def _cells(row: RankStatus, *, late: bool) -> list[str]:
    since = f", {format_seconds(row.seconds)}" if row.seconds else ""
    return [
        str(row.rank),
        str(row.pid),
        row.group,
        str(row.seq),
        "" if row.calls_rate is None else f"{row.calls_rate:.4g}",
        f"{row.behind} late" if late and row.behind else str(row.behind or ""),
        format_bytes(row.sent),
        "" if row.rate is None else format_bandwidth(row.rate),
        f"{row.doing}{since}",
    ]
