"""How many lanes and I/O threads a rank has."""

import pytest

from unisono.errors import BadArgument
from unisono.transports.lanes import (
    IO_LEAST,
    IO_THREADS,
    LANES,
    choose_lanes,
)
from unisono.transports.rank_table import RankEntry, RankTable

VARIABLES = LANES, IO_THREADS, IO_LEAST


@pytest.fixture(autouse=True)
def _plain(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("cores", "ranks", "lanes", "threads"),
    [
        (2, 2, 1, 0),
        (2, 4, 1, 0),
        (1, 1, 1, 0),
        (2, 1, 2, 3),
        (16, 8, 2, 3),
        (12, 4, 2, 3),
        (16, 4, 2, 3),
        (64, 1, 2, 3),
    ],
)
def test_threads_take_cores_that_no_rank_needs(cores, ranks, lanes, threads):
    found = choose_lanes(cores, ranks)
    assert (found.lanes, found.io_threads) == (lanes, threads)


def test_with_few_cores_to_spare_one_thread_receives_what_is_added_up(monkeypatch):
    none, few, many = (choose_lanes(cores, 4) for cores in (4, 12, 16))
    assert [each.adders for each in (none, few, many)] == [0, 1, 3]
    assert "3 I/O threads (1 for sums): 12 cores" in str(few)
    assert "3 I/O threads: 16 cores" in str(many)
    monkeypatch.setenv(IO_THREADS, "3")
    assert choose_lanes(2, 2).adders == 3


def test_environment_decides(monkeypatch):
    monkeypatch.setenv(LANES, "5")
    monkeypatch.setenv(IO_THREADS, "0")
    found = choose_lanes(64, 1)
    assert (found.lanes, found.io_threads) == (5, 0)
    assert found.why == f"{LANES}=5 and {IO_THREADS}=0"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (LANES, "0"),
        (LANES, "65"),
        (IO_THREADS, "17"),
        (IO_THREADS, "x"),
        (IO_LEAST, "0"),
    ],
)
def test_wrong_numbers_are_refused(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(BadArgument, match=f"{name}={value}: expected a number from"):
        choose_lanes(4, 2)


def test_emulated_hosts_share_their_machine():
    identities = ["a/boot1/0/p/n", "b/c/boot1/0/p/n", "/boot2/0/p/n", "a/boot1/7/q/m"]
    entries = [
        RankEntry(rank, 1, "", identity, 8, "")
        for rank, identity in enumerate(identities)
    ]
    table = RankTable(1, tuple(entries), None, {}, "")
    assert table.sharing_machine() == 3
