"""Which sockets go to which communicator: what is kept, what is refused, and closed."""

import socket

import pytest

from unisono import _native
from unisono.errors import Corrupted
from unisono.transports import streams
from unisono.transports.streams import StreamEnd, StreamLabel, Streams

KEY = bytes(16)


class Comm:
    """Takes what it is given, or as much as it is told to."""

    def __init__(self, taken=100):
        self.taken = taken
        self.got = []

    def attach(self, sends, rank, lane, lanes, wire, *_):
        if len(self.got) == self.taken:
            raise ValueError("attach: no such lane")
        self.got.append((rank, lane, lanes, wire))


@pytest.fixture
def sockets():
    """Pairs of them: the end that is handed over, and the one that sees it close."""
    made = []

    def pair():
        made.append(socket.socketpair())
        return made[-1]

    yield pair
    for ends in made:
        for end in ends:
            end.close()


@pytest.fixture
def mine():
    made = Streams(lambda *_: pytest.fail("nobody dials"))
    yield made
    made.close()


def end(here):
    """The end of a stream over this socket."""
    return StreamEnd(_native.SocketWire(here.detach()), KEY)


def is_closed(there):
    there.settimeout(20.0)
    return there.recv(1) == b""


def is_open(there):
    there.setblocking(False)
    with pytest.raises(BlockingIOError):
        there.recv(1)
    return True


@pytest.mark.parametrize(
    ("lane", "lanes"), [(5, 1), (1, 1), (0, 0), (0, 65), (3, 65535)]
)
@pytest.mark.parametrize("known", [True, False])
def test_impossible_lanes_are_refused(mine, sockets, lane, lanes, known):
    comm = Comm()
    if known:
        mine.join(7, comm, [0, 1])
    here, there = sockets()
    with pytest.raises(Corrupted, match=f"rank 1 has opened lane {lane} of {lanes}"):
        mine.arrived(1, StreamLabel(7, lane, lanes), end(here))
    assert is_closed(there)
    assert not comm.got


def test_stream_of_a_rank_outside_the_communicator_is_refused(mine, sockets):
    comm = Comm()
    early, late = sockets(), sockets()
    mine.arrived(5, StreamLabel(7), end(early[0]))
    mine.join(7, comm, [0, 1])
    with pytest.raises(Corrupted, match=r"rank 5 .* not in"):
        mine.arrived(5, StreamLabel(7), end(late[0]))
    assert is_closed(early[1])
    assert is_closed(late[1])
    assert not comm.got


def test_lane_that_is_attached_already_is_refused(mine, sockets):
    comm = Comm(taken=1)
    one, two = sockets(), sockets()
    mine.join(7, comm, [0, 1])
    mine.arrived(1, StreamLabel(7), end(one[0]))
    with pytest.raises(Corrupted, match="lane 0 of 1"):
        mine.arrived(1, StreamLabel(7), end(two[0]))
    assert is_closed(two[1])
    assert is_open(one[1])
    comm.got[0][-1].close()


def test_early_stream_is_kept_and_one_for_a_closed_communicator_is_not(mine, sockets):
    comm = Comm()
    early, late = sockets(), sockets()
    mine.arrived(1, StreamLabel(7), end(early[0]))
    mine.join(7, comm, [0, 1])
    assert [found[:3] for found in comm.got] == [(1, 0, 1)]
    mine.leave(7)
    mine.arrived(1, StreamLabel(7), end(late[0]))
    assert is_closed(late[1])
    comm.got[0][-1].close()


def test_waiting_streams_are_bounded_and_ended_ones_go_first(
    mine, sockets, monkeypatch
):
    monkeypatch.setattr(streams, "MOST_WAITING", 4)
    held = [sockets() for _ in range(4)]
    ends = [end(here) for here, _ in held]
    for number, kept in enumerate(ends):
        mine.arrived(1, StreamLabel(number), kept)
    more = sockets()
    with pytest.raises(Corrupted, match="rank 1 has opened 4 streams"):
        mine.arrived(1, StreamLabel(9), end(more[0]))
    assert is_closed(more[1])
    other = sockets()
    mine.arrived(2, StreamLabel(9), end(other[0]))  # another has its own
    held[1][1].sendall(b"what it had to say")
    held[1][1].close()
    held[2][1].close()
    more = sockets()
    mine.arrived(1, StreamLabel(9), end(more[0]))
    assert all(is_open(there) for _, there in (held[0], held[3], more, other))
    assert ends[1].wire.fileno() >= 0, "what it sent may be wanted"
    with pytest.raises(ValueError, match="closed"):  # it sent nothing and left
        ends[2].wire.fileno()


def test_last_closed_communicators_are_known(mine, monkeypatch):
    monkeypatch.setattr(streams, "_MOST_GONE", 3)
    for number in range(10):
        mine.leave(number)
    assert list(mine._gone) == [7, 8, 9]
