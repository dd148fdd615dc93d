"""Control messages between authenticated ranks: few, small, with a check each.

They are used at the rendezvous, to shrink and to grow, on a connection whose handshake
is done. A message is its length in 4 bytes (big-endian), that many bytes of
MessagePack, and an HMAC-SHA256 by the key of this direction over the number of the
message and its bytes. So an attacker on the network can neither change, omit, swap nor
repeat one. The reader says how long a message may be; a longer one is refused before it
is read, and what is read is decoded as one kind of struct, never as code.
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
        """No message has been sent or received yet."""
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
        """The next message.

        Raises ConnectionError if the peer has closed, TimeoutError if the message is
        not complete in time, Corrupted if it is not what the peer can have sent.
        """
        until = time.monotonic() + timeout_s
        where = f"a control message of rank {self.connection.peer}"
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size, until))
        if length > longest:
            raise Corrupted(f"{where} of {length} bytes: expected {longest} at most")
        raw = self._read(length, until)
        check = self._read(_CHECK, until)
        expected = _check(self.connection.receive_key, self._received, raw)
        if not hmac.compare_digest(check, expected):
            raise Corrupted(
                f"{where} was changed on its way: is the network to be trusted?"
            )
        self._received += 1
        try:
            return msgspec.msgpack.decode(raw, type=kind)
        except msgspec.MsgspecError as why:
            raise Corrupted(
                f"{where} is not a {kind.__name__.strip('_').lower()} ({why}): install "
                "the same version of unisono for all"
            ) from None

    def has_ended(self) -> bool:
        """Whether the peer has closed; one that waits for an answer sends nothing."""
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
                raise TimeoutError("no control message came in time")
            most = min(size - len(raw), 1 << 16)
            more = self.connection.receive(most, timeout_s=left)
            if not more:
                raise ConnectionResetError("the peer has closed")
            raw += more
        return bytes(raw)


def _check(key: bytes, number: int, raw: bytes) -> bytes:
    return hmac.digest(key, number.to_bytes(8, "big") + raw, "sha256")
