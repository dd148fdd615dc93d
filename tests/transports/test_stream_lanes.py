"""A stream of several lanes, step by step: what each end learns when a lane fails."""

import socket
import time

import pytest

from tcp_pairs import reset, tcp_pair
from unisono import _native
from unisono.transports import tcp
from unisono.transports.tcp import tune_socket

LARGE = 64 << 20  # more than the kernel holds for a socket

pytestmark = pytest.mark.timeout(120)


class Link:
    """A stream over TCP, and the sockets of its lanes."""

    def __init__(self, lanes, takes_free_lane):
        self.senders, self.receivers = [], []
        for _ in range(lanes):
            sender, receiver = tcp_pair()
            self.senders.append(sender)
            self.receivers.append(receiver)
        self.send_stream = _native.SendStream(wires(self.senders), takes_free_lane)
        self.receive_stream = _native.ReceiveStream(
            wires(self.receivers), takes_free_lane
        )

    def close(self):
        del self.send_stream, self.receive_stream
        for each in self.senders + self.receivers:
            each.close()


def wires(sockets):
    return [_native.SocketWire(each.dup().detach()) for each in sockets]


@pytest.fixture
def link():
    made = []

    def make(*args):
        made.append(Link(*args))
        return made[-1]

    yield make
    for each in made:
        each.close()


def until(expected, step):
    """Repeat a step until its result is the expected one."""
    deadline = time.monotonic() + 60
    while (found := step()) != expected:
        assert found in ("blocked", "done"), found
        assert time.monotonic() < deadline, f"{found} for long, not {expected}"


def fill(link):
    """Send until no lane takes more."""
    while link.send_stream.send(LARGE) != "blocked":
        pass
    before = -1
    while before != (before := link.send_stream.sent()):
        time.sleep(0.1)
        assert link.send_stream.send(LARGE) == "blocked"


@pytest.mark.parametrize("takes_free_lane", [False, True])
def test_sender_notices_failure_of_lane_that_sends_nothing(link, takes_free_lane):
    """The receiver waits for that lane, and so nothing moves on the other."""
    made = link(2, takes_free_lane)
    send_small_frames(made, 2)
    full, free = made.senders  # the next frame takes the first
    full.setblocking(False)
    try:
        while full.send(bytes(1 << 20)):  # nothing more fits into this lane
            pass
    except BlockingIOError:
        pass
    reset(free)
    until("lost", lambda: made.send_stream.send(3000))
    assert made.send_stream.send(3000) == "lost"  # also if asked again at once


@pytest.mark.parametrize("lanes", [1, 2, 3])
@pytest.mark.parametrize("takes_free_lane", [False, True])
def test_sender_learns_that_receiver_gives_up(link, lanes, takes_free_lane):
    """It has filled all lanes and waits for the receiver to read them."""
    made = link(lanes, takes_free_lane)
    fill(made)
    made.receive_stream.reject()  # though the test, as a forked child, has copies
    until("lost", lambda: made.send_stream.send(LARGE))


@pytest.mark.sweep
def test_sender_waits_for_receiver_that_reads_nothing_for_long(link):
    """Longer than a peer may be silent: its kernel answers, so it is well."""
    made = link(1, False)
    tune_socket(made.senders[0], 1.0, sends=True)
    fill(made)
    sent, until_then = made.send_stream.sent(), time.monotonic() + 6
    while time.monotonic() < until_then:
        assert made.send_stream.send(LARGE) == "blocked"
        time.sleep(0.02)
    while made.send_stream.sent() < sent + (8 << 20):
        assert made.receive_stream.take() in ("done", "blocked")
        assert made.send_stream.send(LARGE) in ("done", "blocked")


@pytest.mark.parametrize("largest", [212992, 4 << 20])
def test_buffers_are_fixed_only_if_the_system_allows_it(link, monkeypatch, largest):
    """A small one would stay small; the kernel's own grows."""
    monkeypatch.setattr(tcp, "_largest_buffer", lambda: largest)
    (sender,) = link(1, False).senders
    before = sender.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
    tune_socket(sender, 1.0, sends=True)
    after = sender.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
    assert (after == before) == (largest < 2 << 20)


def send_small_frames(link, count):
    for frame in range(count):
        until("done", lambda sent=frame + 1: link.send_stream.send(1000 * sent))


def take_frames(link, count):
    for _ in range(count):
        until("done", link.receive_stream.take)


def test_error_of_lane_is_remembered(link):
    """The kernel reports it once, perhaps while a frame comes over another lane."""
    made = link(2, True)
    send_small_frames(made, 4)  # all take the first lane
    reset(made.senders[1])
    take_frames(made, 4)
    until("lost", made.receive_stream.take)
    for _ in range(3):
        assert made.receive_stream.take() == "lost"


def test_lane_that_ended_is_no_failure_while_frames_come_over_others(link):
    made = link(2, True)
    send_small_frames(made, 2)
    made.senders[1].shutdown(socket.SHUT_WR)
    take_frames(made, 2)
    assert made.receive_stream.take() == "blocked"
    send_small_frames(made, 4)
    take_frames(made, 2)
    made.senders[0].shutdown(socket.SHUT_WR)
    until("lost", made.receive_stream.take)
