"""Encryption between two ends: what an eavesdropper sees, and what a meddler achieves.

The two ends speak through a middle that the test plays: it holds every byte until it
passes it on, changed or not.
"""

import contextlib
import errno
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stars import Star, keys, pair, until

from unisono import _native
from unisono.errors import (
    BadArgument,
    Corrupted,
    MissingExtra,
    MissingLibrary,
    NotAuthentic,
    PeerLost,
)
from unisono.transports import connect, tls
from unisono.transports.addresses import Address
from unisono.transports.control import ControlMessages
from unisono.transports.handshake import (
    RENDEZVOUS,
    ClientHandshake,
    HandshakeResult,
    Identity,
    Refused,
    ServerHandshake,
)
from unisono.transports.handshake import data_purpose as data_label
from unisono.transports.listener import Listener
from unisono.transports.rank_table import RankEntry
from unisono.transports.secret import make_secret, open_secret

pytestmark = pytest.mark.timeout(60)

SECRET = make_secret()
KEY = bytes(range(32))
GENEROUS_S = 60.0
SEALED = 16 * 1024 + 22  # the largest record that is sent, on the wire


class Middle:
    """A dialer, an answerer, and who sits between: the bytes of each are kept."""

    def __init__(self, keys=(KEY, KEY), **options):
        self.ends, self.socks, self.wire = [], [], [b"", b""]
        for dials, key in zip((True, False), keys, strict=True):
            near, far = socket.socketpair()
            far.setblocking(False)
            self.socks += [near, far]
            self.ends.append(_native.Tls(near.fileno(), key, dials, **options))

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for sock in self.socks:
            sock.close()

    def caught(self, source):
        """What one end has said since it was last asked."""
        raw = b""
        with contextlib.suppress(BlockingIOError):
            while more := self.socks[2 * source + 1].recv(1 << 20):
                raw += more
        self.wire[source] += raw
        return raw

    def put(self, target, raw):
        """Say something to one end."""
        self.socks[2 * target + 1].sendall(raw)

    def open(self, change=lambda source, raw: raw):
        """The opening, as far as it gets."""
        for _ in range(6):
            for source in (0, 1):
                tls.continue_handshake(self.ends[source])
                self.put(1 - source, change(source, self.caught(source)))
        return [end.handshake() for end in self.ends] == [0, 0]

    def says(self, data, source=0):
        """The records in which one end says this, not passed on."""
        before = len(self.wire[source])
        while data:
            data = data[self.ends[source].send(data) :]
        self.caught(source)
        return self.wire[source][before:]

    def hears(self, target=1):
        """All that an end has received."""
        received = b""
        with contextlib.suppress(BlockingIOError):
            while more := self.ends[target].recv(1 << 20):
                received += more
        return received


@pytest.fixture
def middle():
    with Middle() as made:
        assert made.open()
        yield made


def refuses(middle, target=1):
    """Whether what came is refused for what it is, and nothing of it heard."""
    try:
        middle.hears(target)
    except OSError as why:
        return why.errno == errno.EBADMSG
    return False


@settings(max_examples=30)
@given(st.lists(st.binary(max_size=40_000), max_size=6), st.sampled_from([0, 1]))
def test_sent_bytes_are_received(parts, source):
    with Middle() as middle:
        assert middle.open()
        for part in parts:
            middle.put(1 - source, middle.says(part, source))
            assert middle.hears(1 - source) == part


def test_ciphertext_shows_no_plain_text(middle):
    pattern = b"the weights of the model"
    wire = middle.says(pattern * 5000)
    assert pattern[:8] not in wire
    assert len(wire) > len(pattern) * 5000
    assert wire.count(wire[100:116]) == 1  # nor that it is the same again and again
    middle.put(1, wire)
    assert middle.hears() == pattern * 5000


def test_two_connections_with_one_key_have_different_ciphertext():
    wires = []
    for _ in range(2):
        with Middle() as middle:
            assert middle.open()
            wires.append(middle.says(bytes(64)))
    assert wires[0][:5] == wires[1][:5]  # the head: a record, and how long it is
    assert wires[0][5:] != wires[1][5:]


def test_changed_record_byte_is_detected():
    with Middle() as middle:
        assert middle.open()
        nbytes = len(middle.says(b"one record"))
    for at in range(nbytes):
        with Middle() as middle:
            assert middle.open()
            wire = bytearray(middle.says(b"one record"))
            wire[at] ^= 1
            middle.put(1, wire + middle.says(bytes(700)))  # if it waits for more
            assert refuses(middle)


def test_repeated_or_omitted_records_are_refused(middle):
    wires = [middle.says(word) for word in (b"first", b"second", b"third")]
    middle.put(1, wires[0])
    assert middle.hears() == b"first"
    with Middle() as other:
        assert other.open()
        own = [other.says(word) for word in (b"first", b"second", b"third")]
        other.put(1, own[1])  # left out
        assert refuses(other)
    middle.put(1, wires[0])  # repeated
    assert refuses(middle)


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.0\r\n\r\n", bytes(5), b"\x17\x03\x03\0\1x"]
)
def test_bytes_of_other_protocols_are_refused(middle, said):
    middle.put(1, said + bytes(64))
    assert refuses(middle)


def test_reflected_records_are_refused(middle):
    middle.put(0, middle.says(b"mine"))
    assert refuses(middle, 0)


@pytest.mark.parametrize("source", [0, 1])
def test_changed_handshake_byte_fails_the_handshake(source):
    """Or what is changed does not matter: never do the two ends hear it differently."""
    with Middle() as middle:
        assert middle.open()
        nbytes = len(middle.wire[source])
    for at in range(0, nbytes, 3):
        seen = 0

        def flip(one, raw, at=at):
            nonlocal seen
            changed = bytearray(raw)
            if one == source:
                if seen <= at < seen + len(raw):
                    changed[at - seen] ^= 0x40
                seen += len(raw)
            return changed

        with Middle() as middle, contextlib.suppress(NotAuthentic, OSError):
            if middle.open(flip):
                pytest.fail(f"byte {at} of {nbytes} changed, and nobody noticed")


def test_peer_with_another_key_is_refused():
    with (
        Middle(keys=(KEY, bytes(32))) as middle,
        pytest.raises(NotAuthentic, match="does not hold the key"),
    ):
        middle.open()


def test_key_is_updated_during_a_connection():
    with Middle(lifetime=100_000) as middle:
        assert middle.open()
        for _ in range(8):
            raw = os.urandom(60_000)
            middle.put(1, middle.says(raw))
            assert middle.hears() == raw
        assert 3 <= middle.ends[0].key_updates() <= 4
        middle.put(0, middle.says(b"back", source=1))
        assert middle.hears(0) == b"back"


def test_full_socket_makes_the_sender_retry_without_loss():
    """More than the socket holds, read slowly: nothing is lost or said twice."""
    near, far = socket.socketpair()
    with near, far:
        ends = [
            _native.Tls(sock.fileno(), KEY, dials)
            for sock, dials in ((near, True), (far, False))
        ]
        while any([tls.continue_handshake(end) for end in ends]):
            pass
        raw, sent, got, waited = os.urandom(3_000_000), 0, b"", 0
        while len(got) < len(raw):
            try:
                while sent < len(raw):
                    sent += ends[0].send(raw[sent : sent + 50_000])
            except BlockingIOError:
                waited += 1
            with contextlib.suppress(BlockingIOError):
                got += ends[1].recv(1000)
                got += ends[1].recv(100_000)
        assert got == raw
        assert waited


def test_decrypted_bytes_not_yet_read_are_pending(middle):
    middle.put(1, middle.says(bytes(1000)))
    assert middle.ends[1].recv(10) == bytes(10)
    assert middle.ends[1].has_pending()  # though the socket is empty
    assert middle.hears() == bytes(990)
    assert not middle.ends[1].has_pending()


def test_end_of_stream_is_reported(middle):
    middle.put(1, middle.says(b"last"))
    middle.socks[3].close()
    assert middle.ends[1].recv(10) == b"last"
    assert middle.ends[1].recv(10) == b""
    with pytest.raises(ConnectionError):
        middle.ends[1].send(b"to nobody")


def test_tls_key_of_the_wrong_size_is_refused():
    with pytest.raises(ValueError, match="32 bytes"):
        _native.Tls(0, b"short", True)


# --- whether it is wanted, and can be had


def test_tls_option_is_mutual_or_nothing():
    assert tls.wanted("mutual")
    assert not tls.wanted(None)
    assert not tls.wanted("")
    with pytest.raises(BadArgument, match="UNISONO_TLS = 'yes': expected 'mutual'"):
        tls.wanted("yes", "UNISONO_TLS")


def test_tls_without_a_secret_is_refused():
    tls.check(SECRET)
    with pytest.raises(BadArgument, match="this job has no secret"):
        tls.check(open_secret("job"))
    with pytest.raises(BadArgument, match="this job has no secret"):
        tls.check(None)


def test_missing_openssl_error_says_what_to_install(tmp_path):
    """A library that is none stands before the real one."""
    (tmp_path / "libssl.so.3").write_bytes(b"no library")
    script = (
        "import unisono\n"
        "from unisono.testing import world\n"
        "world(2, hosts=(0, 1)).run(lambda comm: comm.barrier())\n"
        "try: unisono.init(0, 2, job='job', tls='mutual')\n"
        "except unisono.MissingLibrary as why: print(why)\n"
    )
    output = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ
        | {
            "LD_LIBRARY_PATH": str(tmp_path),
            "UNISONO_ADDRESS": "127.0.0.1:9",
            "UNISONO_SECRET": SECRET.hex(),
        },
        capture_output=True,
        text=True,
        check=True,
        timeout=50,
    ).stdout
    assert "tls='mutual' needs OpenSSL 3" in output
    assert "apt install libssl3" in output
    assert issubclass(MissingLibrary, MissingExtra)


# --- the handshake that goes before


def handshake(one_wants, other_wants):
    one = Identity(SECRET, "job", 1, tls=one_wants)
    other = Identity(SECRET, "job", 2, tls=other_wants)
    dialer, answerer = ClientHandshake(one, 2, RENDEZVOUS), ServerHandshake(other)
    return dialer, answerer, answerer.take(dialer.opening)


def test_both_sides_derive_the_same_tls_key():
    dialer, answerer, answer = handshake(True, True)
    answerer.take(dialer.take(answer))
    assert dialer.authenticated.tls_key == answerer.authenticated.tls_key
    assert len(dialer.authenticated.tls_key) == 32
    assert dialer.authenticated.tls_key.hex() not in repr(dialer.authenticated)
    dialer, answerer, answer = handshake(False, False)
    answerer.take(dialer.take(answer))
    assert dialer.authenticated.tls_key == answerer.authenticated.tls_key == b""


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (True, False, "rank 2 does not encrypt, rank 1 does"),
        (False, True, "rank 2 encrypts, rank 1 does not"),
    ],
)
def test_handshake_reports_a_tls_mismatch_to_both_sides(one, other, said):
    dialer, answerer, answer = handshake(one, other)
    assert answerer.refusal is None  # the offer might be a recorded one
    answerer.take(dialer.take(answer))
    assert answerer.authenticated is dialer.authenticated is None
    assert answerer.refusal.result == HandshakeResult.OTHER_TLS
    assert "rank 1" in str(answerer.refusal)
    assert "UNISONO_TLS=mutual" in str(answerer.refusal)
    assert said in str(dialer.refusal)


def test_tls_mismatch_needs_an_authentic_confirmation():
    _, answerer, _ = handshake(True, False)
    with pytest.raises(NotAuthentic):
        answerer.take(bytes(32))
    assert answerer.refusal is None


# --- at a listener


def listener(rank, wants=True, **options):
    member = Identity(SECRET, "job", rank, tls=wants)
    return Listener(Address("127.0.0.1", 0), member, **options)


def test_peer_with_another_secret_fails_before_tls(monkeypatch):
    monkeypatch.setattr(connect, "REFUSED_S", 0.2)
    intruder = Identity(make_secret(), "job", 1, tls=True)
    with listener(0) as host, pytest.raises(NotAuthentic, match="without an answer"):
        connect.connect_to(host.address, intruder, 0, RENDEZVOUS, timeout_s=GENEROUS_S)


@pytest.mark.parametrize("host_wants", [True, False])
def test_listener_and_client_report_a_tls_mismatch(host_wants):
    with listener(0, host_wants) as host, listener(1, not host_wants) as guest:
        guest.add_addresses({0: host.address})
        with pytest.raises(Refused, match="give all ranks the same, tls='mutual'"):
            guest.connect(0, RENDEZVOUS, GENEROUS_S)
        assert host.next_of("rdzv", timeout_s=GENEROUS_S) == []
        assert "rank 1" in host.tls_mismatch


def test_control_messages_are_encrypted():
    with listener(0) as host, listener(1) as guest, ThreadPoolExecutor() as pool:
        guest.add_addresses({0: host.address})
        expected = pool.submit(host.expect, 1, RENDEZVOUS, GENEROUS_S)
        mine, theirs = (
            guest.connect(0, RENDEZVOUS, GENEROUS_S),
            expected.result(GENEROUS_S),
        )
        assert mine.tls is not None
        assert theirs.tls is not None
        entry = RankEntry(1, 2, "host", "identity" * 9000, 4, "address")
        sent = pool.submit(ControlMessages(mine).send, entry, timeout_s=GENEROUS_S)
        got = ControlMessages(theirs).receive(
            RankEntry, longest=1 << 20, timeout_s=GENEROUS_S
        )
        sent.result(GENEROUS_S)
        assert got == entry
        with pytest.raises(TimeoutError):
            theirs.receive(1, timeout_s=0.01)
        mine.socket.sendall(b"in the clear, as nobody of this job would" * 9)
        with pytest.raises(Corrupted, match="changed on its way"):
            theirs.receive(1, timeout_s=GENEROUS_S)
        mine.close()
        theirs.close()


@pytest.mark.parametrize("then", ["rubbish", "nothing"])
def test_client_that_fails_tls_does_not_delay_others(then):
    with listener(0, handshake_s=0.5) as host, listener(1) as guest:
        guest.add_addresses({0: host.address})
        rules = ClientHandshake(Identity(SECRET, "job", 1, tls=True), 0, RENDEZVOUS)
        where = (host.address.host, host.address.port)
        with socket.create_connection(where, timeout=GENEROUS_S) as intruder:
            intruder.sendall(rules.opening)
            answer = intruder.recv(rules.wanted, socket.MSG_WAITALL)
            intruder.sendall(rules.take(answer))
            if then == "rubbish":
                intruder.sendall(bytes(500))
            made = guest.connect(0, data_label(3), GENEROUS_S)  # meanwhile, another
            host.expect(1, data_label(3), GENEROUS_S).close()
            made.close()
            with contextlib.suppress(ConnectionError):
                while intruder.recv(100):
                    pass
        until(lambda: host.rejected == 1, "it is turned away")


def test_silent_peer_times_out_in_the_tls_handshake():
    """A dialer whose opening is never answered times out."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sock = socket.create_connection(server.getsockname())
        began = time.monotonic()
        with sock, pytest.raises(TimeoutError):
            tls.client_handshake(sock, KEY, timeout_s=0.2)
        assert time.monotonic() - began < GENEROUS_S


def test_tls_handshake_ends_when_the_silent_peer_is_known_to_be_lost():
    """It need not wait for its timeout, which is longer than a shrink of others."""

    def look():
        raise PeerLost("rank 1 is dead", ranks=[1])

    with socket.create_server(("127.0.0.1", 0)) as server:
        sock = socket.create_connection(server.getsockname())
        with sock, pytest.raises(PeerLost):
            tls.client_handshake(sock, KEY, timeout_s=GENEROUS_S, look=look)


# --- lifelines


class Encrypted(Star):
    """A hub and its leaves, all encrypted, and who sits between them: `relays`."""

    def __init__(self, n):
        self.n, self.lines, self.outside = n, {}, {}
        self.heard = {rank: [] for rank in range(n)}
        self.relays = {}
        fds = {rank: [-1] * n for rank in range(n)}
        ends = {rank: [None] * n for rank in range(n)}
        for leaf in range(1, n):
            (hub, one), (other, far) = pair(), pair()
            self.relays[leaf] = one, other
            self.shaken(hub, far, one, other, ends, leaf)
            fds[0][leaf], fds[leaf][0] = hub.detach(), far.detach()
        self.flips = dict.fromkeys(range(1, n), False)
        self.threads = [
            threading.Thread(target=self.relay, args=(leaf, *each), daemon=True)
            for leaf, both in self.relays.items()
            for each in (both, both[::-1])
        ]
        for thread in self.threads:
            thread.start()
        for rank in range(n):
            self.lines[rank] = _native.Lifeline(
                rank,
                [
                    None if end is None else _native.TlsWire(fd, end)
                    for fd, end in zip(fds[rank], ends[rank], strict=True)
                ],
                keys(rank, n),
                beat_ms=100,
                limit_ms=20_000,
            )

    def shaken(self, hub, far, one, other, ends, leaf):
        ends[0][leaf] = _native.Tls(hub.fileno(), KEY, False)
        ends[leaf][0] = _native.Tls(far.fileno(), KEY, True)
        for sock in (one, other):
            sock.setblocking(False)
        while any(
            [
                tls.continue_handshake(ends[0][leaf]),
                tls.continue_handshake(ends[leaf][0]),
            ]
        ):
            for source, target in ((one, other), (other, one)):
                with contextlib.suppress(BlockingIOError):
                    target.sendall(source.recv(1 << 16))
        for sock in (one, other):
            sock.setblocking(True)

    def relay(self, leaf, source, target):
        with contextlib.suppress(OSError):
            while raw := source.recv(1 << 16):
                if self.flips[leaf]:
                    raw = bytes([*raw[:-1], raw[-1] ^ 1])
                target.sendall(raw)
            target.shutdown(socket.SHUT_WR)

    def __exit__(self, *error):
        super().__exit__(*error)
        for thread in self.threads:
            thread.join(GENEROUS_S)
        for both in self.relays.values():
            for sock in both:
                sock.close()


def test_lifelines_are_encrypted():
    with Encrypted(4) as star:
        for word in range(200):
            star[2].announce_failure(7, word)
        star.all_hear(("failure", 2, "none", 2, 7, 199), [0, 1, 3])
        star[3].close()
        star.all_hear(("left", 3, "none", 3, 0, 0), [0, 1, 2])


def test_changed_lifeline_record_is_not_authentic():
    with Encrypted(3) as star:
        star[1].announce_failure(7, 1)
        star.all_hear(("failure", 1, "none", 1, 7, 1), [0, 2])
        star.flips[1] = True
        star.hears(2, ("dead", 1, "not authentic", 0, 0, 0))
