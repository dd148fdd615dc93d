"""The proxy that does harm: each rule does what it says, and nothing else."""

import contextlib
import os
import random
import socket
import threading
import time
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.errors import BadArgument, UsageError
from unisono.testing import Proxy, _relay
from unisono.testing._streams import FaultRules, FaultSelection, ProxyStream

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def server():
    with socket.create_server(("127.0.0.1", 0)) as made:
        made.settimeout(20)
        yield made


@pytest.fixture
def proxy(server):
    with Proxy(server.getsockname()) as made:
        yield made


def dial(proxy):
    host, port = proxy.address.split(":")
    return socket.create_connection((host, int(port)), timeout=20)


@pytest.fixture
def ends(proxy, server):
    """Both ends of a connection through the proxy: the dialer's and the target's."""
    with dial(proxy) as dialer:
        target, _ = server.accept()
        target.settimeout(20)
        with target:
            yield dialer, target


def carry(src, dst, data):
    """What arrives when `data` is sent and the stream is ended."""

    def send():
        with contextlib.suppress(OSError):
            src.sendall(data)
            src.shutdown(socket.SHUT_WR)

    sender = threading.Thread(target=send)
    sender.start()
    got = bytearray()
    while piece := dst.recv(1 << 16):
        got += piece
    sender.join()
    return bytes(got)


def payload(nbytes, seed=1):
    return random.Random(seed).randbytes(nbytes)


def test_all_bytes_pass_both_ways_and_are_counted(proxy, ends):
    dialer, target = ends
    forth, back = payload(3_000_000), payload(1_000_000, seed=2)
    assert carry(dialer, target, forth) == forth
    assert carry(target, dialer, back) == back
    assert proxy.nbytes == {"forth": 3_000_000, "back": 1_000_000}
    assert proxy.connections == 1
    assert proxy.log == []


def test_many_connections_at_once_work(proxy, server):
    def echo():
        for _ in range(8):
            taken, _ = server.accept()
            threading.Thread(target=answer, args=(taken,)).start()

    def answer(taken):
        with taken:
            data = b""
            while piece := taken.recv(1 << 16):
                data += piece
            taken.sendall(data)

    threading.Thread(target=echo).start()
    dialed = [dial(proxy) for _ in range(8)]
    for number, one in enumerate(dialed):
        one.sendall(payload(100_000, number))
        one.shutdown(socket.SHUT_WR)
    for number, one in enumerate(dialed):
        with one:
            got = b""
            while piece := one.recv(1 << 16):
                got += piece
            assert got == payload(100_000, number)
    assert proxy.connections == 8


def test_delay_is_a_delay_of_every_byte(proxy, ends):
    dialer, target = ends
    proxy.delay(100, direction="forth")
    began = time.monotonic()
    assert carry(dialer, target, b"late") == b"late"
    assert time.monotonic() - began >= 0.1
    proxy.delay(0)


def test_throttle_is_never_faster(proxy, ends):
    dialer, target = ends
    proxy.throttle(1_000_000)
    began = time.monotonic()
    data = payload(300_000)
    assert carry(dialer, target, data) == data
    assert time.monotonic() - began >= 0.29
    proxy.throttle(None)
    assert carry(target, dialer, data) == data


def test_freeze_stops_all_bytes_and_thaw_loses_none(proxy, ends):
    dialer, target = ends
    proxy.freeze("forth")
    dialer.sendall(b"held")
    target.settimeout(0.2)
    with pytest.raises(TimeoutError):
        target.recv(4)
    target.sendall(b"free")  # the other direction is not frozen
    assert dialer.recv(4) == b"free"
    proxy.thaw()
    target.settimeout(20)
    assert target.recv(4) == b"held"


def test_frozen_stream_accepts_no_more_than_kernel_buffers(proxy, ends):
    dialer, _ = ends
    proxy.freeze()
    dialer.settimeout(0.3)
    with pytest.raises(TimeoutError):
        dialer.sendall(bytes(64 << 20))
    assert proxy.nbytes["forth"] == 0


def test_drop_resets_both_ends(proxy, ends):
    dialer, target = ends
    proxy.drop()
    for end in (dialer, target):
        with pytest.raises(ConnectionResetError):
            end.recv(1)
    assert [deed.what for deed in proxy.log] == ["drop", "drop"]


def test_refused_connections_are_reset_and_old_ones_go_on(proxy, ends):
    dialer, target = ends
    proxy.refuse()
    with pytest.raises(ConnectionResetError), dial(proxy) as refused:
        refused.recv(1)
    assert carry(dialer, target, b"still here") == b"still here"
    proxy.clear()
    with dial(proxy) as again:
        again.sendall(b"welcome")


def test_half_close_ends_one_direction_only(proxy, ends):
    dialer, target = ends
    proxy.half_close("forth")
    assert target.recv(1) == b""
    target.sendall(b"back it goes")
    assert dialer.recv(100) == b"back it goes"


def test_reset_of_one_end_resets_the_other(proxy, ends):
    dialer, target = ends
    dialer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    dialer.close()
    with pytest.raises(ConnectionResetError):
        target.recv(1)


def test_bit_is_flipped_at_the_given_position(proxy, ends):
    dialer, target = ends
    proxy.corrupt(at=[7, 99_999], bit=3, direction="forth")
    data = payload(200_000)
    wrong = bytearray(data)
    wrong[7] ^= 8
    wrong[99_999] ^= 8
    assert carry(dialer, target, data) == wrong
    assert carry(target, dialer, data) == data
    assert [(d.what, d.direction, d.offset) for d in proxy.log] == [
        ("corrupt", "forth", 7),
        ("corrupt", "forth", 99_999),
    ]


def test_next_byte_is_flipped_once(proxy, ends):
    dialer, target = ends
    dialer.sendall(b"abc")
    assert target.recv(3) == b"abc"
    proxy.corrupt(direction="forth")
    dialer.sendall(b"a")
    assert target.recv(1) == b"`"
    assert carry(dialer, target, b"abc") == b"abc"
    assert proxy.log[0].offset == 3


def flips_by_chance(seed, server):
    with Proxy(server.getsockname(), seed=seed) as proxy:
        proxy.corrupt(probability=0.001)
        with dial(proxy) as dialer:
            target, _ = server.accept()
            with target:
                data = payload(100_000)
                got = carry(dialer, target, data)
    found = [i for i, (a, b) in enumerate(zip(data, got, strict=True)) if a != b]
    assert found == [deed.offset for deed in proxy.log if deed.what == "corrupt"]
    return found


def test_random_faults_are_determined_by_the_seed(server):
    first = flips_by_chance(1, server)
    assert 50 < len(first) < 200
    assert flips_by_chance(1, server) == first
    assert flips_by_chance(2, server) != first


def test_truncated_stream_ends_early(proxy, ends):
    dialer, target = ends
    proxy.truncate(100_000, direction="forth")
    data = payload(300_000)
    assert carry(dialer, target, data) == data[:100_000]
    assert carry(target, dialer, b"whole") == b"whole"


def test_frame_can_be_duplicated(proxy, ends):
    dialer, target = ends
    proxy.duplicate(10, at=1, first=5, direction="forth")
    data = payload(100)
    assert carry(dialer, target, data) == data[:25] + data[15:25] + data[25:]
    assert [(d.what, d.offset) for d in proxy.log] == [("duplicate", 15)]


def test_two_frames_can_be_swapped(proxy, ends):
    dialer, target = ends
    proxy.reorder(10, at=2, direction="forth")
    data = payload(100)
    swapped = data[:20] + data[30:40] + data[20:30] + data[40:]
    assert carry(dialer, target, data) == swapped


def test_last_frame_is_not_lost_when_none_follows(proxy, ends):
    dialer, target = ends
    proxy.reorder(10, at=0, direction="forth")
    assert carry(dialer, target, b"0123456789") == b"0123456789"
    proxy.reorder(10, at=0, direction="back")
    target.sendall(b"0123456789")
    dialer.settimeout(0.2)
    with pytest.raises(TimeoutError):
        dialer.recv(10)
    proxy.clear()
    dialer.settimeout(20)
    assert dialer.recv(10) == b"0123456789"


class Pieces:
    """A socket that gives its bytes in pieces, and one that takes any."""

    def __init__(self, pieces=()):
        self.left, self.got = list(pieces), b""

    def recv_into(self, buffer):
        if not self.left:
            return 0
        piece = self.left.pop(0)
        buffer[: len(piece)] = piece
        return len(piece)

    def send(self, data):
        self.got += data
        return len(data)

    def shutdown(self, how):
        self.got += b"END"


@settings(max_examples=100)
@given(
    cuts=st.lists(st.integers(1, 499), max_size=20),
    rules=st.builds(
        lambda **values: values,
        truncate_at=st.none() | st.integers(0, 600),
        corrupt=st.builds(
            FaultSelection,
            st.frozensets(st.integers(0, 600)),
            st.sampled_from([0, 0.1, 1.0]),
        ),
        frame_nbytes=st.sampled_from([0, 1, 7, 64]),
        first_frame=st.integers(0, 80),
        duplicate=st.builds(
            FaultSelection, st.frozensets(st.integers(0, 99)), st.sampled_from([0, 0.2])
        ),
        reorder=st.builds(
            FaultSelection, st.frozensets(st.integers(0, 99)), st.sampled_from([0, 0.2])
        ),
    ),
)
def test_faults_do_not_depend_on_read_sizes(cuts, rules):
    data = payload(500)
    parts = []
    for places in ([], sorted({*cuts})):
        edges = [0, *places, len(data)]
        pieces = [data[a:b] for a, b in pairwise(edges)]
        source, sink, log = Pieces(pieces), Pieces(), []
        stream = ProxyStream(
            source,
            sink,
            FaultRules(**rules),
            "seed",
            lambda *deed, log=log: log.append(deed),
        )
        while stream.wants_to_read:
            stream.take(memoryview(bytearray(500)))
        stream.leave(time.monotonic())
        parts.append((sink.got, sorted(log)))
    assert parts[0] == parts[1]
    assert parts[0][0].endswith(b"END")


def test_clients_wait_until_there_is_a_target(server):
    with Proxy() as proxy, dial(proxy) as dialer:
        assert proxy.target is None
        dialer.sendall(b"early")
        host, port = server.getsockname()
        proxy.target = f"{host}:{port}"
        target, _ = server.accept()
        with target:
            assert target.recv(5) == b"early"


def test_ipv6_works_on_both_sides():
    with (
        socket.create_server(("::1", 0), family=socket.AF_INET6) as server,
        Proxy(f"[::1]:{server.getsockname()[1]}", listen="::1") as proxy,
        socket.create_connection(("::1", int(proxy.address[6:])), 20) as dialer,
    ):
        server.settimeout(20)
        target, _ = server.accept()
        with target:
            assert carry(dialer, target, b"six") == b"six"


def test_unreachable_target_resets_the_client(server):
    where = server.getsockname()
    server.close()
    with Proxy(where) as proxy:
        with pytest.raises(ConnectionResetError), dial(proxy) as dialer:
            dialer.recv(1)
        assert {deed.what for deed in proxy.log} == {"lost"}


def test_closing_while_the_thread_ends_by_another_event(server, monkeypatch):
    proxy = Proxy(server.getsockname())
    thread = proxy._relay._thread

    def write_late(descriptor, data):
        with contextlib.suppress(ConnectionError):  # it is reset as the thread ends
            dial(proxy).close()  # wakes the thread, which ends before it is told to
        thread.join()
        return os.write(descriptor, data)

    late = SimpleNamespace(**{**vars(os), "write": write_late})
    monkeypatch.setattr(_relay, "os", late)
    proxy.close()
    with pytest.raises(UsageError, match="closed"):
        proxy.freeze()


def ask_until_refused(proxy, refusals):
    try:
        while True:
            proxy.delay(0.0)
    except UsageError as why:
        refusals.append(str(why))


def test_what_is_asked_while_another_thread_closes_is_done_or_refused(server):
    for _ in range(20):
        proxy, refusals = Proxy(server.getsockname()), []
        asking = [
            threading.Thread(target=ask_until_refused, args=(proxy, refusals))
            for _ in range(2)
        ]
        for thread in asking:
            thread.start()
        proxy.close()
        for thread in asking:
            thread.join()
        assert ["closed" in why for why in refusals] == [True, True]


def test_closing_leaves_nothing(server):
    before = set(threading.enumerate())
    proxy = Proxy(server.getsockname())
    dialer = dial(proxy)
    target, _ = server.accept()
    proxy.close()
    proxy.close()
    with dialer, target, pytest.raises(ConnectionResetError):
        dialer.recv(1)
    with pytest.raises(ConnectionRefusedError):
        dial(proxy)
    assert set(threading.enumerate()) <= before
    with pytest.raises(UsageError, match="closed"):
        proxy.freeze()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda p: p.delay(-1), "0 or more"),
        (lambda p: p.delay(float("nan")), "0 or more"),
        (lambda p: p.throttle(0), "more than 0"),
        (lambda p: p.corrupt(at=-1), "0 or more"),
        (lambda p: p.corrupt(at="x"), "whole number"),
        (lambda p: p.corrupt(bit=8), "bits 0 to 7"),
        (lambda p: p.corrupt(probability=1.5), "0 to 1"),
        (lambda p: p.truncate(-5), "0 or more"),
        (lambda p: p.duplicate(0, at=1), "at least 1"),
        (lambda p: p.reorder(10), "give at= or probability="),
        (lambda p: p.reorder(10, at=1, first=-1), "0 or more"),
        (lambda p: p.freeze("sideways"), "unknown direction"),
        (lambda p: p.half_close("up"), "unknown direction"),
        (lambda p: setattr(p, "target", "nowhere"), "host:port"),
        (lambda p: setattr(p, "target", ("127.0.0.1", 0)), "1 to 65535"),
    ],
)
def test_wrong_rules_are_refused(proxy, wrong, message):
    with pytest.raises(BadArgument, match=message):
        wrong(proxy)
