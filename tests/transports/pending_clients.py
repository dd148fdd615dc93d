"""Those who come to a rank's port without belonging there."""

import contextlib
import os
import socket
import struct

from unisono.transports.handshake import RENDEZVOUS, ClientHandshake, Identity
from unisono.transports.secret import make_secret


def connect(address):
    family, where = address.resolve()[0]
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.settimeout(20)
    sock.connect(where)
    return sock


def silent(sock):
    """Connect, and say nothing."""


def garbage(sock):
    sock.sendall(os.urandom(4096))


def huge_length(sock):
    sock.sendall(struct.pack("!I", 2**32 - 1) + b"x" * 200)


def http(sock):
    sock.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + b" " * 128)


def half_offer(sock):
    sock.sendall(b"unisono\x01" + bytes(40))


def half_close(sock):
    sock.sendall(b"unisono")
    sock.shutdown(socket.SHUT_WR)


def wrong_secret(sock):
    sock.sendall(
        ClientHandshake(Identity(make_secret(), "job", 1), 0, RENDEZVOUS).opening
    )


def hang_up(sock):
    """Reset at once."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


TALKATIVE = [garbage, huge_length, http, half_close, wrong_secret]
ALL = [silent, half_offer, hang_up, *TALKATIVE]


def everything_said_to(sock):
    """All that the other sends until it closes."""
    raw = b""
    with contextlib.suppress(ConnectionError):
        while more := sock.recv(4096):
            raw += more
    return raw
