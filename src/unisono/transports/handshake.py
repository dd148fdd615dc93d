"""How two ranks make sure of each other, before anything else is believed.

Three frames of fixed size, whatever is in them:

    dialer    offer    128 bytes   who I am, whom I want, what for, a random number
    answerer  answer    96 bytes   yes, or why not; a random number of its own
    dialer    confirm   32 bytes

    offer    "unisono" version | job 16 | epoch 8 | from 4 | to 4
             | purpose 8 | communicator 8 | stream 4 | tls 4 | nonce 32 | check 32
    answer   "unisono" version | verdict 1 | 0 3 | rank 4 | epoch 8 | 0 8
             | nonce 32 | check 32
    confirm  check 32

Numbers are big-endian. Every check is an HMAC-SHA256 over all bytes of the handshake
that came before it, those of earlier frames included. It is made with a key that is
derived from the job's secret for this kind of frame alone, so that no frame can be sent
back as another.

- A process without the secret fails at the first frame. It is not sent a single byte,
  and nothing is kept of it.
- A recorded offer is answered, but its sender cannot confirm: the check covers the
  answerer's random number, which is new. A recorded answer fails by the dialer's.
- An offer names the rank it is meant for, so it cannot be brought before another, and
  not before the one who made it.
- Who holds the secret but is wrong here (another job, epoch, rank or version) is told
  so in an answer with a check, which it can rely on. For the sake of this, all versions
  to come have frames of these sizes with the check at the end.
- Nobody can talk two ranks out of encryption: that the dialer wants it (1, or else 0)
  is under the check, and who does not want the same refuses. This alone the dialer
  confirms though it is refused: then both may rely on it, and say so to all.
- The job stands there as a number derived from its name and the secret.

Both then derive keys from the secret and the whole transcript, for what follows on this
connection: one of 16 bytes for each direction, and one of 32 for TLS, if wanted.

The rules are in `Offering` and `Answering`, which neither read nor write: they are
given a frame and say what to send. `offer` and `answer` act them out on a socket, with
one deadline for the whole; a peer that sends a byte now and then gains nothing by it.
"""

from __future__ import annotations

import hmac
import os
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum

from unisono.errors import BadArgument, ConnectFailed, NotAuthentic
from unisono.transports.deadline import Until
from unisono.transports.secret import Secret

VERSION = 1
HANDSHAKE_S = 10.0
KEY_SIZE = 16

_NAME = b"unisono"
_CHECK = 32
_OFFER = struct.Struct("!7sB16sQII8sQII32s")
_ANSWER = struct.Struct("!7sBB3xIQ8x32s")
OFFER_SIZE = _OFFER.size + _CHECK
ANSWER_SIZE = _ANSWER.size + _CHECK


class HandshakeResult(IntEnum):
    """What the answerer says to one who holds the secret."""

    WELCOME = 0
    OTHER_VERSION = 1
    OTHER_JOB = 2
    OTHER_RANK = 3
    OTHER_EPOCH = 4
    OTHER_TLS = 5


class Refused(ConnectFailed):
    """A rank of this job's secret will not talk: `verdict` is why.

    `epoch` is the answerer's own.
    """

    def __init__(self, message: str, *, result: int, epoch: int) -> None:
        """Keep the verdict and what it rests on."""
        super().__init__(message)
        self.result = result
        self.epoch = epoch


@dataclass(frozen=True)
class Purpose:
    """What a connection is for: one of a few purposes, a communicator, a stream."""

    kind: str
    communicator: int = 0
    stream: int = 0

    def __post_init__(self) -> None:
        """Refuse what does not fit its place in the offer."""
        if not (self.kind.isascii() and 0 < len(self.kind) <= 8):
            raise BadArgument(f"purpose = {self.kind!r}: expected 1 to 8 letters")
        if not 0 <= self.communicator < 1 << 64 or not 0 <= self.stream < 1 << 32:
            raise BadArgument(
                f"{self}: communicator and stream take 64 and 32 bits at most"
            )

    def __str__(self) -> str:
        """As in "data of communicator 3, stream 0"; plain "life" without a number."""
        if self.kind != "data" and not (self.communicator or self.stream):
            return self.kind
        return f"{self.kind} of communicator {self.communicator}, stream {self.stream}"


RENDEZVOUS = Purpose("meet")


def lifeline_purpose(token: int) -> Purpose:
    """The label of a lifeline; the token is what its process said when it came."""
    return Purpose("life", token)


def data_purpose(communicator: int, stream: int = 0) -> Purpose:
    """The label of one stream of a communicator's data."""
    return Purpose("data", communicator, stream)


@dataclass(frozen=True)
class Identity:
    """Who speaks: a rank of a job, in one of its epochs, by the job's secret.

    `tls` is whether all that follows a handshake is to be encrypted.
    """

    secret: Secret
    job: str
    rank: int
    epoch: int = 0
    tls: bool = False
    job_id: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Derive the number that stands for the job."""
        if not 0 <= self.rank < 1 << 32 or not 0 <= self.epoch < 1 << 64:
            raise BadArgument(
                f"rank = {self.rank}, epoch = {self.epoch}: they take 32 and 64 bits"
            )
        job_id = self.secret.key(b"job", 16, bound_to=self.job.encode())
        object.__setattr__(self, "job_id", job_id)


@dataclass(frozen=True)
class Authenticated:
    """What both know after a handshake: who the other is, what for, and the keys.

    The key for TLS is empty if nothing is to be encrypted.
    """

    peer: int
    purpose: Purpose
    send_key: bytes = field(repr=False)
    receive_key: bytes = field(repr=False)
    tls_key: bytes = field(repr=False, default=b"")


class Offering:
    """The dialer's half. Send `opening`, then `take` one frame of `wanted` bytes.

    `refusal` is why there is no session, once what `take` gave has been sent.
    """

    wanted = ANSWER_SIZE

    def __init__(self, me: Identity, peer: int, purpose: Purpose) -> None:
        """Make the offer."""
        self._me, self._peer, self._purpose = me, peer, purpose
        body = _OFFER.pack(
            *(_NAME, VERSION, me.job_id, me.epoch, me.rank, peer),
            *(purpose.kind.encode(), purpose.communicator, purpose.stream),
            *(me.tls, os.urandom(32)),
        )
        self.opening = body + _check(me.secret, b"offer", body)
        self.refusal: Refused | None = None
        self.authenticated: Authenticated | None = None

    def take(self, answer: bytes) -> bytes:
        """The confirmation to send; NotAuthentic or Refused if there is none."""
        transcript = self.opening + answer
        secret = self._me.secret
        if len(answer) != self.wanted or not _holds(secret, b"answer", transcript):
            raise NotAuthentic(
                f"whoever answers in the place of rank {self._peer} does not hold the "
                "secret of this job: see that all ranks were given the same, and that "
                "the address is that of the job"
            )
        _, version, result, rank, epoch, _ = _ANSWER.unpack(answer[:-_CHECK])
        confirm = _check(secret, b"confirm", transcript)
        if result or version != VERSION:
            refusal = self._refused(result, version, rank, epoch)
            if result != HandshakeResult.OTHER_TLS:
                raise refusal
            self.refusal = refusal
            return confirm
        mine, theirs, tls = _keys(self._me, transcript + confirm)
        self.authenticated = Authenticated(self._peer, self._purpose, mine, theirs, tls)
        return confirm

    def _refused(self, result: int, version: int, rank: int, epoch: int) -> Refused:
        me, peer = self._me, self._peer
        if result == HandshakeResult.OTHER_VERSION or version != VERSION:
            told = (
                f"speaks version {version} of the handshake, rank {me.rank} version "
                f"{VERSION}: install the same unisono for all"
            )
        elif result == HandshakeResult.OTHER_JOB:
            told = (
                f"serves another job than {me.job!r}, with the same secret: is it left "
                "over from an earlier run, or do two jobs share an address?"
            )
        elif result == HandshakeResult.OTHER_RANK:
            told = f"says that it is rank {rank}: have the addresses been mixed up?"
        elif result == HandshakeResult.OTHER_EPOCH:
            told = (
                f"is in epoch {epoch} of the job, rank {me.rank} in {me.epoch}: one of "
                "them has missed a change of members"
            )
        elif result == HandshakeResult.OTHER_TLS:
            told = _tls_differs(me)
        else:
            told = f"refuses for a reason ({result}) that is not known here"
        return Refused(f"rank {peer} {told}", result=result, epoch=epoch)


class Answering:
    """The answerer's half: `take` frames of `wanted` bytes until there is a session.

    `refusal` is why the other is turned away, once what `take` gave has been sent.
    `vouched` says that the other, or whoever recorded it, once held the secret;
    `offered` is who it says it is, and what for.
    """

    def __init__(self, me: Identity) -> None:
        """Wait for an offer."""
        self.me = me
        self._transcript = b""
        self.offered: Authenticated | None = None
        self._differs: Refused | None = None
        self.wanted = OFFER_SIZE
        self.vouched = False
        self.refusal: Refused | None = None
        self.authenticated: Authenticated | None = None

    def take(self, frame: bytes) -> bytes:
        """What to send in return, perhaps nothing; NotAuthentic: send nothing."""
        if len(frame) != self.wanted:
            raise NotAuthentic("a connection that ended before it was authenticated")
        if self.vouched:
            self._confirmed(frame)
            return b""
        return self._answer(frame)

    def _answer(self, offer: bytes) -> bytes:
        me = self.me
        if not _holds(me.secret, b"offer", offer):
            raise NotAuthentic("an offer without the secret of this job")
        self.vouched = True
        self.wanted = _CHECK
        result, why = self._weigh(offer)
        if result == HandshakeResult.OTHER_TLS:
            self._differs = Refused(why, result=result, epoch=me.epoch)
        elif result:
            self.refusal = Refused(why, result=result, epoch=me.epoch)
        body = _ANSWER.pack(_NAME, VERSION, result, me.rank, me.epoch, os.urandom(32))
        self._transcript = offer + body
        self._transcript += _check(me.secret, b"answer", self._transcript)
        return self._transcript[len(offer) :]

    def _weigh(self, offer: bytes) -> tuple[HandshakeResult, str]:
        me = self.me
        name, version, job, epoch, src, dst, *what, _ = _OFFER.unpack(offer[:-_CHECK])
        if name != _NAME or version != VERSION:
            why = f"somebody speaks version {version} of the handshake"
            return HandshakeResult.OTHER_VERSION, why
        if job != me.job_id:
            return (
                HandshakeResult.OTHER_JOB,
                f"rank {src} of another job has the same secret",
            )
        if dst != me.rank or src == me.rank:
            return HandshakeResult.OTHER_RANK, f"rank {src} looks for rank {dst}"
        if epoch != me.epoch:
            why = f"rank {src} is in epoch {epoch}, not in {me.epoch}"
            return HandshakeResult.OTHER_EPOCH, why
        kind, communicator, stream, tls = what
        try:
            name = kind.rstrip(b"\0").decode("ascii")
            purpose = Purpose(name, communicator, stream)
        except ValueError:
            raise NotAuthentic("an offer that no rank makes") from None
        self.offered = Authenticated(src, purpose, b"", b"")
        if tls != me.tls:
            return HandshakeResult.OTHER_TLS, f"rank {src} {_tls_differs(me)}"
        return HandshakeResult.WELCOME, ""

    def _confirmed(self, confirm: bytes) -> None:
        secret, transcript = self.me.secret, self._transcript + confirm
        offered = self.offered
        if offered is None or not _holds(secret, b"confirm", transcript):
            raise NotAuthentic("an offer that was not confirmed: a recorded one?")
        self.refusal = self._differs
        if self.refusal is not None:
            return
        theirs, mine, tls = _keys(self.me, transcript)
        self.authenticated = Authenticated(
            offered.peer, offered.purpose, mine, theirs, tls
        )


def offer(
    sock: socket.socket,
    me: Identity,
    peer: int,
    purpose: Purpose,
    *,
    timeout_s: float = HANDSHAKE_S,
    look: Callable[[], object] = lambda: None,
) -> Authenticated:
    """Authenticate a connection that we have made; `look` is called while it waits.

    Raises NotAuthentic if the other is none of this job, Refused if it says why it will
    not talk, TimeoutError if it says nothing in time. The socket is the caller's to
    close; its timeout is as before.
    """
    rules = Offering(me, peer, purpose)
    with Until(sock, timeout_s, look) as wire:
        wire.send(rules.opening)
        answer = wire.receive(rules.wanted)
        if len(answer) < rules.wanted:
            raise NotAuthentic(
                f"whoever is in the place of rank {peer} closed the connection without "
                "a word, as a rank does if the secret is not its own: give all ranks "
                "the same UNISONO_SECRET or UNISONO_SECRET_FILE"
            )
        wire.send(rules.take(answer))
    if rules.refusal is not None:
        raise rules.refusal
    assert rules.authenticated is not None
    return rules.authenticated


def answer(
    sock: socket.socket, me: Identity, *, timeout_s: float = HANDSHAKE_S
) -> Authenticated:
    """Authenticate a connection that another has made; `offer` tells what is raised."""
    rules = Answering(me)
    with Until(sock, timeout_s) as wire:
        while rules.authenticated is None:
            wire.send(rules.take(wire.receive(rules.wanted)))
            if rules.refusal is not None:
                raise rules.refusal
    return rules.authenticated


def _check(secret: Secret, kind: bytes, told: bytes) -> bytes:
    return hmac.digest(secret.key(kind), told, "sha256")


def _holds(secret: Secret, kind: bytes, told: bytes) -> bool:
    """Whether the check at the end is that of all before it."""
    expected = _check(secret, kind, told[:-_CHECK])
    return hmac.compare_digest(expected, told[-_CHECK:])


def _keys(me: Identity, transcript: bytes) -> tuple[bytes, bytes, bytes]:
    """The dialer's key for sending, the answerer's, and that for TLS, if wanted."""
    key = me.secret.key
    return (
        key(b"from the dialer", KEY_SIZE, bound_to=transcript),
        key(b"from the answerer", KEY_SIZE, bound_to=transcript),
        key(b"tls", bound_to=transcript) if me.tls else b"",
    )


def _tls_differs(me: Identity) -> str:
    one, other = ("does not encrypt", "does") if me.tls else ("encrypts", "does not")
    return (
        f"{one}, rank {me.rank} {other}: give all ranks the same, tls='mutual' in init "
        "or UNISONO_TLS=mutual"
    )
