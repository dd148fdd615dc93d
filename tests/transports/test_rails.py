"""Several network cards of a host: which they are, and which lead where."""

import logging

import pytest

from unisono.errors import BadArgument, ConnectFailed, PeerLost
from unisono.transports import addresses
from unisono.transports.addresses import Address, Rail, choose
from unisono.transports.rails import Rails, joined

HERE = {
    "lo": ["127.0.0.1"],
    "eth0": ["10.0.0.1"],
    "eth1": ["10.1.0.1", "fe80::1%eth1"],
    "eth2": ["fe80::2%eth2"],
}
MINE = (Rail("10.0.0.1", "eth0"), Rail("10.1.0.1", "eth1"))
FIRST, SECOND = Address("10.0.0.2", 5), Address("10.1.0.2", 5)


@pytest.fixture(autouse=True)
def _cards(monkeypatch):
    monkeypatch.setattr(addresses, "interfaces", lambda: HERE)


@pytest.mark.parametrize("text", ["eth0,eth1", " eth0 , 10.1.0.0/16,", "10.0.0.1,eth1"])
def test_several_names_are_rails_in_their_order(text):
    found = choose(text)
    assert found.rails == MINE
    assert (found.host, found.others) == ("10.0.0.1", ("10.1.0.1",))
    assert "names it first, of 2" in str(found)


def test_one_name_is_no_rail():
    assert choose("eth1").rails == ()
    assert choose("eth1,").rails == ()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("eth0,eth0", "named twice"),
        ("eth0,eth2", "link-local"),
        ("eth0,lo", "loopback"),
        ("eth0,0.0.0.0", "means all"),
        ("eth0,eth9", "no interface"),
        (",".join(["eth0"] * 9), "1 to 8"),
        (",", "1 to 8"),
    ],
)
def test_impossible_rails_are_refused(text, words):
    with pytest.raises(BadArgument, match=words):
        choose(text)


def test_rails_are_joined_by_the_routes_of_the_kernel():
    leaves = {FIRST: "10.0.0.1", SECOND: "10.1.0.1"}
    for theirs in ([FIRST, SECOND], [SECOND, FIRST]):
        found = joined(MINE, theirs, leaves.__getitem__)
        assert [(p.rail, p.to) for p in found] == [(MINE[0], FIRST), (MINE[1], SECOND)]
        assert [p.source.card for p in found] == ["", ""]


def test_rails_of_one_network_are_bound_to_their_cards():
    found = joined(MINE, [FIRST, SECOND], lambda to: "10.0.0.1")
    assert [(p.to, p.source.host, p.source.card) for p in found] == [
        (FIRST, "10.0.0.1", ""),
        (SECOND, "10.1.0.1", "eth1"),
    ]


@pytest.mark.parametrize("theirs", [[], [FIRST]])
def test_one_rail_is_not_spread(theirs):
    assert joined(MINE, theirs, lambda to: "10.0.0.1") == ()


class Listening:
    """A listener that reaches a rank at some addresses only."""

    def __init__(self, *, fails=(), error=ConnectFailed):
        self.fails, self.error, self.made = fails, error, []

    def connect(self, peer, purpose, timeout_s, lost, *, over=None):
        self.made.append(over and over.to)
        if over and over.to in self.fails:
            raise self.error(f"no way to {over.to}")
        return over and over.to


def rails(monkeypatch, listening):
    leaves = {FIRST: "10.0.0.1", SECOND: "10.1.0.1"}
    monkeypatch.setattr(
        "unisono.transports.rails.joined",
        lambda mine, theirs: joined(mine, theirs, leaves.__getitem__),
    )
    return Rails(listening, MINE, [(), (FIRST, SECOND), (FIRST,)])


def test_lanes_take_the_rails_in_turn(monkeypatch):
    made = rails(monkeypatch, Listening())
    assert made.count(1) == 2
    assert [made.connect(1, None, lane, 9, str) for lane in range(4)] == [
        *(FIRST, SECOND, FIRST, SECOND)
    ]
    assert "over 10.0.0.1 on eth0, 10.1.0.1 on eth1" in str(made)
    assert "not" not in str(made)


def test_rank_with_one_card_is_reached_as_ever(monkeypatch):
    made = rails(monkeypatch, Listening())
    assert made.count(2) == 1
    assert made.connect(2, None, 0, 9, str) is None
    assert "1 to rank 2: it names 1 of its own" in str(made)


def test_rail_that_leads_nowhere_is_left_out_and_named(monkeypatch, caplog):
    listening = Listening(fails=[SECOND])
    made = rails(monkeypatch, listening)
    with caplog.at_level(logging.WARNING, "unisono"):
        assert made.connect(1, None, 1, 9, str) is None
        assert made.connect(1, None, 1, 9, str) is None
    assert listening.made == [SECOND, None, None]
    (record,) = caplog.records
    assert "10.1.0.1 on eth1 is not used towards rank 1" in record.getMessage()
    assert "not 10.1.0.1 on eth1 to rank 1: no way to 10.1.0.2:5" in str(made)


def test_dead_rank_is_no_fault_of_a_rail(monkeypatch):
    listening = Listening(fails=[FIRST], error=lambda text: PeerLost(text, ranks=[1]))
    made = rails(monkeypatch, listening)
    with pytest.raises(PeerLost):
        made.connect(1, None, 0, 9, str)
    assert listening.made == [FIRST]
