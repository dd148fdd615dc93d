"""What a process holds: descriptors, threads, maps of shared memory, memory."""

import os
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from unisono.transports.streams import encrypted_pair


@dataclass
class Holding:
    descriptors: Counter
    threads: int
    maps: Counter

    def more_than(self, before):
        """What is held here and was not before, in words."""
        found = [
            f"{count} × {name}"
            for name, count in (self.descriptors - before.descriptors).items()
        ]
        found += [f"map {name} × {c}" for name, c in (self.maps - before.maps).items()]
        if self.threads > before.threads:
            found.append(f"{self.threads - before.threads} threads")
        return found


def holding():
    """What this process holds now."""
    return Holding(_descriptors(), len(os.listdir("/proc/self/task")), _maps())


def holding_before(trial):
    """What this process holds before a trial, and what it will keep after it.

    With TLS that is the descriptor that is always ready: a process makes one when bytes
    that are decrypted wait in a wire for the first time, as they do in some trials.
    """
    if trial.tls:
        let_decrypted_bytes_wait()
    return holding()


def let_decrypted_bytes_wait():
    """Ask what to poll for where nothing is to be waited for."""
    one, other = (end.wire for end in encrypted_pair())
    one.send(b"some")
    other.receive(1)
    other.await_receive(1)
    one.close()
    other.close()


def _descriptors():
    found = Counter()
    for fd in os.listdir("/proc/self/fd"):
        try:
            found[_kind(os.readlink(f"/proc/self/fd/{fd}"))] += 1
        except OSError:
            continue  # the one by which they were listed
    return found


def _kind(name):
    """Without the number that tells sockets and pipes apart."""
    return name.partition("[")[0]


def _maps():
    lines = Path("/proc/self/maps").read_text().splitlines()
    return Counter(line.split(None, 5)[5] for line in lines if "memfd:" in line)


def left_after(before, within_s=10.0):
    """What is held beyond `before` although it has had time to go."""
    until = time.monotonic() + within_s
    while (left := holding().more_than(before)) and time.monotonic() < until:
        time.sleep(0.01)
    return left


def memory():
    """Resident bytes that are private to this process, and all that is mapped."""
    found = Path("/proc/self/smaps_rollup").read_text()
    values = dict(line.split(":") for line in found.splitlines()[1:])
    kib = {name: int(value.split()[0]) for name, value in values.items()}
    return 1024 * (kib["Private_Dirty"] + kib["Private_Clean"]), 1024 * kib["Rss"]
