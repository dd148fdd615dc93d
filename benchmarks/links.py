"""Whether the testing tools keep their word: rates of links, and speed of the proxy.

    sudo .venv/bin/python benchmarks/links.py [1gbit 20mbit ...]

For each rate: three TCP streams of two seconds between two hosts, each in a process of
its own, and how far volleys of datagrams ran ahead of the rate on an idle link, by the
kernel's own time stamps. Then a stream through the proxy, and one without it.
"""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import time

from unisono.testing import Hosts, Proxy
from unisono.testing.hosts import NetworkHost
from unisono.units import parse_rate

RECEIVE = """
import socket, sys, time
server = socket.create_server((sys.argv[1], 0))
print(server.getsockname()[1], flush=True)
taken, _ = server.accept()
buffer, total = bytearray(1 << 20), 0
taken.recv_into(buffer)
began = time.monotonic()
while count := taken.recv_into(buffer):
    total += count
print(total / (time.monotonic() - began))
"""
SEND = """
import socket, sys, time
dialed = socket.create_connection((sys.argv[1], int(sys.argv[2])))
until = time.monotonic() + 2
while time.monotonic() < until:
    dialed.sendall(bytes(1 << 18))
"""
FRAME = 1514
SO_TIMESTAMPNS = 35


def stream(src: NetworkHost, dst: NetworkHost) -> float:
    """Bytes per second from host to host."""
    receive = [sys.executable, "-S", "-c", RECEIVE, dst.address]
    receiver = dst.run(receive, stdout=subprocess.PIPE, text=True)
    assert receiver.stdout is not None
    port = receiver.stdout.readline().strip()
    src.run([sys.executable, "-S", "-c", SEND, dst.address, port]).wait()
    return float(receiver.communicate()[0])


def ahead(src: NetworkHost, dst: NetworkHost, rate: int) -> float:
    """The most bytes by which a volley of 60 frames was ahead of its rate."""
    receiver = dst.call(socket.socket, socket.AF_INET, socket.SOCK_DGRAM)
    sender = src.call(socket.socket, socket.AF_INET, socket.SOCK_DGRAM)
    most = 0.0
    with receiver, sender:
        receiver.bind((dst.address, 9))
        receiver.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        receiver.setblocking(False)
        sender.connect((dst.address, 9))
        time.sleep(0.2)  # the kernel begins to stamp a moment later
        for _ in range(20):
            for _ in range(60):
                sender.send(bytes(FRAME - 42))
            time.sleep(0.05 + 60 * FRAME * 8 / rate)
            times = arrivals(receiver)
            excess = [
                (count + 1) * FRAME - (at - times[0]) * rate / 8
                for count, at in enumerate(times)
            ]
            most = max(most, *excess)
    return most


def arrivals(receiver: socket.socket) -> list[float]:
    """When each datagram that lies here came, in seconds."""
    found: list[float] = []
    while True:
        try:
            _, notes, _, _ = receiver.recvmsg(2048, 128)
        except BlockingIOError:
            return found
        seconds, nanoseconds = struct.unpack("qq", notes[0][2])
        found.append(seconds + nanoseconds * 1e-9)


def through_proxy(*, used: bool) -> float:
    """Bytes per second of a stream on loopback, through a proxy or not."""
    receive = [sys.executable, "-S", "-c", RECEIVE, "127.0.0.1"]
    with subprocess.Popen(receive, stdout=subprocess.PIPE, text=True) as receiver:
        assert receiver.stdout is not None
        port = receiver.stdout.readline().strip()
        with Proxy(f"127.0.0.1:{port}") as proxy:
            dialed = proxy.address.rpartition(":")[2] if used else port
            send = [sys.executable, "-S", "-c", SEND, "127.0.0.1", dialed]
            subprocess.run(send, check=True)
            return float(receiver.stdout.readline())


def main(rates: list[str]) -> None:
    """Measure and print."""
    for rate in rates:
        with Hosts(2, rate=rate) as hosts:
            speeds = sorted(stream(hosts[0], hosts[1]) * 8 / 1e6 for _ in range(3))
            most = ahead(hosts[0], hosts[1], parse_rate(rate))
        text = " ".join(f"{speed:.1f}" for speed in speeds)
        print(f"{rate:10} {text} Mbit/s, at most {most / 1024:.1f} KiB ahead")
    for used in (False, True):
        speed = through_proxy(used=used)
        print(f"{'proxy' if used else 'no proxy':10} {speed / 1e9:.2f} GB/s")


if __name__ == "__main__":
    main(sys.argv[1:] or ["1gbit", "100mbit", "20mbit"])
