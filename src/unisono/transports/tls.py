"""Encryption, if all ranks want it: TLS 1.3 on every connection between hosts.

    unisono.init(tls="mutual")        or UNISONO_TLS=mutual, the same for all ranks

It begins where the handshake ends (`handshake`), by a key that follows from the job's
secret and from all bytes of the handshake: so both ends are authenticated, and there
are no certificates to make or to distribute. A fresh Diffie-Hellman exchange is
included, so that a recorded connection cannot be decrypted with a secret that was
learned later. The rank that connects is TLS's client.

All of it is done in native code, since Python's own ssl takes such keys only from 3.13
on, by OpenSSL 3, which is loaded when it is first needed. Here is what goes on in
Python: the handshake, and the control messages of a rendezvous.
"""

from __future__ import annotations

import errno
import math
import select
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from unisono import _native
from unisono.errors import BadArgument, Corrupted, MissingLibrary, NotAuthentic
from unisono.transports.deadline import LOOK_S

if TYPE_CHECKING:
    from unisono._native import Tls
    from unisono.transports.secret import Secret

TLS = "UNISONO_TLS"
MUTUAL = "mutual"
KEY_BYTES = 32


def wanted(value: str | None, where: str = "tls") -> bool:
    """Whether to encrypt, by the value of an argument or a variable."""
    if value not in (None, "", MUTUAL):
        raise BadArgument(f"{where} = {value!r}: expected {MUTUAL!r}, or nothing")
    return value == MUTUAL


def check(secret: Secret | None) -> None:
    """Refuse at once what could not work: no library, or no secret."""
    _require()
    if secret is None or secret.is_open:
        raise BadArgument(
            f"tls={MUTUAL!r}: this job has no secret, which authenticates its ranks; "
            "give all the same UNISONO_SECRET or UNISONO_SECRET_FILE"
        )


def begin(sock: socket.socket, key: bytes, *, is_client: bool) -> Tls:
    """One end, before the handshake; it never waits. The socket must outlive it."""
    _require()
    return _native.Tls(sock.fileno(), key, is_client)


def _require() -> None:
    missing = _native.tls_missing()
    if missing:
        raise MissingLibrary(
            f"tls={MUTUAL!r} needs OpenSSL 3, which cannot be loaded here ({missing}): "
            "install it, as by `apt install libssl3` or `dnf install openssl-libs`"
        )


def continue_handshake(tls: Tls) -> int:
    """Continue the handshake: 0 if it is done, or what to poll for; NotAuthentic."""
    try:
        return tls.handshake()
    except OSError as why:
        if why.errno != errno.EBADMSG:
            raise
        raise NotAuthentic(
            "the peer does not hold the key for TLS, or the handshake was changed on "
            "its way"
        ) from None


def client_handshake(
    sock: socket.socket,
    key: bytes,
    *,
    timeout_s: float,
    look: Callable[[], object] = lambda: None,
) -> Tls:
    """The client's end, after the handshake; TimeoutError if there is no answer.

    `look` is called while it waits, and raises if there will be none.
    """
    until = time.monotonic() + timeout_s
    tls = begin(sock, key, is_client=True)
    while awaited := continue_handshake(tls):
        while not _await(sock, awaited, until, LOOK_S):
            look()
    return tls


def send_all(sock: socket.socket, tls: Tls, raw: bytes, *, until: float) -> None:
    """Send; TimeoutError, or another OSError if the peer has closed."""
    while raw:
        try:
            raw = raw[tls.send(raw) :]
        except BlockingIOError:
            _await(sock, select.POLLOUT, until)


def receive(sock: socket.socket, tls: Tls, most: int, *, until: float) -> bytes:
    """Some bytes, or none if the peer has closed; Corrupted if they were changed."""
    while True:
        try:
            return tls.recv(most)
        except BlockingIOError:
            _await(sock, select.POLLIN, until)
        except OSError as why:
            if why.errno != errno.EBADMSG:
                raise
            raise Corrupted(
                "it was changed on its way: is the network to be trusted?"
            ) from None


def _await(
    sock: socket.socket, events: int, until: float, most_s: float = math.inf
) -> bool:
    """Whether it is ready, after so many seconds at most; TimeoutError at the end."""
    left = min(until - time.monotonic(), most_s)
    if left <= 0:
        raise TimeoutError("the peer was not ready in time")
    poll = select.poll()
    poll.register(sock, events)
    return bool(poll.poll(left * 1e3))
