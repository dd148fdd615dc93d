"""The messages between a launcher and its agent on another host.

They use the two pipes of one ssh process: msgpack messages, each after its length. An
agent first sends a line of plain text with its version. What a login script prints
comes before that line and is skipped; and two versions with different messages can
still report that.

    launcher → agent    StartRanks once, then SendSignal and RankInput
    agent → launcher    the version line, AgentReady; then RankStarted, Output,
                        RankEnded, InputRequest; AllEnded or StartRefused last
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator

import msgspec

from unisono.errors import Corrupted

VERSION_LINE = b"unisono agent, version "
_LENGTH = struct.Struct(">I")
_LONGEST = 1 << 26  # more than any environment that a kernel accepts


class Message(msgspec.Struct, tag=True):
    """The base of all messages."""


class AgentReady(Message):
    """The agent has started: its host's cores and two free ports, ours and torch's."""

    cores: int
    ports: list[int]


class StartRanks(Message):
    """Start these ranks. `environment` is added to the agent's own."""

    command: list[str]
    folder: str
    first: int
    ranks: int
    world_size: int
    node: int
    binding: str
    environment: dict[str, str]


class SendSignal(Message):
    """Send this signal to all ranks of the agent."""

    number: int


class RankInput(Message):
    """Standard input for rank 0; empty at its end."""

    data: bytes


class InputRequest(Message):
    """Rank 0 has read its input: send more."""


class Output(Message):
    """Bytes from a rank's standard output (1) or error (2)."""

    rank: int
    stream: int
    data: bytes


class RankStarted(Message):
    """A rank has started."""

    rank: int
    pid: int


class RankEnded(Message):
    """A rank has exited: its exit code, or a signal's number with a minus sign.

    `why` is what the host's kernel says of it.
    """

    rank: int
    status: int
    why: str


class StartRefused(Message):
    """The ranks cannot be started."""

    why: str


class AllEnded(Message):
    """All ranks have exited, and all their output was sent."""


AnyMessage = (
    StartRanks
    | SendSignal
    | RankInput
    | AgentReady
    | InputRequest
    | Output
    | RankStarted
    | RankEnded
    | StartRefused
    | AllEnded
)
_decode = msgspec.msgpack.Decoder(AnyMessage).decode


def frame(message: Message) -> bytes:
    """The bytes of a message: its length and its content."""
    data = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(data)) + data


def write(descriptor: int, data: bytes) -> None:
    """Write all of `data`; blocks until done."""
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


class MessageDecoder:
    """Decodes messages from a stream of bytes."""

    def __init__(self) -> None:
        """An empty buffer."""
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[AnyMessage]:
        """The messages that these bytes complete."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > _LONGEST:
                raise Corrupted(
                    f"a message of {length} bytes between agent and launcher"
                )
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            message = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            try:
                yield _decode(message)
            except msgspec.MsgspecError as why:
                raise Corrupted(f"between agent and launcher: {why}") from why


def listen(descriptor: int) -> Iterator[AnyMessage]:
    """The messages that arrive at a descriptor, until it ends."""
    decoder = MessageDecoder()
    while True:
        try:
            data = os.read(descriptor, 1 << 16)
        except OSError:
            return
        if not data:
            return
        yield from decoder.feed(data)
