"""The handshake: who gets through, and that nothing else does, bit by bit."""

import contextlib
import os
import socket
import struct
import threading
import time

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.errors import BadArgument, Corrupted, NotAuthentic
from unisono.transports import handshake
from unisono.transports.connect import connection_over
from unisono.transports.control import ControlMessages
from unisono.transports.handshake import (
    ANSWER_SIZE,
    OFFER_SIZE,
    RENDEZVOUS,
    ClientHandshake,
    HandshakeResult,
    Identity,
    Purpose,
    Refused,
    ServerHandshake,
    answer,
    data_purpose,
    lifeline_purpose,
    offer,
)
from unisono.transports.secret import make_secret, open_secret

pytestmark = pytest.mark.timeout(60)

SECRET = make_secret()
ONE = Identity(SECRET, "job", 1)
TWO = Identity(SECRET, "job", 2)


def shake(one=ONE, two=TWO, purpose=RENDEZVOUS):
    """The three frames, and both sessions."""
    dialer, answerer = ClientHandshake(one, two.rank, purpose), ServerHandshake(two)
    frames = [dialer.opening]
    frames.append(answerer.take(frames[0]))
    frames.append(dialer.take(frames[1]))
    assert answerer.take(frames[2]) == b""
    return frames, dialer.authenticated, answerer.authenticated


# --- those who belong


@given(
    job=st.text(max_size=40),
    ranks=st.lists(st.integers(0, 2**32 - 1), min_size=2, max_size=2, unique=True),
    epoch=st.integers(0, 2**64 - 1),
    purpose=st.text("abcdefghijklmnopqrstuvwxyz-", min_size=1, max_size=8),
    communicator=st.integers(0, 2**64 - 1),
    stream=st.integers(0, 2**32 - 1),
)
def test_both_sides_derive_the_same_keys(
    job, ranks, epoch, purpose, communicator, stream
):
    purpose = Purpose(purpose, communicator, stream)
    one, two = (Identity(SECRET, job, rank, epoch) for rank in ranks)
    frames, dialed, answered = shake(one, two, purpose)
    assert [len(frame) for frame in frames] == [OFFER_SIZE, ANSWER_SIZE, 32]
    assert (dialed.peer, answered.peer) == (two.rank, one.rank)
    assert dialed.purpose == answered.purpose == purpose
    assert dialed.send_key == answered.receive_key
    assert dialed.receive_key == answered.send_key
    assert len({dialed.send_key, dialed.receive_key}) == 2
    assert len(dialed.send_key) == 16


def test_every_connection_has_its_own_keys():
    sessions = [shake(purpose=data_purpose(1, stream))[1] for stream in (0, 0, 1)]
    keys = {key for s in sessions for key in (s.send_key, s.receive_key)}
    assert len(keys) == 6


def test_handshake_over_sockets():
    here, there = socket.socketpair()
    with here, there:
        found = []
        thread = threading.Thread(target=lambda: found.append(answer(there, TWO)))
        thread.start()
        mine = offer(here, ONE, 2, data_purpose(7, 3))
        thread.join()
        assert found[0].send_key == mine.receive_key
        assert found[0].purpose == data_purpose(7, 3)
        assert here.gettimeout() is None


def test_keys_and_secrets_are_in_no_repr():
    frames, mine, _ = shake()
    assert frames
    text = f"{mine!r} {ONE!r}"
    for hidden in (mine.send_key, mine.receive_key, ONE.job_id):
        assert repr(hidden) not in text
    assert SECRET.hex() not in text


def test_purpose_text_and_limits():
    assert str(data_purpose(3, 1)) == "data of communicator 3, stream 1"
    assert str(RENDEZVOUS) == "rdzv"
    assert lifeline_purpose(5).kind == "life"
    for wrong in (
        {"kind": ""},
        {"kind": "ninechars"},
        {"kind": "ä"},
        {"kind": "x", "communicator": 1 << 64},
        {"kind": "x", "stream": -1},
    ):
        with pytest.raises(BadArgument):
            Purpose(**wrong)
    for wrong in ({"rank": -1}, {"rank": 1 << 32}, {"rank": 0, "epoch": 1 << 64}):
        with pytest.raises(BadArgument, match="32 and 64 bits"):
            Identity(SECRET, "job", **wrong)


# --- those who do not


def flips(frame):
    """The frame with each of its bits flipped in turn."""
    for at in range(len(frame)):
        for bit in range(8):
            yield frame[:at] + bytes([frame[at] ^ 1 << bit]) + frame[at + 1 :]


def test_handshake_fails_on_any_flipped_bit():
    tried = 0
    dialer = ClientHandshake(ONE, 2, data_purpose(1))
    for wrong in flips(dialer.opening):
        answerer = ServerHandshake(TWO)
        with pytest.raises(NotAuthentic):
            answerer.take(wrong)
        assert not answerer.has_offered
        tried += 1
    answerer = ServerHandshake(TWO)
    reply = answerer.take(dialer.opening)
    for wrong in flips(reply):
        with pytest.raises(NotAuthentic):
            dialer.take(wrong)
        assert dialer.authenticated is None
        tried += 1
    for wrong in flips(dialer.take(reply)):
        with pytest.raises(NotAuthentic):
            answerer.take(wrong)
        assert answerer.authenticated is None
        tried += 1
    assert tried == 8 * (128 + 96 + 32)


@settings(max_examples=300)
@given(st.binary(max_size=OFFER_SIZE + 8), st.integers(0, 2))
def test_garbage_is_rejected_at_each_frame(garbage, stage):
    dialer, answerer = ClientHandshake(ONE, 2, RENDEZVOUS), ServerHandshake(TWO)
    if stage == 0:
        with pytest.raises(NotAuthentic):
            answerer.take(garbage)
        return
    reply = answerer.take(dialer.opening)
    taker = dialer if stage == 1 else answerer
    assert garbage != reply
    with pytest.raises(NotAuthentic):
        taker.take(garbage)
    assert taker.authenticated is None


def test_handshake_fails_with_another_secret():
    intruder = Identity(make_secret(), "job", 1)
    with pytest.raises(NotAuthentic):
        ServerHandshake(TWO).take(ClientHandshake(intruder, 2, RENDEZVOUS).opening)
    with pytest.raises(NotAuthentic):
        ServerHandshake(Identity(make_secret(), "job", 2)).take(
            ClientHandshake(ONE, 2, RENDEZVOUS).opening
        )


def test_open_secrets_of_two_jobs_differ():
    one, two = (Identity(open_secret(job), job, 1) for job in "ab")
    with pytest.raises(NotAuthentic):
        ServerHandshake(two).take(ClientHandshake(one, 2, RENDEZVOUS).opening)


def test_recorded_handshake_cannot_be_replayed():
    (recorded, _, confirmed), _, _ = shake()
    answerer = ServerHandshake(TWO)
    answerer.take(recorded)  # whoever held the secret once has made it
    with pytest.raises(NotAuthentic):
        answerer.take(confirmed)
    assert answerer.authenticated is None


def test_recorded_answer_cannot_be_replayed():
    (_, recorded, _), _, _ = shake()
    with pytest.raises(NotAuthentic):
        ClientHandshake(ONE, 2, RENDEZVOUS).take(recorded)


def test_reflected_frames_are_rejected():
    dialer, answerer = ClientHandshake(ONE, 2, RENDEZVOUS), ServerHandshake(TWO)
    with pytest.raises(NotAuthentic):
        dialer.take(dialer.opening[:ANSWER_SIZE])
    with pytest.raises(NotAuthentic):
        dialer.take(dialer.opening[-ANSWER_SIZE:])
    reply = answerer.take(dialer.opening)
    for part in (reply[:32], reply[-32:], dialer.opening[-32:]):
        with pytest.raises(NotAuthentic):
            answerer.take(part)
    # And our own offer, brought before ourselves: it was meant for another.
    ourselves = ServerHandshake(ONE)
    ourselves.take(dialer.opening)
    assert ourselves.refusal.result == HandshakeResult.OTHER_RANK
    assert ourselves.authenticated is None


def test_answers_of_two_handshakes_cannot_be_swapped():
    one, two = ClientHandshake(ONE, 2, RENDEZVOUS), ClientHandshake(ONE, 2, RENDEZVOUS)
    first, second = ServerHandshake(TWO), ServerHandshake(TWO)
    for_one, for_two = first.take(one.opening), second.take(two.opening)
    with pytest.raises(NotAuthentic):
        one.take(for_two)
    confirm = one.take(for_one)
    with pytest.raises(NotAuthentic):
        second.take(confirm)


@pytest.mark.parametrize(
    ("other", "result", "says"),
    [
        (
            Identity(SECRET, "another", 2),
            HandshakeResult.OTHER_JOB,
            "another job than 'job'",
        ),
        (
            Identity(SECRET, "job", 3),
            HandshakeResult.OTHER_RANK,
            "says that it is rank 3",
        ),
        (
            Identity(SECRET, "job", 2, 4),
            HandshakeResult.OTHER_EPOCH,
            "in epoch 4 of the job",
        ),
    ],
)
def test_client_with_the_secret_gets_the_reason_of_a_refusal(other, result, says):
    dialer, answerer = ClientHandshake(ONE, 2, RENDEZVOUS), ServerHandshake(other)
    reply = answerer.take(dialer.opening)
    assert answerer.refusal.result == result
    with pytest.raises(Refused, match=says) as caught:
        dialer.take(reply)
    assert caught.value.result == result
    assert caught.value.epoch == other.epoch
    for wrong in (reply[:32], reply[-32:]):
        with pytest.raises(NotAuthentic):
            answerer.take(wrong)
    assert dialer.authenticated is answerer.authenticated is None


def test_confirmation_after_a_refusal_is_rejected():
    dialer, answerer = (
        ClientHandshake(ONE, 2, RENDEZVOUS),
        ServerHandshake(Identity(SECRET, "other", 2)),
    )
    transcript = dialer.opening + answerer.take(dialer.opening)
    with pytest.raises(NotAuthentic):
        answerer.take(handshake._check(SECRET, b"confirm", transcript))
    assert answerer.authenticated is None


def test_another_handshake_version_is_refused(monkeypatch):
    monkeypatch.setattr(handshake, "VERSION", 9)
    dialer = ClientHandshake(ONE, 2, RENDEZVOUS)
    monkeypatch.undo()
    answerer = ServerHandshake(TWO)
    reply = answerer.take(dialer.opening)
    assert answerer.refusal.result == HandshakeResult.OTHER_VERSION
    with pytest.raises(Refused, match="install the same unisono for all"):
        dialer.take(reply)


def test_impossible_purpose_is_not_authentic():
    opening = ClientHandshake(ONE, 2, RENDEZVOUS).opening
    for purpose in (b"\xff" * 8, bytes(8)):
        body = opening[:40] + purpose + opening[48:-32]
        with pytest.raises(NotAuthentic, match="no rank makes"):
            ServerHandshake(TWO).take(body + handshake._check(SECRET, b"offer", body))


# --- on the wire


def test_peer_that_closes_is_not_authentic():
    here, there = socket.socketpair()
    there.close()
    with here, pytest.raises(NotAuthentic, match="UNISONO_SECRET"):
        offer(here, ONE, 2, RENDEZVOUS)


def test_peer_that_only_connects_times_out():
    here, there = socket.socketpair()
    with here:
        there.close()
        with pytest.raises(NotAuthentic, match="ended before"):
            answer(here, TWO)


@pytest.mark.parametrize(
    "shaking",
    [
        lambda sock: offer(sock, ONE, 2, RENDEZVOUS, timeout_s=0.3),
        lambda sock: answer(sock, TWO, timeout_s=0.3),
    ],
    ids=["offer", "answer"],
)
def test_slow_peer_has_one_deadline(shaking):
    here, there = socket.socketpair()
    stop = threading.Event()

    def drip():
        with contextlib.suppress(OSError):
            while not stop.wait(0.02):
                there.send(b"u")

    thread = threading.Thread(target=drip)
    thread.start()
    with here, there:
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            shaking(here)
        assert time.monotonic() - began < 20
        stop.set()
        thread.join()


def test_refusal_over_sockets():
    here, there = socket.socketpair()
    with here, there:
        found = []

        def serve():
            try:
                answer(there, Identity(SECRET, "other", 2))
            except Refused as why:
                found.append(why.result)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(Refused, match="another job"):
            offer(here, ONE, 2, RENDEZVOUS)
        thread.join()
        assert found == [HandshakeResult.OTHER_JOB]


# --- control messages


class Note(msgspec.Struct):
    text: str


@pytest.fixture
def messages():
    _, mine, theirs = shake()
    here, there = socket.socketpair()
    with here, there:
        yield (
            ControlMessages(connection_over(here, mine)),
            ControlMessages(connection_over(there, theirs)),
        )


def take(messages):
    return messages.receive(Note, longest=1000, timeout_s=30)


def test_control_messages_arrive_in_order(messages):
    one, two = messages
    for text in "abc":
        one.send(Note(text), timeout_s=30)
    two.send(Note("d"), timeout_s=30)
    assert [take(two).text for _ in range(3)] == list("abc")
    assert take(one).text == "d"


def raw_of(messages, note):
    """The bytes of a control message on the wire."""
    one, two = messages
    one.send(note, timeout_s=30)
    return two.connection.socket.recv(1 << 16)


def test_control_messages_cannot_be_changed(messages):
    one, two = messages
    raw = raw_of(messages, Note("pay 1"))
    for at in range(4, len(raw)):
        wrong = raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]
        one.connection.socket.send(wrong)
        with pytest.raises(Corrupted, match="was changed"):
            take(two)
    one.connection.socket.send(raw)
    assert take(two).text == "pay 1"


def test_control_messages_cannot_be_repeated_omitted_or_reflected(messages):
    one, two = messages
    first, second = (raw_of(messages, Note(text)) for text in "ab")
    one.connection.socket.send(second)  # the first is left out
    with pytest.raises(Corrupted):
        take(two)
    one.connection.socket.send(first + first)
    assert take(two).text == "a"
    with pytest.raises(Corrupted):
        take(two)
    two.connection.socket.send(first)  # back to its sender
    with pytest.raises(Corrupted):
        take(one)


def test_control_messages_too_long_or_malformed_are_corrupted(messages):
    one, two = messages
    one.connection.socket.send(struct.pack("!I", 2**32 - 1) + os.urandom(64))
    with pytest.raises(Corrupted, match="expected 1000 at most"):
        take(two)


class Other(msgspec.Struct):
    number: int


def test_control_message_of_another_kind_is_corrupted(messages):
    one, two = messages
    one.send(Other(1), timeout_s=30)
    with pytest.raises(Corrupted, match=r"is not a note.*same version"):
        take(two)


def test_missing_control_message_times_out(messages):
    one, two = messages
    with pytest.raises(TimeoutError):
        two.receive(Note, longest=10, timeout_s=0.05)
    one.connection.close()
    with pytest.raises(ConnectionError):
        take(two)
