"""Where survivors and newcomers are found: several addresses, other users, nonsense."""

import errno
import os
import secrets
import threading
import time
from types import SimpleNamespace

import pytest

from unisono.errors import ConnectFailed
from unisono.runtime.world.agreement import Agreement, AgreementRequest
from unisono.runtime.world.shrink_protocol import _AgreementDriver
from unisono.transports import connect, endpoints, join
from unisono.transports.addresses import Address, chosen_address
from unisono.transports.attempts import Attempts
from unisono.transports.connect import connect_to
from unisono.transports.handshake import RENDEZVOUS, Identity, Purpose, Refused
from unisono.transports.listener import Listener
from unisono.transports.rendezvous_hosts import rendezvous
from unisono.transports.secret import make_secret
from unisono.transports.session import Peer
from unisono.transports.unix import abstract, seqpacket

pytestmark = pytest.mark.timeout(120)

SECRET = make_secret()
ME = Identity(SECRET, "job", 1)
HERE, THERE, NOBODY = "127.0.0.1", "127.0.0.2", "127.0.0.3"
UNREACHABLE = "255.255.255.255"  # the system refuses to connect there
ANOTHER_USER = 65534
GENEROUS_S = 20.0


@pytest.fixture
def named(monkeypatch):
    """Have node0 stand for these addresses."""
    true_resolve = Address.resolve

    def name(*hosts):
        def resolve(self):
            found = hosts if self.host == "node0" else [self.host]
            return [one for h in found for one in true_resolve(Address(h, self.port))]

        monkeypatch.setattr(Address, "resolve", resolve)

    return name


@pytest.fixture
def rank_0():
    with Listener(Address(HERE, 0), Identity(SECRET, "job", 0)) as made:
        yield made


def at(listener):
    return Address("node0", listener.address.port)


# --- names with several addresses


@pytest.mark.parametrize("hosts", [(NOBODY, HERE), (HERE, NOBODY), ("::1", HERE)])
def test_connect_once_tries_all_addresses_of_a_name(hosts, named, rank_0):
    named(*hosts)
    endpoints.connect_once(at(rank_0), ME, 0, Purpose("agree")).close()


@pytest.mark.parametrize("hosts", [(NOBODY, HERE), (HERE, NOBODY)])
def test_joiner_tries_all_addresses_of_a_name(hosts, named, rank_0):
    named(*hosts)
    join.Joiner("job", str(at(rank_0)), SECRET)._connect().close()


@pytest.mark.parametrize("hosts", [(NOBODY, HERE), (HERE, NOBODY)])
def test_connect_to_tries_all_addresses_of_a_name(hosts, named, rank_0):
    named(*hosts)
    connect_to(at(rank_0), ME, 0, RENDEZVOUS, timeout_s=GENEROUS_S).close()


def test_refused_needs_all_addresses_to_refuse_and_names_them(named, rank_0):
    named(NOBODY, THERE)
    with pytest.raises(ConnectionRefusedError, match=f"{NOBODY}: .*; {THERE}: "):
        endpoints.connect_once(at(rank_0), ME, 0, Purpose("agree"))
    with pytest.raises(ConnectFailed, match=f"{NOBODY}: .*; {THERE}: "):
        connect_to(at(rank_0), ME, 0, RENDEZVOUS, timeout_s=0.1)


@pytest.mark.parametrize("hosts", [(NOBODY, UNREACHABLE), (UNREACHABLE, NOBODY)])
def test_unreachable_address_is_not_reported_as_refused(hosts, named):
    named(*hosts)
    with pytest.raises(OSError, match=f"{NOBODY}: .*refused") as found:
        endpoints.connect_once(Address("node0", 9), ME, 0, Purpose("agree"))
    assert not isinstance(found.value, ConnectionRefusedError)
    assert UNREACHABLE in str(found.value)


def test_refusal_with_a_reason_takes_precedence():
    refused = Refused("why", result=3, epoch=7)
    error = connect._of_all(
        [("a", OSError(errno.EHOSTUNREACH, "no route")), ("b", refused)]
    )
    assert isinstance(error, Refused)
    assert (error.result, error.epoch) == (3, 7)
    assert "a: no route; b: why" in str(error)


def test_rank_0_listens_at_all_addresses_of_its_name(named):
    named("203.0.113.7", THERE, HERE, THERE)
    choice = chosen_address(Address("node0", 0))
    assert (choice.host, choice.others) == (THERE, (HERE,))
    with Listener(Address(choice.host, 0), ME, others=choice.others) as listener:
        for host in (HERE, THERE):
            there = Address(host, listener.address.port)
            who = Identity(SECRET, "job", 0)
            connect_to(there, who, 1, RENDEZVOUS, timeout_s=GENEROUS_S).close()
            listener.expect(0, RENDEZVOUS, GENEROUS_S).close()


def test_ranks_connect_by_different_addresses_of_rank_0(named):
    """Two interfaces, and each of the others reaches only one of them."""
    named(THERE, HERE)
    ports, ready, tables = [], threading.Event(), {}

    def announce(address):
        ports.append(address.port)
        ready.set()

    def take_part(rank, host):
        how = {"announce": announce} if rank == 0 else {}
        tables[rank] = rendezvous(
            *(rank, 3, "job", f"{host}:{ports[0] if ports else 0}"),
            **how,
            secret=SECRET,
            version="1",
            timeout_s=GENEROUS_S,
        )

    first = threading.Thread(target=take_part, args=(0, "node0"))
    first.start()
    assert ready.wait(GENEROUS_S)
    others = [
        threading.Thread(target=take_part, args=(rank, host))
        for rank, host in ((1, HERE), (2, THERE))
    ]
    for one in others:
        one.start()
    for one in (first, *others):
        one.join()
    assert sorted(tables) == [0, 1, 2]
    for table in tables.values():
        table.close()


def test_second_address_in_use_is_reported(named):
    with Listener(Address(THERE, 0), ME) as taken:
        where = Address(HERE, taken.address.port)
        with pytest.raises(ConnectFailed, match=f"listen at {THERE}"):
            Listener(where, ME, others=[THERE])
        with Listener(where, ME):  # and the first one is free again
            pass


# --- other users


class AnotherUser:
    """A child that becomes another user, and does something when it is told to."""

    def __init__(self, what):
        ear, self._bell = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.read(ear, 1)
                os.setuid(ANOTHER_USER)
                os._exit(what())
            finally:
                os._exit(99)
        os.close(ear)

    def go(self):
        """Tell it."""
        os.write(self._bell, b"!")

    def status(self):
        """How it ended."""
        os.close(self._bell)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def end_of(name):
    """Knock; 7 if that is hung up on without a word, 8 if something is said."""
    with seqpacket() as end:
        end.settimeout(GENEROUS_S)
        end.connect(name)
        try:
            return 8 if end.recv(64) else 7
        except ConnectionResetError:
            return 7


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another")


@as_root
def test_endpoint_rejects_another_user_with_the_pid_of_a_rank():
    name = abstract("job/0/agree/0/4242")
    child = AnotherUser(lambda: end_of(name))
    endpoint = endpoints._LocalEndpoint("job/0/agree", 0, [4242, child.pid])
    try:
        endpoint.answer(AgreementRequest(False, 0, (), ()))
        child.go()
        assert child.status() == 7
    finally:
        endpoint.close()


@as_root
def test_connect_rejects_another_user_at_the_endpoint():
    ready, go = os.pipe(), os.pipe()
    name = abstract("job/1/agree/1/4343")

    def squat():
        with seqpacket() as listener:
            listener.bind(name)
            listener.listen()
            os.write(ready[1], b"!")
            os.read(go[0], 1)
        return 0

    child = AnotherUser(squat)
    endpoint = endpoints._LocalEndpoint("job/1/agree", 0, [os.getpid(), child.pid])
    endpoint._names[1] = name
    try:
        child.go()
        assert os.read(ready[0], 1)
        with pytest.raises(ConnectionRefusedError, match=f"process {child.pid}"):
            endpoint.connect(1)
    finally:
        os.write(go[1], b"!")
        endpoint.close()
        assert child.status() == 0
        for fd in (*ready, *go):
            os.close(fd)


@as_root
def test_join_endpoint_rejects_another_user():
    job = secrets.token_hex(8)
    name = abstract(f"{job}/join")
    opened = join.JoinEndpoint.open_local(job)
    try:
        child = AnotherUser(lambda: end_of(name))
        child.go()
        found = []
        ended = threading.Thread(
            target=lambda: found.append(child.status()), daemon=True
        )
        ended.start()
        while ended.is_alive():
            assert not opened.newcomers()
        assert found == [7]
    finally:
        opened.close()


# --- what shrink makes of what it finds


class Refusing:
    """An endpoint whose every connection attempt ends like this."""

    def __init__(self, is_local, why):
        self.is_local, self.why = is_local, why

    def connect(self, rank, look):
        raise self.why

    def wake(self):
        pass


def survivor(is_local, why, *, dead=(), ended=()):
    """Rank 0 of three, of which 1 is on the same host."""
    engine = SimpleNamespace(dead=dead.__contains__, ended=ended.__contains__)
    hosts = (0, 0, 0) if is_local else (0, 0, 1)
    made = object.__new__(_AgreementDriver)
    made.session = SimpleNamespace(
        engine=engine,
        peers=[Peer(rank, 1, "host") for rank in range(3)],
        here=lambda ranks: [r for r in ranks if hosts[r] == 0],
    )
    made.endpoint = Refusing(is_local, why)
    made.rules = Agreement(0, 3, 0, 10.0, is_local)
    made.retry, made.outgoing, made.exit_deadline = {}, {}, {}
    made.were_dead, made.connecting = set(), Attempts(made.endpoint)
    return made


def tries(driver, rank):
    """An attempt to connect, to its end."""
    driver._connect(rank)
    await_that(driver.connecting.has_ended)
    for one, outcome in driver.connecting.ended():
        driver._attempted(one, outcome)


def await_that(true):
    until = time.monotonic() + GENEROUS_S
    while not true():
        assert time.monotonic() < until
        time.sleep(0.001)


@pytest.mark.parametrize("dead", [(), (2,)])
def test_refusal_from_another_host_is_not_death(dead):
    """Not even with a lifeline that ended: a firewall can do both."""
    one = survivor(False, ConnectionRefusedError(), dead=dead)
    tries(one, 2)
    assert 2 in one.rules.unreachable
    assert not one.rules.dead


def test_unreachable_rank_is_not_dead():
    one = survivor(False, OSError(errno.EHOSTUNREACH, "no route"), dead=(2,))
    tries(one, 2)
    assert 2 in one.rules.unreachable
    assert not one.rules.dead


def test_process_that_has_ended_is_dead():
    one = survivor(False, ConnectionRefusedError(), dead=(1, 2), ended=(1,))
    tries(one, 1)
    one._check_local_exits()
    assert one.rules.dead == {1}


def test_local_rank_is_dead_if_closed_and_not_if_late():
    one = survivor(True, ConnectionRefusedError(), dead=(1,))
    tries(one, 1)
    tries(one, 2)
    assert one.rules.dead == {1}
    assert not one.rules.unreachable


@pytest.mark.parametrize("rank", [-1, 0, 3, 1 << 31])
def test_requests_of_other_ranks_are_not_acceptable(rank):
    one = survivor(False, OSError())
    assert not one._is_acceptable(rank, AgreementRequest(False, 0, (), ()))
    assert one._is_acceptable(2, AgreementRequest(False, 0, (), ()))
    assert not one._is_acceptable(
        2, AgreementRequest(False, 0, (rank if rank else 9,), ())
    )


@pytest.mark.parametrize(
    "welcome",
    [
        join.Welcome(),
        join.Welcome(5, 4, 1, "x", before=2),
        join.Welcome(1, 4, 1, "x", before=2),
        join.Welcome(2, 4, -1, "x", before=2),
        join.Welcome(2, 4, 1 << 40, "x", before=2),
        join.Welcome(2, 1 << 40, 1, "x", before=2),
        join.Welcome(2, 4, 1, "x", before=4),
    ],
    ids=str,
)
def test_welcome_with_impossible_numbers_is_invalid(welcome):
    assert not welcome.is_valid()
    assert join.Welcome(2, 4, 1, "x", before=2).is_valid()
