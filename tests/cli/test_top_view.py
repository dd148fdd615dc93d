"""What `unisono top` draws, for however many ranks and lines there are."""

import io

import pytest
from rich.console import Console

from unisono.cli.top import drawn
from unisono.trace.links import HostPair, LinkTraffic, TrafficTable
from unisono.trace.live import RankStatus, Snapshot


def glance_at(ranks, hosts):
    """All ranks send to all; the last one is late."""
    last = ranks - 1
    rows = [
        RankStatus(
            *(rank, 1000 + rank, "world", 9 + (rank < last), int(rank == last)),
            *("after a call" if rank == last else f"in {'x' * 200}", 0.1, 10**9, 2e6),
        )
        for rank in range(ranks)
    ]
    pairs = [(a, b) for a in range(ranks) for b in range(ranks) if a != b]
    links = [
        LinkTraffic(a, b, a * hosts // ranks == b * hosts // ranks, 10**9, 3e6 - 9 * i)
        for i, (a, b) in enumerate(pairs)
    ]
    names = [f"h{i}" for i in range(hosts)]
    between = [HostPair(a, b, 9, 10**9, 2e6) for a in names for b in names]
    seen = TrafficTable(tuple(links), tuple(between), guessed=1, missing=(0, 1))
    return Snapshot(0.0, "job", ranks, tuple(rows), seen)


def shown(glance, width, height=None):
    file = io.StringIO()
    console = Console(file=file, width=width, height=height or 25, highlight=False)
    console.print(drawn(glance, height))
    return file.getvalue().splitlines()


@pytest.mark.parametrize(
    ("ranks", "hosts", "height"),
    [(2, 1, 24), (4, 1, 40), (4, 2, 24), (16, 1, 24), (64, 8, 24), (64, 8, 50)],
)
def test_top_view_fits_the_terminal(ranks, hosts, height):
    """Who is late is there, and the busiest link, however many ranks there are."""
    lines = shown(glance_at(ranks, hosts), 100, height)
    assert len(lines) <= height
    last = [line.split() for line in lines if line.split()[:1] == [str(ranks - 1)]]
    assert any("late" in words for words in last)
    assert any(line.split()[:4] == ["0", "1", "3", "MB/s"] for line in lines)
    summed = [line for line in lines if line.split()[:2] == ["h0", "h0"]]
    assert len(summed) == (hosts > 1 or ranks > 4)


def test_top_view_without_a_limit_shows_everything():
    glance = glance_at(16, 2)
    lines = shown(glance, 300)
    assert sum(line.rstrip().endswith("near") for line in lines) == 2 * 8 * 7
    assert sum(line.rstrip().endswith("between hosts") for line in lines) == 2 * 8 * 8
    assert not any("more" in line.split() and "and" in line.split() for line in lines)


def test_top_reports_unknown_destinations():
    result = " ".join(shown(glance_at(2, 1), 300))
    assert "The destinations of these ranks are not known: 0, 1" in result
    assert "The destinations of 1 B are estimated from other calls" in result
