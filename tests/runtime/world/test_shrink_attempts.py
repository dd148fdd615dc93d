"""A rank that shrinks hears others while its attempts to connect wait."""

import threading
import time
from types import SimpleNamespace

import pytest

from unisono.runtime.world.agreement import AgreementRequest
from unisono.runtime.world.shrink_protocol import _AgreementDriver
from unisono.transports import attempts
from unisono.transports.addresses import Address
from unisono.transports.attempts import AttemptAbandoned, Attempts
from unisono.transports.endpoints import ControlLink, connect_once
from unisono.transports.handshake import Identity, Purpose
from unisono.transports.listener import Listener
from unisono.transports.secret import make_secret
from unisono.transports.session import Peer

pytestmark = pytest.mark.timeout(120)

SECRET = make_secret()
GENEROUS_S = 30.0
REQUEST = AgreementRequest(False, 0, (), ())


def await_that(true):
    until = time.monotonic() + GENEROUS_S
    while not true():
        assert time.monotonic() < until
        time.sleep(0.001)


@pytest.fixture
def survivors(request):
    """Ranks 0 and 1 of three; rank 2, on another host, is dead for them."""
    made = [Listener(Address("127.0.0.1", 0), identity(r)) for r in range(2)]
    places = {r: one.address for r, one in enumerate(made)}
    for one in made:
        one.add_addresses({**places, 2: Address("127.0.0.1", 9)})
    peers = [Peer(rank, 1, "host") for rank in range(3)]
    drivers = [
        _AgreementDriver(
            SimpleNamespace(
                rank=rank,
                peers=peers,
                listener=one,
                engine=SimpleNamespace(dead={2}.__contains__, ended=lambda rank: False),
                here=lambda ranks: [rank for rank in ranks if rank != 2],
            ),
            SimpleNamespace(job="job", epoch=0),
            getattr(request, "param", GENEROUS_S),
            None,
        )
        for rank, one in enumerate(made)
    ]
    yield drivers
    for one in drivers:
        one._close_links()
        one.close()


def identity(rank):
    return Identity(SECRET, "job", rank)


def ask(listener, rank):
    """Rank 1 sends a request to a rank; the link."""
    link = connect_once(listener.address, identity(1), rank, Purpose("agree"))
    link.send(REQUEST)
    return link


def test_coordinator_hears_a_rank_while_its_attempt_to_reach_another_waits(
    survivors, monkeypatch
):
    """The attempt ends only when a request that comes meanwhile was heard."""
    one, _ = survivors
    connect, links = one.endpoint.connect, []

    def held(rank, look):
        if rank != 2:
            return connect(rank, look)
        links.append(ask(one.session.listener, 0))
        await_that(lambda: 1 in one.rules.followers)
        raise TimeoutError("timed out")

    one.endpoint.connect = held
    monkeypatch.setattr(one, "_try_proposal", lambda proposal, enter: proposal)
    proposal = None
    while proposal is None:
        proposal = one._act()
    assert one.rules.unreachable == {2}
    assert proposal.members == (0, 1)
    links[0].close()


@pytest.mark.parametrize("survivors", [0.0], indirect=True)
def test_request_that_has_come_counts_although_the_time_is_up(survivors, monkeypatch):
    one, _ = survivors
    with_request = one.endpoint._arrived
    link = ask(one.session.listener, 0)
    await_that(lambda: with_request and with_request[0].can_be_read())
    monkeypatch.setattr(one, "_try_proposal", lambda proposal, enter: proposal)
    assert one._act().members == (0, 1)
    link.close()


# --- attempts


class Endpoint:
    """Its `connect` waits until `go`, or for a `look` that raises."""

    is_local = False

    def __init__(self):
        self.go, self.told = threading.Event(), threading.Event()
        self.guard, self.now, self.most = threading.Lock(), 0, 0
        self.links, self.ended = {}, set()

    def connect(self, rank, look):
        with self.guard:
            self.now += 1
            self.most = max(self.most, self.now)
        try:
            while not self.go.wait(0.001):
                look()
            self.links[rank] = Link(rank)
            return self.links[rank]
        finally:
            with self.guard:
                self.now -= 1
                self.ended.add(rank)

    def wake(self):
        self.told.set()


class Link(ControlLink):
    """A link without a connection."""

    def __init__(self, rank):
        self.rank, self.is_closed = rank, False

    def send(self, message):
        raise AssertionError

    def receive(self, kind):
        raise AssertionError

    def close(self):
        self.is_closed = True


def outcomes(made, number):
    found = {}
    await_that(lambda: found.update(made.ended()) or len(found) == number)
    return found


def test_more_attempts_than_threads_all_end():
    endpoint = Endpoint()
    made = Attempts(endpoint)
    ranks = range(2 * attempts.MOST + 1)
    for rank in ranks:
        made.begin(rank)
    assert all(rank in made for rank in ranks)
    await_that(lambda: endpoint.now == attempts.MOST)
    assert not made.has_ended()
    endpoint.go.set()
    assert outcomes(made, len(ranks)) == endpoint.links
    assert endpoint.most == attempts.MOST
    assert endpoint.told.is_set()
    assert not any(rank in made for rank in ranks)


def test_abandoned_attempts_end_and_are_not_told():
    endpoint = Endpoint()
    made = Attempts(endpoint)
    for rank in range(3):
        made.begin(rank)
    await_that(lambda: endpoint.now == 3)
    made.abandon(but=[1])
    await_that(lambda: endpoint.ended == {0, 2})
    endpoint.go.set()
    assert outcomes(made, 1) == endpoint.links
    assert list(endpoint.links) == [1]


def test_link_of_an_abandoned_attempt_is_closed():
    endpoint = Endpoint()
    made = Attempts(endpoint)
    made.begin(4)
    endpoint.go.set()
    await_that(made.has_ended)
    made.abandon()
    assert endpoint.links[4].is_closed
    assert not made.ended()


def test_attempt_is_made_by_its_caller_if_no_thread_can_be_started(monkeypatch):
    def start(self):
        raise OSError("no thread")

    monkeypatch.setattr(attempts.ServiceThread, "start", start)
    endpoint = Endpoint()
    endpoint.go.set()
    made = Attempts(endpoint)
    made.begin(4)
    assert dict(made.ended()) == endpoint.links


def test_look_of_an_abandoned_attempt_raises():
    attempt = attempts._Attempt(3)
    attempt.look()
    attempt.is_abandoned = True
    with pytest.raises(AttemptAbandoned):
        attempt.look()
