"""Lifelines for tests: stars in one process, and ranks in processes of their own.

    with Star(4) as star:                     # rank 0 is the hub, 1 to 3 are leaves
        star[2].announce_failure(7, 1)
        star.hears(3, ("failure", 2, "none", 2, 7, 1))

Some ranks can be left out of the star, to be played by a test with a plain socket or by
another process: `Star(4, without=[2])` keeps their end of the connection.
"""

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time

from unisono import _native

TIMEOUT_S = 30.0
CALM = {"beat_ms": 100, "limit_ms": 20_000}


def pair(tcp=True):
    """Two connected sockets, over loopback or not."""
    if not tcp:
        return socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    return near, far


def key(src, dst):
    return hashlib.sha256(f"{src} to {dst}".encode()).digest()[:16]


def keys(rank, n):
    return [(key(rank, other), key(other, rank)) for other in range(n)]


def until(holds, what="it"):
    """Wait until something holds; the limit is there for what hangs."""
    deadline = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < deadline, f"{what} does not happen"
        time.sleep(0.005)


class Star:
    """A hub and its leaves as lifelines of this process, and what each has heard."""

    def __init__(self, n, without=(), tcp=True, begun=True, **options):
        self.n, self.lines, self.outside = n, {}, {}
        self.heard = {rank: [] for rank in range(n)}
        fds = {rank: [-1] * n for rank in range(n)}
        for leaf in range(1, n):
            ends = dict(zip((0, leaf), pair(tcp), strict=True))
            for rank, other in ((0, leaf), (leaf, 0)):
                if rank in without:
                    self.outside[rank, other] = ends[rank]
                else:
                    fds[rank][other] = ends[rank].detach()
        self._ends = {rank: fds[rank] for rank in range(n) if rank not in without}
        self._options = CALM | options
        if begun:
            self.begin()

    def begin(self):
        """From now on who is silent is noticed."""
        for rank, fds in self._ends.items():
            self.lines[rank] = _native.Lifeline(
                rank, wires(fds), keys(rank, self.n), **self._options
            )

    def __getitem__(self, rank):
        return self.lines[rank]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for line in self.lines.values():
            line.close()
        for end in self.outside.values():
            end.close()

    def take(self, rank):
        """All that a rank has heard so far."""
        if rank in self.lines:
            self.heard[rank] += self.lines[rank].events()
        return self.heard[rank]

    def hears(self, rank, event):
        until(lambda: event in self.take(rank), f"rank {rank} hears {event}")

    def all_hear(self, event, ranks=None):
        for rank in self.lines if ranks is None else ranks:
            self.hears(rank, event)

    def settle(self, ranks):
        """A failure that one of them announces arrives after all earlier events."""
        teller, *others = ranks
        word = time.monotonic_ns()
        self[teller].announce_failure(99, word)
        self.all_hear(("failure", teller, "none", teller, 99, word), others)

    def news(self, rank):
        """What a rank heard, without what `settle` says."""
        return [event for event in self.take(rank) if event[4] != 99]


def wires(fds):
    """A wire over each descriptor; None where there is none."""
    return [None if fd < 0 else _native.SocketWire(fd) for fd in fds]


class Process:
    """A rank of a star as a process: its ends of the connections are its own."""

    def __init__(self, star, rank, then="listen", **options):
        ends = {o: end for (r, o), end in star.outside.items() if r == rank}
        fds = [ends[o].fileno() if o in ends else -1 for o in range(star.n)]
        order = {"rank": rank, "fds": fds, "then": then, "options": CALM | options}
        self.child = subprocess.Popen(
            [sys.executable, __file__, json.dumps(order)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[fd for fd in fds if fd >= 0],
            text=True,
        )
        for other, end in ends.items():
            del star.outside[rank, other]
            end.close()
        self.first = self.child.stdout.readline().strip()
        assert self.first

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.child.stdin.close()
        if self.child.poll() is None:
            self.child.send_signal(signal.SIGCONT)
            self.child.kill()
        self.child.stdout.close()
        self.child.wait(TIMEOUT_S)

    def send(self, number):
        self.child.send_signal(number)

    def end(self):
        """Have it end by itself; what it heard, and its exit status."""
        self.child.stdin.close()
        text = self.child.stdout.read()
        heard = [tuple(event) for event in json.loads(text or "[]")]
        return heard, self.child.wait(TIMEOUT_S)


def forks():
    """A child that outlives this process, and holds on to all it inherited."""
    child = os.fork()
    if child == 0:
        signal.alarm(int(TIMEOUT_S))
        os.close(1)
        while True:
            time.sleep(1)
    return child


def main(order):
    fds, n = order["fds"], len(order["fds"])
    line = _native.Lifeline(
        order["rank"], wires(fds), keys(order["rank"], n), **order["options"]
    )
    ready = forks() if order["then"] == "fork" else "ready"
    sys.stdout.write(f"{ready}\n")
    sys.stdout.flush()
    sys.stdin.read()
    if order["then"] == "vanish":
        os._exit(0)
    if order["then"] == "forget":
        sys.forgotten = line
        return
    line.close()
    sys.stdout.write(json.dumps(line.events()))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
