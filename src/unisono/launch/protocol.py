"""What a launcher and its agent on another host say to each other.

They speak over the two pipes of one ssh: messages of msgpack, each behind its length.
The first thing an agent says is a line of plain text with its version. Whatever a login
script may print comes before that line and is passed over; and two versions that do not
understand each other's messages still find out that this is so.

    launcher → agent    Order once, then Signal and Input as they come
    agent → launcher    the line, Hello; then Said, Ended, Wants; Done or Refused last
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator

import msgspec

from unisono.errors import Corrupted

GREETING = b"unisono agent, version "
_LENGTH = struct.Struct(">I")
_LONGEST = 1 << 26  # more than any environment that a kernel would take


class Message(msgspec.Struct, tag=True):
    """One of those below."""


class Hello(Message):
    """An agent is there: what its host has."""

    cores: int
    port: int  # one that nobody uses there


class Order(Message):
    """Start these ranks. `environment` is added to the agent's own."""

    command: list[str]
    folder: str
    first: int
    ranks: int
    environment: dict[str, str]


class Signal(Message):
    """Send this to all ranks."""

    number: int


class Input(Message):
    """What rank 0 is to read; nothing means that there is no more."""

    data: bytes


class Wants(Message):
    """Rank 0 has taken what it was given."""


class Said(Message):
    """Bytes from a rank's standard output (1) or error (2)."""

    rank: int
    stream: int
    data: bytes


class Started(Message):
    """A rank runs."""

    rank: int
    pid: int


class Ended(Message):
    """A rank has ended: an exit code, or a signal's number with a minus."""

    rank: int
    status: int


class Refused(Message):
    """The order cannot be carried out."""

    why: str


class Done(Message):
    """All ranks have ended, and all that they said was said."""


AnyMessage = (
    Order | Signal | Input | Hello | Wants | Said | Started | Ended | Refused | Done
)
_decode = msgspec.msgpack.Decoder(AnyMessage).decode


def frame(message: Message) -> bytes:
    """A message as it travels."""
    data = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(data)) + data


def write(descriptor: int, data: bytes) -> None:
    """All of it."""
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


class Inbox:
    """Bytes come in, messages go out."""

    def __init__(self) -> None:
        """Nothing was heard yet."""
        self._heard = bytearray()

    def take(self, data: bytes) -> Iterator[AnyMessage]:
        """The messages that these bytes complete."""
        self._heard += data
        while len(self._heard) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._heard)
            if length > _LONGEST:
                raise Corrupted(
                    f"a message of {length} bytes between agent and launcher"
                )
            end = _LENGTH.size + length
            if len(self._heard) < end:
                return
            message = bytes(self._heard[_LENGTH.size : end])
            del self._heard[:end]
            try:
                yield _decode(message)
            except msgspec.MsgspecError as why:
                raise Corrupted(f"between agent and launcher: {why}") from why


def listen(descriptor: int) -> Iterator[AnyMessage]:
    """The messages that come in there, until it ends."""
    inbox = Inbox()
    while True:
        try:
            data = os.read(descriptor, 1 << 16)
        except OSError:
            return
        if not data:
            return
        yield from inbox.take(data)
