"""How two ranks authenticate each other before anything else is sent.

The client is the rank that connects, the server the one that listens. They exchange
three frames of fixed size:

    client    offer    128 bytes   who I am, whom I want, what for, a random number
    server    answer    96 bytes   yes, or why not; a random number of its own
    client    confirm   32 bytes

    offer    "unisono" version | job 16 | epoch 8 | from 4 | to 4
             | purpose 8 | communicator 8 | stream 4 | tls 4 | nonce 32 | check 32
    answer   "unisono" version | result 1  | 0 3 | rank 4 | epoch 8 | 0 8
             | nonce 32 | check 32
    confirm  check 32

Numbers are big-endian. Every check is an HMAC-SHA256 over all earlier bytes of the
handshake, those of earlier frames included. Its key is derived from the job's secret
for this kind of frame alone, so that no frame can be sent back as another.

- A process without the secret fails at the first frame. It receives no byte, and no
  state is kept for it.
- A recorded offer is answered, but its sender cannot confirm: the check covers the
  server's random number, which is new. A recorded answer fails by the client's.
- An offer names the rank it is meant for, so it cannot be replayed to another rank, nor
  to the rank that made it.
- A client that holds the secret but does not belong here (another job, epoch, rank or
  version) gets the reason in an answer with a check. For this, the frames of all later
  versions have these sizes, with the check at the end.
- An attacker cannot remove encryption: whether the client wants it (1, or else 0) is
  under the check, and a server that wants the other refuses. A client that is refused
  for this reason confirms nevertheless: then both know it, and can report it to all.
- The job is represented by a number derived from its name and the secret.

Both then derive keys from the secret and the whole transcript, for what follows on this
connection: one of 16 bytes for each direction, and one of 32 for TLS, if wanted.

The rules are in `ClientHandshake` and `ServerHandshake`, which do no input or output:
they are given a frame and return what to send. `offer` and `answer` run them on a
socket, with one deadline for the whole handshake.
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
    """How the server answers a client that holds the secret."""

    WELCOME = 0
    OTHER_VERSION = 1
    OTHER_JOB = 2
    OTHER_RANK = 3
    OTHER_EPOCH = 4
    OTHER_TLS = 5


class Refused(ConnectFailed):
    """The server holds the job's secret and refuses: `result` is why.

    `epoch` is the server's own.
    """

    def __init__(self, message: str, *, result: int, epoch: int) -> None:
        """Keep the result and the epoch."""
        super().__init__(message)
        self.result = result
        self.epoch = epoch


@dataclass(frozen=True)
class Purpose:
    """What a connection is for: its kind, and of which communicator and stream."""

    kind: str
    communicator: int = 0
    stream: int = 0

    def __post_init__(self) -> None:
        """Refuse what does not fit its field of the offer."""
        if not (self.kind.isascii() and 0 < len(self.kind) <= 8):
            raise BadArgument(f"kind = {self.kind!r}: expected 1 to 8 letters")
        if not 0 <= self.communicator < 1 << 64 or not 0 <= self.stream < 1 << 32:
            raise BadArgument(
                f"{self}: communicator and stream take 64 and 32 bits at most"
            )

    def __str__(self) -> str:
        """As in "data of communicator 3, stream 0"; plain "life" without a number."""
        if self.kind != "data" and not (self.communicator or self.stream):
            return self.kind
        return f"{self.kind} of communicator {self.communicator}, stream {self.stream}"


RENDEZVOUS = Purpose("rdzv")


def lifeline_purpose(token: int) -> Purpose:
    """The purpose of a lifeline; its process has announced the token before."""
    return Purpose("life", token)


def data_purpose(communicator: int, stream: int = 0) -> Purpose:
    """The purpose of one stream of a communicator's data."""
    return Purpose("data", communicator, stream)


@dataclass(frozen=True)
class Identity:
    """Who a process is: a rank of a job, in one of its epochs, with the job's secret.

    `tls` is whether all that follows a handshake is to be encrypted.
    """

    secret: Secret
    job: str
    rank: int
    epoch: int = 0
    tls: bool = False
    job_id: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Derive the number that represents the job."""
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


class ClientHandshake:
    """The client's half. Send `opening`, then `take` one frame of `wanted` bytes.

    `refusal` is why the server refuses, once what `take` returned has been sent.
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
                f"the process that answers as rank {self._peer} does not hold the "
                "secret of this job: give all ranks the same secret, and the address "
                "of the job"
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
            why = (
                f"has version {version} of the handshake, rank {me.rank} version "
                f"{VERSION}: install the same unisono for all"
            )
        elif result == HandshakeResult.OTHER_JOB:
            why = (
                f"belongs to another job than {me.job!r}, with the same secret: is it "
                "left over from an earlier run, or do two jobs use one address?"
            )
        elif result == HandshakeResult.OTHER_RANK:
            why = f"says that it is rank {rank}: have the addresses been mixed up?"
        elif result == HandshakeResult.OTHER_EPOCH:
            why = (
                f"is in epoch {epoch} of the job, rank {me.rank} in {me.epoch}: one of "
                "them has missed a shrink or grow"
            )
        elif result == HandshakeResult.OTHER_TLS:
            why = _tls_differs(me)
        else:
            why = f"refuses for a reason ({result}) that is not known here"
        return Refused(f"rank {peer} {why}", result=result, epoch=epoch)


class ServerHandshake:
    """The server's half: `take` frames of `wanted` bytes until it is `authenticated`.

    `refusal` is why the client is refused, once what `take` returned has been sent.
    `has_offered`: an offer with a right check has come, perhaps a recorded one;
    `offered` is which rank it names, and what for.
    """

    def __init__(self, me: Identity) -> None:
        """Wait for an offer."""
        self.me = me
        self._transcript = b""
        self.offered: Authenticated | None = None
        self._tls_refusal: Refused | None = None
        self.wanted = OFFER_SIZE
        self.has_offered = False
        self.refusal: Refused | None = None
        self.authenticated: Authenticated | None = None

    def take(self, frame: bytes) -> bytes:
        """What to send in return, perhaps nothing. After NotAuthentic send nothing."""
        if len(frame) != self.wanted:
            raise NotAuthentic("a connection that ended before it was authenticated")
        if self.has_offered:
            self._confirmed(frame)
            return b""
        return self._answer(frame)

    def _answer(self, offer: bytes) -> bytes:
        me = self.me
        if not _holds(me.secret, b"offer", offer):
            raise NotAuthentic("an offer without the secret of this job")
        self.has_offered = True
        self.wanted = _CHECK
        result, why = self._examine(offer)
        if result == HandshakeResult.OTHER_TLS:
            self._tls_refusal = Refused(why, result=result, epoch=me.epoch)
        elif result:
            self.refusal = Refused(why, result=result, epoch=me.epoch)
        body = _ANSWER.pack(_NAME, VERSION, result, me.rank, me.epoch, os.urandom(32))
        self._transcript = offer + body
        self._transcript += _check(me.secret, b"answer", self._transcript)
        return self._transcript[len(offer) :]

    def _examine(self, offer: bytes) -> tuple[HandshakeResult, str]:
        me = self.me
        name, version, job, epoch, src, dst, *what, _ = _OFFER.unpack(offer[:-_CHECK])
        if name != _NAME or version != VERSION:
            why = f"the client has version {version} of the handshake"
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
        self.refusal = self._tls_refusal
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
    """Authenticate a connection as its client; `look` is called while it waits.

    Raises NotAuthentic if the server is not of this job, Refused if it refuses with a
    reason, TimeoutError if no answer comes in time. The caller closes the socket; its
    timeout is as before.
    """
    rules = ClientHandshake(me, peer, purpose)
    with Until(sock, timeout_s, look) as wire:
        wire.send(rules.opening)
        answer = wire.receive(rules.wanted)
        if len(answer) < rules.wanted:
            raise NotAuthentic(
                f"the process that listens as rank {peer} closed the connection "
                "without an answer, as a rank does if the secrets differ: give all "
                "ranks the same UNISONO_SECRET or UNISONO_SECRET_FILE"
            )
        wire.send(rules.take(answer))
    if rules.refusal is not None:
        raise rules.refusal
    assert rules.authenticated is not None
    return rules.authenticated


def answer(
    sock: socket.socket, me: Identity, *, timeout_s: float = HANDSHAKE_S
) -> Authenticated:
    """Authenticate a connection as its server; raises as `offer` does."""
    rules = ServerHandshake(me)
    with Until(sock, timeout_s) as wire:
        while rules.authenticated is None:
            wire.send(rules.take(wire.receive(rules.wanted)))
            if rules.refusal is not None:
                raise rules.refusal
    return rules.authenticated


def _check(secret: Secret, kind: bytes, transcript: bytes) -> bytes:
    return hmac.digest(secret.key(kind), transcript, "sha256")


def _holds(secret: Secret, kind: bytes, transcript: bytes) -> bool:
    """Whether the check at the end is that of all before it."""
    expected = _check(secret, kind, transcript[:-_CHECK])
    return hmac.compare_digest(expected, transcript[-_CHECK:])


def _keys(me: Identity, transcript: bytes) -> tuple[bytes, bytes, bytes]:
    """The client's key for sending, the server's, and that for TLS, if wanted."""
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
