"""Anonymous network namespaces: each exists as long as a process uses it.

`ip netns add` writes a name into /run, and a killed process leaves it behind. Here a
thread steps into a new namespace, opens a descriptor of it, and ends; the descriptor
keeps the namespace. When our process is gone, in whatever way, so are its descriptors,
and with the last process inside the kernel takes the namespace down, links and all.

Only a thread can step into another namespace, never a whole process; so everything that
is to happen inside is done by a thread of its own. Processes and sockets made by it
stay where they were made.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")

_NEW_MOUNTS = 0x00020000
_NEW_HOST_NAME = 0x04000000
_NEW_NETWORK = 0x40000000
_PASSES_DOWN_ONLY = 0x4000 | 0x80000  # of mounts, recursively: MS_REC | MS_SLAVE
_DETACH = 2


def new_network() -> int:
    """A descriptor of a new, empty network namespace."""
    return _in_thread(_unshared_network)


def call_inside(network: int, name: str, function: Callable[[], T]) -> T:
    """What `function` returns, called by a thread that lives in this network.

    Its host name is `name`, and /sys shows the links of this network, as it would on a
    machine of its own.
    """
    return _in_thread(partial(_settled, network, name, function))


def enter_network(network: int, name: str) -> None:
    """Move this process into the namespace; it must have no other thread."""
    _settled(network, name, lambda: None)


def processes_inside(network: int) -> Iterator[int]:
    """Pidfds of all processes in this namespace, to be closed by the caller."""
    wanted = os.fstat(network).st_ino
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it may exit at any moment
            if os.stat(f"/proc/{pid}/ns/net").st_ino != wanted:
                continue
            handle = os.pidfd_open(int(pid))
            # The pid may have been reused before the pidfd was opened.
            if os.stat(f"/proc/{pid}/ns/net").st_ino == wanted:
                yield handle
            else:
                os.close(handle)


def kill_inside(network: int) -> int:
    """Kill every process in this namespace; their number."""
    killed = 0
    for handle in processes_inside(network):
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            killed += 1
        os.close(handle)
    return killed


def _in_thread(function: Callable[[], T]) -> T:
    """Run in a new thread: its namespace ends with it."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def _unshared_network() -> int:
    _call("unshare", _NEW_NETWORK)
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _settled(network: int, name: str, function: Callable[[], T]) -> T:
    _call("setns", network, _NEW_NETWORK)
    _call("unshare", _NEW_MOUNTS | _NEW_HOST_NAME)
    _call("sethostname", name.encode(), len(name))
    _call("mount", b"none", b"/", None, ctypes.c_ulong(_PASSES_DOWN_ONLY), None)
    _call("umount2", b"/sys", _DETACH)
    _call("mount", b"sysfs", b"/sys", b"sysfs", ctypes.c_ulong(0), None)
    return function()


def _call(name: str, *args: Any) -> None:
    """Call a libc function; Python has some of them only in newer versions."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*args):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
