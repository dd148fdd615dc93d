"""Encryption, if all ranks want it: TLS 1.3 on every connection between hosts.

    unisono.init(tls="mutual")        or UNISONO_TLS=mutual, the same for all ranks

It begins where the handshake ends (`handshake`), by a key that follows from the job's
secret and from all that was said in the handshake: so both ends know each other, and
there are no certificates to make or to carry about. A fresh Diffie-Hellman exchange is
mixed in, by which what was recorded stays closed even to one who learns the secret
later. The dialer is TLS's client, the one who answers its server.

All of it is done in native code, since Python's own ssl takes such keys only from 3.13
on, by OpenSSL 3, which is loaded when it is first needed. Here is what goes on in
Python: the opening, and the few letters of a meeting.
"""

from __future__ import annotations

import errno
import select
import socket
import time
from typing import TYPE_CHECKING

from unisono import _native
from unisono.errors import BadArgument, Corrupted, MissingLibrary, NotAuthentic

if TYPE_CHECKING:
    from unisono._native import Tls
    from unisono.transports.secret import Secret

TLS = "UNISONO_TLS"
MUTUAL = "mutual"
KEY_BYTES = 32


def wanted(told: str | None, where: str = "tls") -> bool:
    """Whether to encrypt, by what an argument or a variable says."""
    if told not in (None, "", MUTUAL):
        raise BadArgument(f"{where} = {told!r}: expected {MUTUAL!r}, or nothing")
    return told == MUTUAL


def check(secret: Secret | None) -> None:
    """Refuse at once what could not work: no library, or no secret."""
    _require()
    if secret is None or secret.is_open:
        raise BadArgument(
            f"tls={MUTUAL!r}: this job has no secret, by which ranks would know each "
            "other; give all the same UNISONO_SECRET or UNISONO_SECRET_FILE"
        )


def begin(sock: socket.socket, key: bytes, *, is_client: bool) -> Tls:
    """One end, before the first word; it never waits. The socket must outlive it."""
    _require()
    return _native.Tls(sock.fileno(), key, is_client)


def _require() -> None:
    missing = _native.tls_missing()
    if missing:
        raise MissingLibrary(
            f"tls={MUTUAL!r} needs OpenSSL 3, which cannot be loaded here ({missing}): "
            "install it, as by `apt install libssl3` or `dnf install openssl-libs`"
        )


def shake(tls: Tls) -> int:
    """Go on with the opening: 0 if it is done, or what to poll for; NotAuthentic."""
    try:
        return tls.handshake()
    except OSError as why:
        if why.errno != errno.EBADMSG:
            raise
        raise NotAuthentic(
            "whoever is at the other end does not hold the key for TLS, or somebody "
            "between has changed what was said"
        ) from None


def connected(sock: socket.socket, key: bytes, *, timeout_s: float) -> Tls:
    """The dialer's end, open; TimeoutError if the other does not answer in time."""
    until = time.monotonic() + timeout_s
    tls = begin(sock, key, is_client=True)
    while awaited := shake(tls):
        _await(sock, awaited, until)
    return tls


def send_all(sock: socket.socket, tls: Tls, raw: bytes, *, until: float) -> None:
    """Send; TimeoutError, or another OSError if the other is gone."""
    while raw:
        try:
            raw = raw[tls.send(raw) :]
        except BlockingIOError:
            _await(sock, select.POLLOUT, until)


def receive(sock: socket.socket, tls: Tls, most: int, *, until: float) -> bytes:
    """Some bytes, or none if the other has closed; Corrupted if they are not its."""
    while True:
        try:
            return tls.recv(most)
        except BlockingIOError:
            _await(sock, select.POLLIN, until)
        except OSError as why:
            if why.errno != errno.EBADMSG:
                raise
            raise Corrupted("it was changed on its way: see who sits between") from None


def _await(sock: socket.socket, events: int, until: float) -> None:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError("the other was not ready in time")
    poll = select.poll()
    poll.register(sock, events)
    poll.poll(left * 1e3)
