"""A rank's port: ranks find each other through it, and other clients change nothing."""

import contextlib
import logging
import os
import resource
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import msgspec
import pending_clients
import pytest

from unisono import _native
from unisono.errors import BadArgument, ConnectFailed, NotAuthentic, PeerLost
from unisono.transports import connect
from unisono.transports.addresses import Address
from unisono.transports.connect import connect_to
from unisono.transports.control import ControlMessages
from unisono.transports.handshake import (
    RENDEZVOUS,
    ClientHandshake,
    HandshakeResult,
    Identity,
    Refused,
    data_purpose,
)
from unisono.transports.listener import MOST_PENDING, Listener
from unisono.transports.pending import PendingConnection
from unisono.transports.secret import Secret, make_secret, open_secret

pytestmark = [pytest.mark.timeout(240), pytest.mark.one_in(2)]

SECRET = make_secret()
LOOPBACK = Address("127.0.0.1", 0)
GENEROUS_S = 60.0


def listeners(n, host="127.0.0.1", secret=SECRET, job="job"):
    made = [Listener(Address(host, 0), Identity(secret, job, r)) for r in range(n)]
    for one in made:
        one.add_addresses({r: other.address for r, other in enumerate(made)})
    return made


@contextlib.contextmanager
def closing(things):
    try:
        yield things
    finally:
        for thing in things:
            thing.close()


@pytest.fixture
def pair():
    with closing(listeners(2)) as made:
        yield made


@pytest.fixture
def hasty(monkeypatch):
    """Doubts do not last."""
    monkeypatch.setattr(connect, "REFUSED_S", 0.2)


def await_that(true):
    until = time.monotonic() + GENEROUS_S
    while not true():
        assert time.monotonic() < until
        time.sleep(0.005)


def talk(one, two, purpose=RENDEZVOUS):
    """Rank 1 connects to rank 0, and a message goes each way."""
    there = two.connect(0, purpose, GENEROUS_S)
    here = one.expect(1, purpose, GENEROUS_S)
    with closing([here, there]):
        there.socket.sendall(b"ping")
        assert here.socket.recv(4) == b"ping"
        here.socket.sendall(b"pong")
        assert there.socket.recv(4) == b"pong"
        assert here.send_key == there.receive_key
        assert here.receive_key == there.send_key
        assert (here.peer, there.peer) == (1, 0)


# --- ranks


def test_two_ranks_connect_and_exchange_messages(pair):
    talk(*pair)
    assert pair[0].rejected == 0


def test_listener_accepts_ipv6():
    with closing(listeners(2, "::1")) as pair:
        assert str(pair[0].address).startswith("[::1]:")
        talk(*pair)


def test_expect_matches_connections_by_purpose(pair):
    labels = [data_purpose(c, s) for c in range(5) for s in range(4)]
    with ThreadPoolExecutor(8) as pool:
        here = [
            pool.submit(pair[0].expect, 1, purpose, GENEROUS_S) for purpose in labels
        ]
        there = [
            pair[1].connect(0, purpose, GENEROUS_S) for purpose in reversed(labels)
        ]
        for purpose, one, two in zip(labels, here, reversed(there), strict=True):
            with closing([one.result(), two]):
                assert one.result().purpose == two.purpose == purpose
                assert one.result().send_key == two.receive_key


def test_early_connection_is_kept_until_expected(pair):
    there = pair[1].connect(0, RENDEZVOUS, GENEROUS_S)
    await_that(lambda: pair[0]._arrived)
    here = pair[0].expect(1, RENDEZVOUS, 0.0)
    with closing([here, there]):
        assert here.send_key == there.receive_key


def test_expect_returns_the_last_of_several_attempts(pair):
    with closing(
        [pair[1].connect(0, RENDEZVOUS, GENEROUS_S) for _ in range(3)]
    ) as tries:
        await_that(lambda: len(pair[0]._arrived) == 3)
        here = pair[0].expect(1, RENDEZVOUS)
        with closing([here]):
            last = [t for t in tries if t.receive_key == here.send_key]
            assert last == tries[-1:]
            assert tries[0].socket.recv(1) == b""


def test_connection_is_blocking_and_has_nodelay(pair):
    there = pair[1].connect(0, RENDEZVOUS)
    here = pair[0].expect(1, RENDEZVOUS)
    with closing([here, there]):
        for sock in (here.socket, there.socket):
            assert sock.gettimeout() is None
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert not os.get_inheritable(sock.fileno())


def test_connection_within_the_machine_is_not_paced(pair):
    """Whatever the congestion control of the system: with BBR it would be."""
    there = pair[1].connect(0, RENDEZVOUS)
    here = pair[0].expect(1, RENDEZVOUS)
    with closing([here, there]):
        option = socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16
        assert there.socket.getsockopt(*option).rstrip(b"\0") == b"reno"


def test_listener_accepts_a_whole_cluster_at_once(pair):
    """More than there is room for: they wait their turn."""
    labels = [data_purpose(number) for number in range(3 * MOST_PENDING)]
    with ThreadPoolExecutor(len(labels)) as pool:
        there = list(pool.map(lambda purpose: pair[1].connect(0, purpose), labels))
    here = [pair[0].expect(1, purpose, GENEROUS_S) for purpose in labels]
    for one, two in zip(here, there, strict=True):
        assert one.send_key == two.receive_key
        one.close()
        two.close()


def test_connect_retries_until_the_peer_listens():
    with socket.socket() as keeper:
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        keeper.bind(("127.0.0.1", 0))
        address = Address(*keeper.getsockname())
    with ThreadPoolExecutor(1) as pool:
        dialed = pool.submit(
            connect_to,
            address,
            Identity(SECRET, "job", 1),
            0,
            RENDEZVOUS,
            timeout_s=GENEROUS_S,
        )
        time.sleep(0.1)
        with Listener(address, Identity(SECRET, "job", 0)) as listener:
            here = listener.expect(1, RENDEZVOUS, GENEROUS_S)
            with closing([here, dialed.result()]) as (one, two):
                assert one.send_key == two.receive_key


def test_enter_epoch_drops_connections_of_the_epoch_before(pair, hasty):
    early = pair[1].connect(0, RENDEZVOUS, GENEROUS_S)
    await_that(lambda: pair[0]._arrived)
    pair[0].enter_epoch(1)
    assert early.socket.recv(1) == b""
    early.close()
    with pytest.raises(Refused, match="in epoch 1 of the job, rank 1 in 0"):
        pair[1].connect(0, RENDEZVOUS, GENEROUS_S)
    pair[1].enter_epoch(1)
    talk(*pair)


def test_connection_accepted_in_the_epoch_before_is_closed(pair):
    rules = ClientHandshake(Identity(SECRET, "job", 1), 0, RENDEZVOUS)
    with pending_clients.connect(pair[0].address) as sock:
        sock.sendall(rules.opening)
        confirm = rules.take(sock.recv(rules.wanted, socket.MSG_WAITALL))
        pair[0].enter_epoch(1)
        sock.sendall(confirm)
        assert pending_clients.everything_said_to(sock) == b""
    assert not pair[0]._arrived


def test_handler_gets_connections_of_its_kind(pair):
    """Those who came before as well as those who come."""
    handed = []
    with closing(
        [pair[1].connect(0, data_purpose(1)), pair[1].connect(0, RENDEZVOUS)]
    ) as there:
        await_that(lambda: len(pair[0]._arrived) == 2)
        pair[0].set_handler("data", handed.append)
        there.append(pair[1].connect(0, data_purpose(2)))
        await_that(lambda: len(handed) == 2)
        assert [one.purpose for one in handed] == [data_purpose(1), data_purpose(2)]
        with closing([pair[0].expect(1, RENDEZVOUS), *handed]) as here:
            assert here[0].send_key == there[1].receive_key


# --- what fails, and what it says


def test_handler_that_raises_closes_only_its_connection(pair, caplog):
    one, two = pair

    def handler(connection):
        raise RuntimeError("in a handler")

    early = two.connect(0, data_purpose(3), GENEROUS_S)
    await_that(lambda: one._arrived)
    with caplog.at_level(logging.WARNING, "unisono"):
        one.set_handler("data", handler)
        late = two.connect(0, data_purpose(4), GENEROUS_S)
        with closing([early, late]):
            for connection in (early, late):
                connection.socket.settimeout(GENEROUS_S)
                assert connection.socket.recv(1) == b""
        talk(*pair)
    assert one.rejected == 2
    message = "rank 1: for data of communicator 3, stream 0: RuntimeError: in a handler"
    assert message in caplog.text


def test_error_of_a_pending_connection_closes_only_that_one(pair, monkeypatch):
    def hear(self):
        raise MemoryError("no memory for this one")

    with monkeypatch.context() as broken:
        broken.setattr(PendingConnection, "read", hear)
        with socket.create_connection(tuple_of(pair[0].address)) as client:
            client.sendall(b"x")
            client.settimeout(GENEROUS_S)
            with contextlib.suppress(ConnectionResetError):
                assert client.recv(1) == b""
    talk(*pair)


def tuple_of(address):
    return address.host, address.port


@pytest.mark.skipif(bool(_native.tls_missing()), reason="no OpenSSL 3")
@pytest.mark.parametrize("how", ["short=1", "short=5", "cut=3"])
def test_tls_handshake_survives_cuts_anywhere(how):
    """Who answers waits for room to send as well as for what comes."""
    members = [Identity(SECRET, "job", r, tls=True) for r in range(2)]
    made = [Listener(LOOPBACK, member) for member in members]
    for one in made:
        one.add_addresses({r: other.address for r, other in enumerate(made)})
    _native.arm_failpoints(f"tls.send:*:{how},tls.receive:*:{how}")
    try:
        with closing(made):
            there = made[1].connect(0, RENDEZVOUS, GENEROUS_S)
            here = made[0].expect(1, RENDEZVOUS, GENEROUS_S)
            with closing([here, there]):
                messages = ControlMessages(there), ControlMessages(here)
                for one, other in (messages, messages[::-1]):
                    one.send(Word("x" * 500), timeout_s=GENEROUS_S)
                    got = other.receive(Word, longest=1000, timeout_s=GENEROUS_S)
                    assert got.text == "x" * 500
    finally:
        _native.arm_failpoints("")


class Word(msgspec.Struct):
    text: str


def test_connect_to_a_closed_port_fails_with_the_cause(pair):
    address = pair[0].address
    pair[0].close()
    with pytest.raises(ConnectFailed, match="Connection refused") as caught:
        pair[1].connect(0, data_purpose(3), 0.2)
    assert caught.value.missing == (0,)
    assert f"rank 1 cannot connect to rank 0 at {address}, for data of comm" in str(
        caught.value
    )
    assert "tried for 0.2 s" in str(caught.value)


def test_socket_connected_to_itself_counts_as_refused(monkeypatch, hasty):
    """Where nobody listens, the kernel may connect a socket to itself."""
    connect = socket.socket.connect

    def to_itself(self, where):
        self.bind(where)
        connect(self, self.getsockname())

    monkeypatch.setattr(socket.socket, "connect", to_itself)
    with pytest.raises(ConnectFailed, match="no process listens there"):
        connect_to(LOOPBACK, Identity(SECRET, "job", 1), 0, RENDEZVOUS, timeout_s=0.1)


def test_expect_times_out_and_names_the_rank(pair):
    with pytest.raises(ConnectFailed, match=r"did not connect within 0\.1 s") as caught:
        pair[0].expect(1, RENDEZVOUS, 0.1)
    assert caught.value.missing == (1,)


def test_connect_to_a_rank_without_address_is_refused(pair):
    with pytest.raises(BadArgument, match="rank 7: its address is not known"):
        pair[0].connect(7, RENDEZVOUS)


def test_connect_to_a_silent_server_times_out():
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = Address(*mute.getsockname())
        with pytest.raises(ConnectFailed, match=r"not done in time|timed out"):
            connect_to(
                address, Identity(SECRET, "job", 1), 0, RENDEZVOUS, timeout_s=0.3
            )


@pytest.fixture
def unanswered():
    """An address where the kernel does not even refuse: its queue is full."""
    with socket.socket() as full, contextlib.ExitStack() as held:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(3):
            sock = held.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(full.getsockname())
        yield Address(*full.getsockname())


def test_connecting_ends_when_the_rank_is_known_to_be_lost(unanswered, monkeypatch):
    """It need not wait for the kernel, which goes on as long as it may."""
    monkeypatch.setattr(connect, "_CONNECT_S", GENEROUS_S)
    why = iter(["", ""])
    with pytest.raises(PeerLost, match="it has died"):
        connect_to(
            unanswered,
            Identity(SECRET, "job", 1),
            0,
            RENDEZVOUS,
            timeout_s=GENEROUS_S / 4,
            lost=lambda: next(why, "it has died"),
        )


def test_connecting_to_an_address_without_an_answer_times_out(unanswered):
    me = Identity(SECRET, "job", 1)
    with pytest.raises(ConnectFailed, match="timed out"):
        connect_to(unanswered, me, 0, RENDEZVOUS, timeout_s=0.1)


def test_listener_port_in_use_is_reported(pair):
    with pytest.raises(ConnectFailed, match=r"rank 5 cannot listen .* choose another"):
        Listener(pair[0].address, Identity(SECRET, "job", 5))


def test_listener_refuses_an_address_of_another_host():
    with pytest.raises(ConnectFailed, match="not an address of this host"):
        Listener(Address("203.0.113.7", 0), Identity(SECRET, "job", 0))


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_listener_without_secret_refuses_network_addresses(host):
    with pytest.raises(BadArgument, match="has no secret"):
        Listener(Address(host, 0), Identity(open_secret("job"), "job", 0))
    me = Identity(open_secret("job"), "job", 1)
    with pytest.raises(BadArgument, match="has no secret"):
        connect_to(Address("203.0.113.7", 1), me, 0, RENDEZVOUS, timeout_s=0.1)


def test_listener_without_secret_accepts_loopback():
    with closing(listeners(2, secret=open_secret("job"))) as pair:
        talk(*pair)


def test_mark_lost_ends_waits_for_that_rank(pair):
    pair[0].close()
    for wait in (pair[1].connect, pair[1].expect):
        timer = threading.Timer(0.1, pair[1].mark_lost, (0, "its lifeline has ended"))
        timer.start()
        with pytest.raises(PeerLost, match="its lifeline has ended") as caught:
            wait(0, RENDEZVOUS, GENEROUS_S)
        assert caught.value.ranks == (0,)
        timer.join()
        pair[1]._lost.clear()


def test_close_ends_all_waits(pair):
    timer = threading.Timer(0.1, pair[0].close)
    timer.start()
    with pytest.raises(ConnectFailed, match="has closed its listener"):
        pair[0].expect(1, RENDEZVOUS, GENEROUS_S)
    timer.join()


def test_connect_with_another_secret_is_not_authentic(pair, hasty):
    me = Identity(make_secret(), "job", 1)
    with pytest.raises(NotAuthentic, match="UNISONO_SECRET_FILE") as caught:
        connect_to(pair[0].address, me, 0, RENDEZVOUS, timeout_s=GENEROUS_S)
    assert str(pair[0].address) in str(caught.value)
    with pytest.raises(ConnectFailed, match=r"rejected, the last from 127\.0\.0\.1"):
        pair[0].expect(1, RENDEZVOUS, 0.0)


@pytest.mark.parametrize(
    ("me", "result"),
    [
        (Identity(SECRET, "other", 1), HandshakeResult.OTHER_JOB),
        (Identity(SECRET, "job", 0), HandshakeResult.OTHER_RANK),
    ],
)
def test_connect_reports_the_reason_of_a_refusal(me, result, pair, hasty):
    with pytest.raises(Refused) as caught:
        connect_to(pair[0].address, me, 0, RENDEZVOUS, timeout_s=GENEROUS_S)
    assert caught.value.result == result
    assert not pair[0]._arrived


def test_connect_from_an_older_epoch_is_not_retried_for_long():
    with Listener(LOOPBACK, Identity(SECRET, "job", 0, epoch=2)) as ahead:
        me = Identity(SECRET, "job", 1, epoch=1)
        with pytest.raises(Refused, match="in epoch 2 of the job, rank 1 in 1"):
            connect_to(ahead.address, me, 0, RENDEZVOUS, timeout_s=30)


def test_connect_retries_with_a_rank_that_is_an_epoch_behind(hasty):
    me = Identity(SECRET, "job", 1, epoch=2)
    behind = Listener(LOOPBACK, Identity(SECRET, "job", 0, epoch=1))
    with ThreadPoolExecutor(1) as pool:
        dialed = pool.submit(
            connect_to, behind.address, me, 0, RENDEZVOUS, timeout_s=GENEROUS_S
        )
        await_that(lambda: behind.rejected > 3)
        time.sleep(2 * connect.REFUSED_S)
        behind.close()
        with Listener(behind.address, Identity(SECRET, "job", 0, epoch=2)) as now:
            here = now.expect(1, RENDEZVOUS, GENEROUS_S)
            assert here.send_key == dialed.result().receive_key
            here.close()
            dialed.result().close()


# --- clients without the secret


@pytest.mark.parametrize("says", pending_clients.TALKATIVE)
def test_client_without_secret_receives_no_byte(says, pair):
    with pending_clients.connect(pair[0].address) as sock:
        says(sock)
        assert pending_clients.everything_said_to(sock) == b""
    await_that(lambda: pair[0].rejected == 1)
    talk(*pair)


def test_silent_client_receives_no_byte_and_expires():
    me = Identity(SECRET, "job", 0)
    with Listener(LOOPBACK, me, handshake_s=0.2) as listener:
        for says in (pending_clients.silent, pending_clients.half_offer):
            with pending_clients.connect(listener.address) as sock:
                says(sock)
                assert pending_clients.everything_said_to(sock) == b""
        await_that(lambda: listener.rejected == 2)
        assert "took too long" in listener.rejections()


def test_200_pending_connections_delay_no_rank(pair):
    with contextlib.ExitStack() as stack:
        for number in range(200):
            sock = stack.enter_context(pending_clients.connect(pair[0].address))
            pending_clients.ALL[number % len(pending_clients.ALL)](sock)
            assert len(pair[0]._pending) <= MOST_PENDING
        talk(*pair)
        for _ in range(200):
            stack.enter_context(pending_clients.connect(pair[0].address))
        await_that(lambda: len(pair[0]._pending) == MOST_PENDING)
        talk(*pair)
    await_that(lambda: not pair[0]._pending)
    assert not pair[0]._arrived


def test_flooding_sender_displaces_its_own_connections(pair):
    """A slow rank of another address is kept beside many clients of one address."""
    address = pair[0].address
    slow = socket.socket()
    with contextlib.ExitStack() as stack:
        stack.enter_context(slow)
        slow.bind(("127.0.0.2", 0))
        slow.connect((address.host, address.port))
        await_that(lambda: len(pair[0]._pending) == 1)
        for _ in range(3 * MOST_PENDING):
            stack.enter_context(pending_clients.connect(address))
        await_that(lambda: pair[0].rejected > MOST_PENDING)
        slow.settimeout(GENEROUS_S)
        rules = ClientHandshake(Identity(SECRET, "job", 1), 0, RENDEZVOUS)
        slow.sendall(rules.opening)
        slow.sendall(rules.take(slow.recv(rules.wanted, socket.MSG_WAITALL)))
        with closing([pair[0].expect(1, RENDEZVOUS, GENEROUS_S)]) as (here,):
            assert here.send_key == rules.authenticated.receive_key


def test_listener_rejects_a_recorded_handshake(pair):
    rules = ClientHandshake(Identity(SECRET, "job", 1), 0, RENDEZVOUS)
    with pending_clients.connect(pair[0].address) as sock:
        sock.sendall(rules.opening)
        confirm = rules.take(sock.recv(rules.wanted, socket.MSG_WAITALL))
        sock.sendall(confirm)
        pair[0].expect(1, RENDEZVOUS, GENEROUS_S).close()
    for _ in range(3):
        with pending_clients.connect(pair[0].address) as sock:
            sock.sendall(rules.opening + confirm)
            assert len(pending_clients.everything_said_to(sock)) <= rules.wanted
    await_that(lambda: pair[0].rejected == 3)
    assert not pair[0]._arrived


def test_connect_rejects_a_server_that_echoes(hasty):
    """It sends back whatever we say, to us who dial and to us who listen."""
    me = Identity(SECRET, "job", 1)
    with (
        socket.create_server(("127.0.0.1", 0)) as mirror,
        Listener(LOOPBACK, me) as us,
    ):
        mirror.settimeout(0.1)
        heard = []

        def reflect():
            while not stop.is_set():
                with contextlib.suppress(OSError):
                    sock, _ = mirror.accept()
                    with sock:
                        heard.append(sock.recv(128, socket.MSG_WAITALL))
                        sock.sendall(heard[-1])

        stop = threading.Event()
        thread = threading.Thread(target=reflect)
        thread.start()
        address = Address(*mirror.getsockname())
        with pytest.raises(NotAuthentic, match="does not hold the secret"):
            connect_to(address, me, 0, RENDEZVOUS, timeout_s=GENEROUS_S)
        stop.set()
        thread.join()
        with pending_clients.connect(us.address) as sock:
            sock.sendall(heard[0])
            reply = pending_clients.everything_said_to(sock)
            assert len(reply) == 96
        await_that(lambda: us.rejected == 1)
        assert not us._arrived


def test_rejections_are_logged_once_a_second(pair, caplog):
    with caplog.at_level(logging.WARNING, "unisono"):
        began = time.monotonic()
        for _ in range(100):
            with pending_clients.connect(pair[0].address) as sock:
                pending_clients.garbage(sock)
                pending_clients.everything_said_to(sock)
        took = time.monotonic() - began
    assert 1 <= len(caplog.messages) <= took + 1
    assert "rank 0 at 127.0.0.1" in caplog.messages[0]
    assert SECRET.hex() not in caplog.text


# --- processes


def without_descriptors(rank):
    """The listener survives a time without descriptors."""
    one, two = listeners(2)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    clients = [socket.socket() for _ in range(3)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 4, hard))
    for sock in clients:
        sock.settimeout(10)
        sock.connect((one.address.host, one.address.port))
    time.sleep(0.5)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    for sock in clients:
        sock.close()
    talk(one, two)
    one.close()
    two.close()
    return one.rejected


@pytest.mark.sweep
def test_listener_recovers_when_descriptors_run_out(forks):
    (end,) = forks.run(1, without_descriptors)
    assert end.value, end.stderr


def a_child_of_ones_own(rank):
    """What a forked child holds after its parent has left."""
    (one,) = listeners(1)
    hear, tell = os.pipe()
    is_there, says_so = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(tell)
        os.write(says_so, b"!")
        os.read(hear, 1)  # until the parent has tried
        os._exit(0)
    os.read(is_there, 1)
    one.close()
    try:
        pending_clients.connect(one.address).close()
        refused = False
    except ConnectionRefusedError:
        refused = True
    os.close(tell)
    os.waitpid(child, 0)
    return refused


def test_forked_child_closes_the_port(forks):
    (end,) = forks.run(1, a_child_of_ones_own)
    assert end.value is True, end.stderr


def forks_while_it_closes(rank):
    """How many sockets of the parent's listener a child has, forked meanwhile."""
    (one,) = listeners(1)
    thread, found = one._thread, []

    def join_and_fork():
        thread.join()
        child = os.fork()
        if child == 0:
            os._exit(sum(sock.fileno() >= 0 for sock in one._sockets))
        found.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    one._thread = SimpleNamespace(join=join_and_fork)
    one.close()
    return found


def test_child_that_is_forked_while_it_closes_has_no_port(forks):
    (end,) = forks.run(1, forks_while_it_closes)
    assert end.value == [0], end.stderr


def another_user(rank, path, secret):
    """Rank 1 is another user's process, who knows all but the secret."""
    me = Identity(Secret(bytes.fromhex(secret)), "job", 0)
    if rank.number == 0:
        with Listener(LOOPBACK, me) as listener:
            with open(path, "w") as file:
                file.write(str(listener.address))
            os.chmod(path, 0o644)
            os.rename(path, path + ".ready")
            await_that(lambda: listener.rejected >= 20)
            with Listener(LOOPBACK, Identity(me.secret, "job", 1)) as peer:
                peer.add_addresses({0: listener.address})
                talk(listener, peer)
        return None
    await_that(lambda: os.path.exists(path + ".ready"))
    with open(path + ".ready") as file:
        address = Address.parse(file.read())
    address.resolve()  # imports what the other user may not read
    os.setuid(65534)
    said = b""
    for number in range(20):
        with pending_clients.connect(address) as sock:
            kinds = pending_clients.TALKATIVE
            kinds[number % len(kinds)](sock)
            said += pending_clients.everything_said_to(sock)
    return len(said)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_listener_rejects_another_user_without_the_secret(forks, tmp_path):
    ends = forks.run(2, another_user, str(tmp_path / "address"), SECRET.hex())
    assert [end.status for end in ends] == [0, 0], ends
    assert ends[1].value == 0
