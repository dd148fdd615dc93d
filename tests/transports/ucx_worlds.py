"""What tests of UCX share: wires between two workers of this process."""

import os
import socket
import time
from contextlib import contextmanager, suppress

import pytest

from unisono import _native
from unisono.transports import ucx

needs_ucx = pytest.mark.skipif(
    bool(ucx.load()),
    reason="libucp is not installed (make test-ucx installs a wheel of it)",
)


TRANSPORTS = ["tcp", "posix,cma,self"]
"""Of UCX: a network, and shared memory."""


def use(monkeypatch, transports):
    """Let UCX use these alone."""
    monkeypatch.setenv("UCX_TLS", transports)
    for name in ("POSIX", "CMA"):  # older ones need to be told
        if name.lower() in transports:
            monkeypatch.setenv(f"UCX_{name}_ERROR_HANDLING", "y")


@contextmanager
def two_workers():
    """The UCX of two ranks."""
    workers = _native.Ucx(), _native.Ucx()
    try:
        yield workers
    finally:
        for worker in workers:
            worker.close(0.0)


def wires(workers):
    """Two ends, whose workers have met; and the keys of the second."""
    socks = socket.socketpair()
    one, other = os.urandom(16), os.urandom(16)
    keys = ucx.keys_of(one, other), ucx.keys_of(other, one)
    ends = [
        _native.UcxWire(worker, sock.detach(), own)
        for worker, sock, own in zip(workers, socks, keys, strict=True)
    ]
    until = time.monotonic() + 20
    while not all(settled(end) for end in ends):
        assert time.monotonic() < until
    return ends, keys[1]


def settled(end):
    """Whether it is connected, and UCX has nothing to do for a moment."""
    with suppress(BlockingIOError):
        end.receive(1)
    time.sleep(0.01)
    awaited = end.await_send()
    return len(awaited) == 1


def pair(workers):
    return wires(workers)[0]
