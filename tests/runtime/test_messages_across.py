"""Messages between hosts: aborted half way, announced too large, with cut heads."""

import ctypes
import os
import signal
import socket
import struct
import threading
from typing import ClassVar

import numpy as np
import pytest
from test_cut_streams import ENCRYPTED

from forked import attempt
from unisono import _native
from unisono.errors import CollectiveTimeout, Corrupted, TransportError
from unisono.runtime.observe.failures import FailureCode
from unisono.testing import world

pytestmark = pytest.mark.timeout(240)

LARGE = 600_000  # float64: more than two rings and all buffers of a socket hold
RING = 256 << 10
PART = 64 << 10  # no frame of a message is longer
HEAD = struct.Struct("<Qqq")
KEY = bytes(range(16))
DATA, LEAVES = 1, 2  # the kind of a frame, and a flag of it


@pytest.mark.parametrize("short_of", [1, 8, 23])
def test_header_across_the_end_of_the_ring_buffer_is_read(short_of):
    """Frames end where the ring ends, so the head of the next message comes in two.

    The second part is held back; without the mend it is taken for there already.
    """
    waits = threading.Event()

    def passed(comm):
        fill = np.arange(RING - HEAD.size - short_of).astype(np.uint8)
        if comm.rank == 0:
            comm.send(fill, 1)
            assert waits.wait(60.0)
            _native.arm_failpoints("stream.send:2:sleep=100")
            comm.send(np.arange(5), 1)
            return
        assert (comm.recv(np.zeros_like(fill), 0) == fill).all()
        work = comm.recv(np.zeros(5, int), 0, async_op=True)
        waits.set()
        assert work.wait().tolist() == [0, 1, 2, 3, 4]

    try:
        with world(2, hosts=(0, 1), timeout_s=10.0) as made:
            made.run(passed)
    finally:
        _native.arm_failpoints("")


@pytest.mark.parametrize("tls", ENCRYPTED)
def test_message_aborted_half_sent_is_cut_at_the_receiver(tls):
    """Its sender makes no more calls: the rest of a frame and the word leave anyway."""
    received = threading.Event()

    def given_up(comm):
        if comm.rank == 0:
            comm.send(np.arange(3.0), 1, tag=2)
            with pytest.raises(CollectiveTimeout):
                comm.send(np.ones(LARGE), 1, timeout_s=0.2)
            gave_up.set()
            assert received.wait(60.0)
            with pytest.raises(TransportError, match="sending part"):
                comm.send(np.ones(1), 1)
            return
        assert gave_up.wait(60.0)
        for out, tag in ((np.empty(LARGE), 0), (np.empty(1), 7)):
            with pytest.raises(TransportError, match=r"rank 0 .* sending part"):
                comm.recv(out, 0, tag=tag)
        assert comm.recv(np.empty(3), 0, tag=2).tolist() == [0, 1, 2]
        received.set()

    gave_up = threading.Event()
    with world(2, hosts=(0, 1), timeout_s=40.0, tls=tls) as made:
        made.run(given_up)


def flood(comm, counts):
    while True:
        counts.append(len(counts))
        comm.send(np.full(500, counts[-1]), 1, timeout_s=0.2)


def test_message_aborted_after_sending_arrives():
    """Small ones until no buffer has room: the last is late, and spoils nothing."""
    gave_up = threading.Event()
    counts = []

    def flooded(comm):
        if comm.rank == 0:
            with pytest.raises(CollectiveTimeout):
                flood(comm, counts)
            gave_up.set()
            comm.send(np.array([-1]), 1, tag=1)
            return
        assert gave_up.wait(60.0)
        for turn in counts:
            assert (comm.recv(np.empty(500, int), 0) == turn).all()
        assert comm.recv(np.empty(1, int), 0, tag=1)[0] == -1

    with world(2, hosts=(0, 1), timeout_s=40.0) as made:
        made.run(flooded)


# --- invalid data from an authenticated peer


class Forger:
    """Sends rank 1 of a world what it likes, in the place of rank 0."""

    def __init__(self, comm, *, messages):
        here, there = socket.socketpair()
        self.seal = _native.Seal(KEY, 0)
        self.socket = here
        wire = _native.SocketWire(there.detach())
        comm.core.native.attach(False, 0, 0, 1, wire, KEY, 0, messages)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.socket.close()

    def send(self, payload=b"", **head):
        self.socket.sendall(self.seal.seal(payload, DATA, **head) + payload)

    def announce(self, nbytes, tag=0):
        self.send(HEAD.pack(nbytes, tag, 0) + bytes(100))

    def send_part(self, nbytes, parts, tag=0):
        """Of a message, so many parts of PART bytes."""
        self.announce(nbytes, tag)
        for _ in range(parts):
            self.send(bytes(PART))


@pytest.fixture
def victim():
    with world(2, hosts=(0, 1), timeout_s=20.0) as made:
        yield made.comms[1]


@pytest.mark.parametrize("nbytes", [(1 << 48) + 1, 1 << 63, (1 << 64) - 1])
def test_message_above_the_size_limit_is_refused(victim, nbytes):
    with Forger(victim, messages=True) as forger:
        forger.announce(nbytes)
        for tag in (0, 1):
            with pytest.raises(Corrupted, match="rank 0"):
                victim.recv(np.empty(10), 0, tag=tag)


@pytest.mark.parametrize("wrong", ["size", "frame"])
def test_sender_of_refused_message_does_not_wait_for_its_reader(victim, wrong):
    with Forger(victim, messages=True) as forger:
        forger.announce((1 << 48) + 1 if wrong == "size" else 1 << 20)
        if wrong == "frame":
            forger.socket.sendall(bytes(64))
        with pytest.raises(Corrupted, match="rank 0"):
            victim.recv(np.empty(1 << 20, np.uint8), 0, tag=1)
        forger.socket.settimeout(60.0)
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            forger.socket.sendall(bytes(64 << 20))


def test_announced_message_allocates_no_memory(victim):
    """An unexpected message of a terabyte: only what arrives is buffered."""
    with Forger(victim, messages=True) as forger:
        forger.announce(1 << 40)
        with pytest.raises(CollectiveTimeout):
            victim.recv(np.empty(10), 0, tag=1, timeout_s=0.2)


class Allocated(ctypes.Structure):
    """glibc's mallinfo2."""

    _fields_: ClassVar = [("numbers", ctypes.c_size_t * 10)]
    IN_MAPPINGS, IN_HEAPS = 4, 7


def allocated():
    """Bytes that malloc has handed out."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        pytest.skip("malloc does not tell how much it has handed out")
    library.mallinfo2.restype = Allocated
    numbers = library.mallinfo2().numbers
    return numbers[Allocated.IN_MAPPINGS] + numbers[Allocated.IN_HEAPS]


def test_memory_of_a_message_that_will_not_be_complete_is_released(victim):
    """It has no receive yet, and its sender ends in the middle of it."""
    many = 300
    with Forger(victim, messages=True) as forger:
        sending = threading.Thread(target=forger.send_part, args=(1 << 40, many))
        sending.start()
        while sending.is_alive():
            with pytest.raises(CollectiveTimeout):
                victim.recv(np.empty(10), 0, tag=1, timeout_s=0.1)
        with pytest.raises(CollectiveTimeout):
            victim.recv(np.empty(10), 0, tag=1, timeout_s=0.1)
        before = allocated()
        if before < many * PART:
            pytest.skip("malloc does not count what it has handed out")
    with pytest.raises(TransportError):
        victim.recv(np.empty(10), 0, tag=1)
    assert before - allocated() > many * PART / 2


def word(trouble, culprit, reporter):
    return int(trouble) | culprit << 8 | reporter << 20 | 1 << 32


WRONG = [
    word(FailureCode.TIMEOUT, 0xFFF, 0),
    word(FailureCode.MISMATCH, 2, 0),
    word(FailureCode.PEER_LOST, 0, 7),
    word(99, 0, 0),
]


@pytest.mark.parametrize("wrong", WRONG)
def test_failure_of_unknown_ranks_is_refused(victim, wrong):
    with Forger(victim, messages=False) as forger:
        forger.send(flags=LEAVES, fingerprint=wrong)
        with pytest.raises(Corrupted, match=r"data from rank 0 .* corrupted"):
            victim.broadcast(np.ones(4), root=0)


def test_unknown_flags_are_refused(victim):
    with Forger(victim, messages=False) as forger:
        forger.send(flags=1 << 15)
        with pytest.raises(Corrupted, match=r"data from rank 0 .* corrupted"):
            victim.broadcast(np.ones(4), root=0)


@pytest.mark.parametrize("wrong", WRONG)
def test_failure_arrives_over_the_lifeline(victim, wrong):
    ends = socket.socketpair()
    wires = [_native.SocketWire(end.detach()) for end in ends]
    nothing = (b"", b"")
    victim.core.session.engine.connect_lifeline(
        [wires[1], None], [KEY, b""], [KEY, b""], 0, 10**9, 60 * 10**9
    )
    hub = _native.Lifeline(0, [None, wires[0]], [nothing, (KEY, KEY)])
    assert hub.announce_failure(victim.core.agreed, wrong)
    with pytest.raises(Corrupted, match=r"data from rank 0 .* corrupted"):
        victim.broadcast(np.ones(4), root=0)
    hub.close()


def test_note_with_unknown_numbers_is_shown_with_question_marks(victim):
    """A call that differs, by who has an element type and an operation more."""
    with Forger(victim, messages=False) as forger:
        lengths = b"\xff" * 4
        note = struct.pack(
            "<4Qi3B4s149s", 1, 5, 0, 0, 0, 3, 200, 200, lengths, b"\xff" * 149
        )
        forger.send(note, flags=1, call=1)
        with pytest.raises(Exception, match=r"reduce\(\? × 5, \?, root 0\)"):
            victim.broadcast(np.ones(4), root=0)


@pytest.mark.parametrize(
    ("lane", "lanes"), [(0, 0), (1, 1), (0, 65), (0, 1 << 60), (5, 1 << 63)]
)
def test_invalid_lanes_are_refused(victim, lane, lanes):
    ends = socket.socketpair()
    wire = _native.SocketWire(ends[0].detach())
    with pytest.raises(ValueError, match="lanes"):
        victim.core.native.attach(False, 0, lane, lanes, wire, KEY, 0, False)
    assert wire.fileno() >= 0, "it has stayed the caller's"
    wire.close()
    ends[1].close()


# --- when rank 0, which relays the news between hosts, has died


def waits_without_hub(rank):
    """Rank 0 is killed; then rank 2 leaves, and rank 1 gets no notice of that."""
    comm = rank.init(timeout_s=600)
    comm.barrier()
    if rank.number == 0:
        rank.until("in recv", 1, 2)  # a rank in the barrier would raise there
        os.kill(os.getpid(), signal.SIGKILL)
    rank.tell("in recv")
    error = attempt(comm.recv, np.zeros(3), 2 if rank.number == 1 else 0)
    return error["error"], error["attributes"]["ranks"]


def test_messages_between_hosts_end_when_rank_0_has_died(forks):
    ends = forks.run(3, waits_without_hub, hosts=(1, 1, 1))
    assert [end.value for end in ends[1:]] == [["PeerLost", [0]]] * 2, ends
