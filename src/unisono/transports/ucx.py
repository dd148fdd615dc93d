"""Ranks on several hosts whose data moves by UCX: InfiniBand, RoCE and others.

    unisono.init(fabric="ucx")        or UNISONO_FABRIC=ucx, the same for all ranks

Ranks find and authenticate each other as with `tcp`, and lifelines are TCP. A stream
begins as an authenticated connection, too. Over it the two ranks exchange the addresses
of their UCX workers; from there on UCX's active messages carry the bytes, and the
connection stays open: when it ends, the peer has closed or died, which UCX itself may
notice much later. UCX neither authenticates nor encrypts. So every message has a
checksum by a key of the connection, and with `tls="mutual"` this transport is refused.

UCX chooses the network: variables as UCX_TLS and UCX_NET_DEVICES are its own. Nothing
of it is needed to build or install unisono: libucp is opened when it is first used.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
from pathlib import Path

from unisono import _native
from unisono.errors import BadArgument, MissingLibrary
from unisono.transports.connect import Connection
from unisono.transports.handshake import KEY_SIZE
from unisono.transports.interface import Capabilities, ConnectOptions
from unisono.transports.session import Session
from unisono.transports.tcp import Tcp, Wires

LIBRARY = "UNISONO_UCX"
"""The path of libucp.so.0, if it is not the one that would be found."""

_NAME = "libucp.so.0"
_WHEEL = "libucx"  # the package that the wheels libucx-cu12 and libucx-cu13 install
_CLOSE_S = 2.0
"""How long a rank that closes waits until its peers have what was sent to them."""


class Ucx(Tcp):
    """Processes on several hosts, whose data moves by UCX."""

    name = "ucx"
    capabilities = Capabilities(between_hosts=True, zero_copy=True)

    def unavailable(self) -> str:
        """Why UCX cannot be used here, and how to get it; or ""."""
        why = load()
        if not why:
            return ""
        return (
            f"UCX cannot be loaded ({why}): install UCX 1.13 or newer, as by `apt "
            "install libucx0`, or the one of the cluster (module load ucx), or set "
            f"{LIBRARY} to the path of {_NAME}; for trying, `pip install libucx-cu12`, "
            "which has no RDMA"
        )

    def connect(self, options: ConnectOptions) -> Session:
        """Find the other ranks of the job, on this host and on others."""
        if options.tls:
            raise BadArgument(
                "tls='mutual' never uses UCX, which does not encrypt: choose "
                "fabric='tcp' (UNISONO_FABRIC), or do without tls (UNISONO_TLS)"
            )
        return super().connect(options)

    def wires(self) -> Wires:
        """Each session has a worker of UCX's, which all of its wires share."""
        try:
            worker = _native.Ucx()
        except RuntimeError as why:
            raise MissingLibrary(
                f"UCX does not start here: {why}; do UCX_TLS and UCX_NET_DEVICES name "
                "what this host has? (`ucx_info -d` lists it)"
            ) from None

        def make(connection: Connection) -> _native.Wire:
            keys = keys_of(connection.send_key, connection.receive_key)
            return _native.UcxWire(worker, connection.socket.detach(), keys)

        words = f"; data by {describe()}, over the cards that it chooses"
        return Wires(
            make, lambda: worker.close(_CLOSE_S), words, rails=False, tcp=False
        )


def load() -> str:
    """Load libucp, once; why that is not possible, or ""."""
    return _native.load_ucx(_paths())


def describe() -> str:
    """Which UCX was loaded."""
    *version, path = _native.ucx_version()
    return f"UCX {'.'.join(map(str, version))} ({path})"


def keys_of(send_key: bytes, receive_key: bytes) -> list[bytes]:
    """Of what goes over the socket and of messages, sent and received."""
    return [
        hashlib.blake2b(use, digest_size=KEY_SIZE, key=key).digest()
        for key in (send_key, receive_key)
        for use in (b"unisono ucx control", b"unisono ucx messages")
    ]


def _paths() -> list[str]:
    """Where it may be: as named, as the loader finds it, in a wheel."""
    if named := os.environ.get(LIBRARY, ""):
        return [named]
    found = importlib.util.find_spec(_WHEEL)
    folders = found.submodule_search_locations if found is not None else None
    return [_NAME, *(str(Path(folder, "lib", _NAME)) for folder in folders or ())]
