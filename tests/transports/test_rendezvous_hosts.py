"""Ranks on several hosts connect, or all get the reason."""

import contextlib
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait

import msgspec
import pending_clients
import pytest

from forked import attempt
from unisono.errors import BadArgument, ConnectFailed, NotAuthentic
from unisono.transports import connect, rendezvous_hosts
from unisono.transports.addresses import Address
from unisono.transports.connect import connect_to
from unisono.transports.control import ControlMessages
from unisono.transports.handshake import RENDEZVOUS, Identity, Refused, data_purpose
from unisono.transports.rank_table import host_identity
from unisono.transports.rendezvous_hosts import rendezvous
from unisono.transports.secret import Secret, make_secret

pytestmark = [pytest.mark.timeout(240), pytest.mark.one_in(2)]

SECRET = make_secret()
GENEROUS_S = 60.0


class Gathering:
    """Ranks as threads: each gets the address of rank 0 once it listens."""

    def __init__(self, host="127.0.0.1"):
        self.host = host
        self.address = None
        self.announced = threading.Event()

    def announce(self, address):
        self.address = address
        self.announced.set()

    def come(self, rank, n, **options):
        options = {"secret": SECRET, "version": "1", "timeout_s": GENEROUS_S} | options
        job = options.pop("job", "job")
        where = str(Address(self.host, 0))
        if rank > 0:
            assert self.announced.wait(GENEROUS_S)
            where = str(self.address)
        else:
            options["announce"] = self.announce
        return rendezvous(rank, n, job, where, **options)

    def run(self, *calls, during=None):
        """The value or the error of each call (rank, n, options)."""
        with ThreadPoolExecutor(len(calls)) as pool:
            futures = [pool.submit(self.come, r, n, **o) for r, n, o in calls]
            if during is not None:
                during()
            wait(futures)
        ends = [f.exception() or f.result() for f in futures]
        errors = [end for end in ends if isinstance(end, Exception)]
        if errors:
            for end in ends:
                if not isinstance(end, Exception):
                    end.close()
        return ends


def all_of(n, **options):
    return [(rank, n, options) for rank in range(n)]


@contextlib.contextmanager
def connected(n, host="127.0.0.1", **options):
    tables = Gathering(host).run(*all_of(n, **options))
    assert not [r for r in tables if isinstance(r, Exception)], tables
    try:
        yield tables
    finally:
        for table in tables:
            table.close()


@pytest.fixture
def hasty(monkeypatch):
    monkeypatch.setattr(connect, "REFUSED_S", 0.2)
    monkeypatch.setattr(rendezvous_hosts, "_GRACE_S", 0.5)


@pytest.fixture
def extended_wait(monkeypatch):
    """Rank 0 does not time out before a condition holds, whatever its timeout."""

    def until(holds, tick_s=GENEROUS_S):
        left, end = (
            rendezvous_hosts._Server.left.fget,
            time.monotonic() + 3 * GENEROUS_S,
        )

        def lasting(self):
            return left(self) if holds(self) or time.monotonic() > end else tick_s

        monkeypatch.setattr(rendezvous_hosts._Server, "left", property(lasting))

    return until


# --- ranks that connect


@pytest.mark.parametrize("n", [1, 2, 5, 13])
def test_all_ranks_have_the_same_rank_table(n):
    with connected(n) as tables:
        for rank, table in enumerate(tables):
            assert table.rank == rank
            assert table.entries == tables[0].entries
            assert [e.rank for e in table.entries] == list(range(n))
            assert {e.pid for e in table.entries} == {os.getpid()}
            assert table.hosts == [0] * n
            assert table.local() == list(range(n))
            others = range(1, n) if rank == 0 else [0]
            assert sorted(table.lifelines) == list(others)
            assert str(table.peers[0]).startswith("rank 0 (pid ")


def test_lifelines_are_those_of_their_ranks():
    with connected(4) as tables:
        for rank in range(1, 4):
            here, there = tables[0].lifelines[rank], tables[rank].lifelines[0]
            assert here.send_key == there.receive_key
            assert here.purpose.kind == "life"
            here.socket.sendall(bytes([rank]))
            assert there.socket.recv(1) == bytes([rank])


def test_every_two_ranks_can_connect_afterwards():
    with connected(3) as tables:
        for one in range(3):
            for two in range(one):
                there = tables[one].listener.connect(two, data_purpose(1), GENEROUS_S)
                here = tables[two].listener.expect(one, data_purpose(1), GENEROUS_S)
                assert here.send_key == there.receive_key
                here.close()
                there.close()


@pytest.mark.parametrize("host", ["::1", "localhost"])
def test_rank_0_can_be_named_by_host_or_ipv6(host):
    with connected(2, host) as tables:
        assert "was given as the address" in tables[0].why
        assert "on lo: the route to" in tables[1].why


def test_interface_is_chosen_by_name():
    with connected(2, interface="lo") as tables:
        for table in tables:
            assert "UNISONO_INTERFACE=lo names the interface" in table.why


def test_all_interfaces_are_used_if_named():
    with connected(3, interface="0.0.0.0") as tables:
        assert tables[1].listener.address.host == "0.0.0.0"
        assert tables[1].entries[2].address.startswith("127.0.0.1:")
        tables[1].listener.connect(2, data_purpose(1), GENEROUS_S).close()


def test_rendezvous_without_secret_works_on_loopback():
    with connected(2, secret=None) as tables:
        assert tables[0].listener.me.secret.is_open


def is_on(rank, folder, hosts, secret):
    os.environ["UNISONO_HOST_ID"] = hosts[rank.number]
    table = comes_from_a_process(rank, folder, secret)
    found = [table.hosts, [table.local(r) for r in range(rank.n)]]
    found.append([str(peer) for peer in table.peers])
    table.close()
    return found


def comes_from_a_process(rank, folder, secret, **options):
    """Rendezvous by a file with rank 0's port."""
    options = {"version": "1", "timeout_s": GENEROUS_S} | options
    path = f"{folder}/address"
    where = "127.0.0.1:0"

    def announce(address):
        with open(path + ".new", "w") as file:
            file.write(str(address))
        os.rename(path + ".new", path)

    if rank.number > 0:
        until = time.monotonic() + GENEROUS_S
        while not os.path.exists(path):
            assert time.monotonic() < until
            time.sleep(0.005)
        with open(path) as file:
            where = file.read()
    return rendezvous(
        *(rank.number, rank.n, rank.job, where),
        secret=Secret(bytes.fromhex(secret)),
        announce=announce,
        **options,
    )


def test_hosts_are_distinguished_by_identity(forks, tmp_path):
    hosts = ["b", "a", "b", "c", "a"]
    ends = forks.run(5, is_on, str(tmp_path), hosts, SECRET.hex())
    for end in ends:
        assert end.value is not None, end.stderr
        numbers, local, peers = end.value
        assert numbers == [0, 1, 0, 2, 1]
        assert local == [[0, 2], [1, 4], [0, 2], [3], [1, 4]]
        for r, other in enumerate(ends):
            assert peers[r] == f"rank {r} (pid {other.pid} on {hosts[r]})"


def test_host_id_emulates_hosts_and_joins_none(monkeypatch):
    monkeypatch.delenv("UNISONO_HOST_ID", raising=False)
    mine = host_identity()
    monkeypatch.setenv("UNISONO_HOST_ID", "emulated")
    assert host_identity() == "emulated" + mine
    assert "pid:[" in mine
    assert "net:[" in mine


# --- those who do not


@pytest.mark.parametrize("absent", [[2], [1, 2]])
def test_missing_ranks_are_named_to_all(absent, hasty, extended_wait):
    present = [rank for rank in range(1, 4) if rank not in absent]
    extended_wait(lambda hosting: all(map(hosting._is_connected, present)))
    calls = [(rank, 4, {}) for rank in present]
    for end in Gathering().run((0, 4, {"timeout_s": 0.4}), *calls):
        assert isinstance(end, ConnectFailed), end
        assert end.missing == tuple(absent)
        assert "did not connect to 127.0.0.1:" in str(end)
        assert "within 0.4 s; " + f"{4 - len(absent)} of 4 did" in str(end)


def test_rendezvous_without_rank_0_times_out(hasty):
    with socket.create_server(("127.0.0.1", 0)) as keeper:
        address = Address(*keeper.getsockname())
    with pytest.raises(ConnectFailed, match="Connection refused") as caught:
        rendezvous(1, 2, "job", str(address), secret=SECRET, version="1", timeout_s=0.3)
    assert caught.value.missing == (0,)
    assert str(address) in str(caught.value)


@pytest.mark.parametrize(
    ("rank", "n", "options", "says"),
    [
        (1, 5, {}, "rank 1 has world size 5, rank 0 has 3"),
        (4, 5, {}, "rank 4 has world size 5, rank 0 has 3"),
        (1, 3, {"version": "0.7"}, "rank 1 runs unisono 0.7, rank 0 1: install the"),
        (2, 3, {}, f"two processes are rank 2: pid {os.getpid()} on "),
    ],
    ids=["another size", "too high a rank", "another version", "the same rank"],
)
def test_rank_that_does_not_fit_is_reported_to_all(
    rank, n, options, says, hasty, monkeypatch
):
    gathering = Gathering()
    greet, greeted = rendezvous_hosts._Server._greet, threading.Event()

    def greet_and_tell(self, messages):
        greet(self, messages)
        greeted.set()

    def comes_last():
        assert greeted.wait(GENEROUS_S)
        with pytest.raises(ConnectFailed) as caught:
            gathering.come(rank, n, **options)
        ends.append(caught.value)

    monkeypatch.setattr(rendezvous_hosts._Server, "_greet", greet_and_tell)
    ends = []
    ends += gathering.run((0, 3, {}), (2, 3, {}), during=comes_last)
    assert len(ends) == 3
    for end in ends:
        assert isinstance(end, ConnectFailed), end
        assert says in str(end)


def test_rank_of_another_job_is_refused_and_the_others_connect(hasty):
    ends = Gathering().run(*all_of(2), (1, 2, {"job": "other"}))
    assert isinstance(ends[2], Refused)
    assert "belongs to another job than 'other'" in str(ends[2])
    assert [e for e in ends[:2] if isinstance(e, Exception)] == []


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"secret": make_secret()}, NotAuthentic, "give all ranks the same UNISONO_SE"),
        ({"secret": None}, NotAuthentic, "give all ranks the same UNISONO_SECRET"),
        (
            {"epoch": 3, "timeout_s": 2.0},  # it waits for rank 0 to follow
            Refused,
            "rank 0 is in epoch 0 of the job, rank 1 in 3",
        ),
        ({"job": "other"}, Refused, "belongs to another job"),
    ],
)
def test_refused_client_gets_the_reason_and_rank_0_waits_on(
    options, error, says, hasty, extended_wait
):
    gathering, tried = Gathering(), threading.Event()
    extended_wait(lambda hosting: tried.is_set(), tick_s=0.1)

    def comes():
        try:
            with pytest.raises(error) as caught:
                gathering.come(1, 2, **options)
        finally:
            tried.set()
        assert says in str(caught.value)

    (host,) = gathering.run((0, 2, {"timeout_s": 0.1}), during=comes)
    assert isinstance(host, ConnectFailed)
    assert host.missing == (1,)
    assert "rejected, the last from 127.0.0.1" in str(host)


def test_clients_retry_after_a_rank_0_of_an_earlier_job():
    """The run before ends while the next begins, at the same place."""
    before = Gathering()
    (stale,) = before.run((0, 1, {"job": "before"}))
    where = str(stale.listener.address)
    with ThreadPoolExecutor(2) as pool:
        ends = [
            pool.submit(
                *(rendezvous, r, 2, "job", where),
                secret=SECRET,
                version="1",
                timeout_s=GENEROUS_S,
            )
            for r in range(2)
        ]
        time.sleep(0.2)
        stale.close()
        for end in ends:
            end.result().close()


def test_rendezvous_port_in_use_is_reported():
    with socket.create_server(("127.0.0.1", 0)) as other:
        where = str(Address(*other.getsockname()))
        with pytest.raises(ConnectFailed, match="another program, or another job"):
            rendezvous(0, 2, "job", where, secret=SECRET, version="1", timeout_s=0.1)


@pytest.mark.parametrize("rank", [0, 1])
def test_rendezvous_without_secret_refuses_network_addresses(rank):
    with pytest.raises(BadArgument, match="has no secret"):
        rendezvous(
            *(rank, 2, "job", "192.0.2.1:29500"),
            secret=None,
            version="1",
            timeout_s=0.1,
            interface="0.0.0.0",
        )


@pytest.mark.parametrize(
    ("rank", "where", "says"),
    [
        (2, "127.0.0.1:1", "rank = 2: expected 0 to 1"),
        (-1, "127.0.0.1:1", "rank = -1"),
        (1, "127.0.0.1:0", "needs the real port"),
        (0, "127.0.0.1", "expected host:port"),
    ],
)
def test_rendezvous_refuses_bad_arguments(rank, where, says):
    with pytest.raises(BadArgument, match=says):
        rendezvous(rank, 2, "job", where, secret=SECRET, version="1")


# --- those who die, lie or only look


def test_rank_that_died_waiting_may_connect_again():
    gathering = Gathering()

    def dies():
        assert gathering.announced.wait(GENEROUS_S)
        for _ in range(2):
            one = says_hello(gathering, 1, 3)
            one.close()
        gathering.come_again.set()

    gathering.come_again = threading.Event()

    def later(rank, n, **options):
        if rank == 1:
            assert gathering.come_again.wait(GENEROUS_S)
        return Gathering.come(gathering, rank, n, **options)

    gathering.come = later
    tables = gathering.run(*all_of(3), during=dies)
    for table in tables:
        assert not isinstance(table, Exception), table
        table.close()


def says_hello(gathering, rank, n, **changes):
    """A rank that comes no further than its hello."""
    me = Identity(SECRET, "job", rank)
    connection = connect_to(gathering.address, me, 0, RENDEZVOUS, timeout_s=GENEROUS_S)
    hello = rendezvous_hosts._hello(rank, n, "1", Address("127.0.0.1", 1))
    for name, value in changes.items():
        if name != "address":
            setattr(hello, name, value)
        else:
            hello.entry = msgspec.structs.replace(hello.entry, address=value)
    ControlMessages(connection).send(hello, timeout_s=GENEROUS_S)
    return connection


@pytest.mark.parametrize(
    "changes",
    [
        {"address": "nonsense"},
        {"version": None},
        {"world_size": "many"},
        {"version": "x" * 5000},
        {"entry": [1, 2]},
    ],
)
def test_unreadable_hello_fails_the_rendezvous(changes, hasty):
    gathering = Gathering()
    opened = []

    def lies():
        assert gathering.announced.wait(GENEROUS_S)
        opened.append(says_hello(gathering, 1, 2, **changes))

    (end,) = gathering.run((0, 2, {}), during=lies)
    assert isinstance(end, ConnectFailed)
    assert "the hello of rank 1 cannot be read" in str(end)
    opened[0].close()


def test_hello_with_another_rank_fails_the_rendezvous(hasty):
    gathering = Gathering()

    def lies():
        assert gathering.announced.wait(GENEROUS_S)
        entry = rendezvous_hosts._hello(2, 3, "1", Address("127.0.0.1", 1)).entry
        says_hello(gathering, 1, 3, entry=entry).close()

    (end,) = gathering.run((0, 3, {}), during=lies)
    assert "rank 1 has sent the hello of rank 2" in str(end)


def test_rank_without_lifeline_is_missing(hasty, extended_wait):
    """A rank that stops between its hello and its lifeline is named."""
    gathering = Gathering()
    extended_wait(lambda hosting: hosting.clients)
    opened = []

    def stops():
        assert gathering.announced.wait(GENEROUS_S)
        opened.append(says_hello(gathering, 1, 2))

    (end,) = gathering.run((0, 2, {"timeout_s": 0.5}), during=stops)
    assert isinstance(end, ConnectFailed)
    assert end.missing == (1,)
    assert "rank 1 did not connect" in str(end)
    opened[0].close()


def test_pending_clients_do_not_disturb_the_rendezvous():
    gathering = Gathering()

    def pending():
        assert gathering.announced.wait(GENEROUS_S)
        with contextlib.ExitStack() as stack:
            for number in range(100):
                sock = stack.enter_context(pending_clients.connect(gathering.address))
                pending_clients.ALL[number % len(pending_clients.ALL)](sock)

    tables = gathering.run(*all_of(4), during=pending)
    for table in tables:
        assert not isinstance(table, Exception), table
        assert table.hosts == [0] * 4
        table.close()


def is_killed(rank, folder, victim, secret):
    """All connect, one is killed, and whose lifeline leads to it reads its end."""
    table = comes_from_a_process(rank, folder, secret)
    if rank.number == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    watched = table.lifelines.get(victim)
    if watched is None:
        return "not watching"
    watched.socket.settimeout(GENEROUS_S)
    try:
        ended = watched.socket.recv(1) == b""
    except ConnectionError:
        ended = True
    table.close()
    return ended


@pytest.mark.parametrize("victim", [0, 2])
def test_lifeline_ends_with_its_process(victim, forks, tmp_path):
    ends = forks.run(3, is_killed, str(tmp_path), victim, SECRET.hex())
    assert ends[victim].status == -signal.SIGKILL
    watching = {0: [1, 2], 2: [0]}[victim]
    for end in ends:
        if end.rank in watching:
            assert end.value is True, end
        elif end.rank != victim:
            assert end.value == "not watching"


def rank_0_dies(rank, folder, secret):
    """When rank 1 has come with its lifeline, and waits for the third."""
    if rank.number == 0:
        true_wait = rendezvous_hosts._Server._await_clients

        def wait(self):
            true_wait(self)
            if self._is_connected(1):
                os.kill(os.getpid(), signal.SIGKILL)

        rendezvous_hosts._Server._await_clients = wait
    if rank.number == 2:
        return None
    return attempt(comes_from_a_process, rank, folder, secret)


def test_clients_fail_when_rank_0_dies(forks, tmp_path):
    ends = forks.run(3, rank_0_dies, str(tmp_path), SECRET.hex())
    error = ends[1].value
    assert error["error"] == "ConnectFailed"
    assert (
        error["message"]
        == "rank 0 closed the connection at the rendezvous: it has died"
    )
    assert error["attributes"]["missing"] == [0]
