"""Two connected ends over loopback, and how a test resets such a connection."""

import ctypes
import os
import socket


def tcp_pair():
    """The end that connected, and the one that accepted."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    return one, other


def reset(end):
    """Drop what is queued in it, and have the kernel tell the other end.

    That is what it does when a socket is connected to the address of no family.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.connect(end.fileno(), bytes(16), 16)
    assert not failed, os.strerror(ctypes.get_errno())
