"""Messages between ranks that know each other: few, small, and sealed.

For what is said while ranks meet, on a connection that a handshake has left. A letter
is its length in 4 bytes (big-endian), that many bytes of MessagePack, and an
HMAC-SHA256 by the key of this direction over the number of the letter and its bytes.
So it can be neither changed nor left out, swapped or repeated by whoever sits on the
wire. The reader says how long a letter may be; a longer one is refused before it is
read, and what is read is decoded as one kind of struct, never as code.
"""

from __future__ import annotations

import hmac
import socket
import struct
import time
from typing import TypeVar

import msgspec

from unisono.errors import Corrupted
from unisono.transports.connect import Connection

_LENGTH = struct.Struct("!I")
_CHECK = 32
_T = TypeVar("_T", bound=msgspec.Struct)


class ControlMessages:
    """Both directions of one connection, which is used for nothing else meanwhile."""

    def __init__(self, connection: Connection) -> None:
        """Begin to count."""
        self.connection = connection
        self._sent = 0
        self._received = 0

    def send(self, message: msgspec.Struct, *, timeout_s: float) -> None:
        """Send; OSError if it cannot be done in time."""
        raw = msgspec.msgpack.encode(message)
        check = _check(self.connection.send_key, self._sent, raw)
        self._sent += 1
        whole = _LENGTH.pack(len(raw)) + raw + check
        self.connection.send(whole, timeout_s=timeout_s)

    def receive(self, kind: type[_T], *, longest: int, timeout_s: float) -> _T:
        """The next letter.

        Raises ConnectionError if the other has closed, TimeoutError if the letter is
        not here in time, Corrupted if it is not what the other can have sent.
        """
        until = time.monotonic() + timeout_s
        where = f"a letter of rank {self.connection.peer}"
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size, until))
        if length > longest:
            raise Corrupted(f"{where} of {length} bytes: expected {longest} at most")
        raw = self._read(length, until)
        check = self._read(_CHECK, until)
        expected = _check(self.connection.receive_key, self._received, raw)
        if not hmac.compare_digest(check, expected):
            raise Corrupted(f"{where} was changed on its way: see who sits between")
        self._received += 1
        try:
            return msgspec.msgpack.decode(raw, type=kind)
        except msgspec.MsgspecError as why:
            raise Corrupted(
                f"{where} is no {kind.__name__.strip('_').lower()} ({why}): install "
                "the same version of unisono for all"
            ) from None

    def has_ended(self) -> bool:
        """Whether the other is gone; one that waits for an answer says nothing."""
        sock = self.connection.socket
        try:
            sock.settimeout(0)
            return not sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _read(self, size: int, until: float) -> bytes:
        raw = bytearray()
        while len(raw) < size:
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError("no letter came in time")
            most = min(size - len(raw), 1 << 16)
            more = self.connection.receive(most, timeout_s=left)
            if not more:
                raise ConnectionResetError("the other has closed")
            raw += more
        return bytes(raw)


def _check(key: bytes, number: int, raw: bytes) -> bytes:
    return hmac.digest(key, number.to_bytes(8, "big") + raw, "sha256")
