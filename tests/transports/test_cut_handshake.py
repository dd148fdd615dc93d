"""Handshakes and control messages over sockets that move few or no bytes at a time."""

import contextlib
import random
import selectors
import socket
import threading

import msgspec
import pytest

from unisono.transports.connect import connection_over
from unisono.transports.control import ControlMessages
from unisono.transports.handshake import (
    RENDEZVOUS,
    Identity,
    ServerHandshake,
    answer,
    offer,
)
from unisono.transports.pending import PendingConnection
from unisono.transports.secret import make_secret

pytestmark = pytest.mark.timeout(120)

SECRET = make_secret()
DIALER, ANSWERER = Identity(SECRET, "job", 1), Identity(SECRET, "job", 0)
WAIT_S = 20.0


class Short(socket.socket):
    """Moves as many bytes as it is told at most; if it never blocks, often none."""

    def cut_by(self, sizes):
        self.sizes = sizes
        return self

    def _most(self):
        most = self.sizes()
        if most == 0 and self.gettimeout() == 0.0:
            raise BlockingIOError
        return max(most, 1)

    def recv(self, size, *flags):
        return super().recv(min(size, self._most()), *flags)

    def send(self, raw, *flags):
        return super().send(raw[: self._most()], *flags)

    def sendall(self, raw, *flags):
        while raw:
            raw = raw[self.send(raw) :]


def sizes(how):
    """Always the same, or from a seed; none at every other try."""
    chance = random.Random(how)
    if isinstance(how, str):
        return lambda: chance.choice([0, 1, 2, 3, 31, 32, 33, 100])
    return lambda: chance.choice([0, how])


@contextlib.contextmanager
def short_pair(how):
    ends = socket.socketpair()
    made = [Short(fileno=end.detach()).cut_by(sizes(how)) for end in ends]
    try:
        yield made
    finally:
        for end in made:
            end.close()


class Word(msgspec.Struct):
    text: str


def talk(sockets, sessions):
    """A control message in each direction."""
    messages = [
        ControlMessages(connection_over(sock, authenticated))
        for sock, authenticated in zip(sockets, sessions, strict=True)
    ]
    for one, other in (messages, messages[::-1]):
        word = Word("x" * 40)
        sends = threading.Thread(
            target=one.send, args=(word,), kwargs={"timeout_s": WAIT_S}
        )
        sends.start()  # a pair of sockets holds few pieces, however small they are
        got = other.receive(Word, longest=1000, timeout_s=WAIT_S)
        sends.join()
        assert got.text == "x" * 40


CUTS = [*range(1, 130), *(f"seed {k}" for k in range(100))]


def blocking(how):
    with short_pair(how) as (mine, theirs):
        found = []
        other = threading.Thread(
            target=lambda: found.append(offer(mine, DIALER, 0, RENDEZVOUS))
        )
        other.start()
        authenticated = answer(theirs, ANSWERER)
        other.join()
        talk((mine, theirs), (found[0], authenticated))


def accepting(how):
    """As the thread that accepts does it: it never blocks."""
    with short_pair(how) as (mine, theirs), selectors.DefaultSelector() as selector:
        found = []
        other = threading.Thread(
            target=lambda: found.append(offer(mine, DIALER, 0, RENDEZVOUS))
        )
        other.start()
        theirs.setblocking(False)
        one = PendingConnection(theirs, "here", ServerHandshake(ANSWERER), 0.0)
        selector.register(theirs, selectors.EVENT_READ)
        awaited = selectors.EVENT_READ
        while awaited:
            assert selector.select(WAIT_S)
            with contextlib.suppress(BlockingIOError):
                awaited = one.read()
                selector.modify(theirs, awaited or selectors.EVENT_READ)
        other.join()
        talk((mine, theirs), (found[0], one.handshake.authenticated))


@pytest.mark.parametrize("act", [blocking, accepting])
def test_handshake_and_control_messages_work_with_any_cut(act):
    for how in CUTS:
        act(how)
