"""Unix sockets without files: names that end with their process, users that are known.

A name in the abstract namespace is in no file system. Any process on the host may bind
it or connect to it, so both ends ask the kernel which process and user the peer is.
"""

from __future__ import annotations

import hashlib
import os
import select
import socket
import struct
from collections.abc import Iterable
from typing import Protocol

_CREDENTIALS = struct.Struct("3i")


class _HasFileno(Protocol):
    def fileno(self) -> int: ...


def abstract(name: str) -> str:
    """The address that is derived from this name and the user."""
    # The leading zero makes the name abstract.
    named = hashlib.sha256(f"{os.getuid()}/{name}".encode())
    return "\0unisono-" + named.hexdigest()[:40]


def seqpacket() -> socket.socket:
    """A socket that keeps messages apart."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def credentials(connection: socket.socket) -> tuple[int, int, int]:
    """Process, user and group at the other end, as the kernel knows them."""
    raw = connection.getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
    )
    pid, uid, gid = _CREDENTIALS.unpack(raw)
    return pid, uid, gid


def is_ours(connection: socket.socket) -> bool:
    """Whether a process of this user is at the other end."""
    return credentials(connection)[1] == os.getuid()


def readable(
    waiting: Iterable[int | _HasFileno], within_s: float | None = None
) -> set[int]:
    """The descriptors that can be read, as soon as one can; after a while none.

    Unlike select(), whatever their numbers are.
    """
    poll = select.poll()
    for one in waiting:
        poll.register(one, select.POLLIN)
    limit = None if within_s is None else max(0.0, within_s) * 1000
    return {fd for fd, _ in poll.poll(limit)}


def pid_namespace() -> str:
    """What processes have in common whose ids mean the same; "" if unknown."""
    try:
        return str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        return ""
