"""The state of other processes, from /proc, and waiting for it."""

import os
import time
from pathlib import Path


def state_of(pid):
    """The letter that the kernel has for a process; X if it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "X"
    return stat.rpartition(")")[2].split()[0]


def has_ended(pid):
    """Whether there is no such process, or it is a zombie and its threads are gone.

    A zombie with threads that are about to end still has its sockets open.
    """
    if state_of(pid) not in "ZX":
        return False
    try:
        return len(os.listdir(f"/proc/{pid}/task")) <= 1
    except OSError:
        return True


def is_gone(pid, within=30.0):
    """Whether a process ends in time; a zombie has ended."""
    until = time.monotonic() + within
    while time.monotonic() < until:
        if has_ended(pid):
            return True
        time.sleep(0.01)
    return False


def gone(pids, seconds=60):
    """Whether all these processes end within the time; no zombie is left."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        if not any(os.path.exists(f"/proc/{pid}") for pid in pids):
            return True
        time.sleep(0.05)
    return False


def wait_for(condition, within=40.0):
    until = time.monotonic() + within
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)
