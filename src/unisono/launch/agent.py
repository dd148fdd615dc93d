"""The launcher's hand on another host: `python -m unisono.launch.agent`.

It is started by ssh with nothing on its command line; what to run, where, and the job's
secret come over standard input, which only the launcher holds the other end of. It is
the launcher's own job (`launch.Job`) with three differences: what ranks say is passed
on unchanged, to be cut into lines where all hosts come together; nobody here decides
when a grace is over; and when standard input ends, so do the ranks. The connection may
break in any way: whether ssh is killed or its host, what is left is an end of file.

Orders are read on a thread of their own. So a signal arrives even while the main one
waits for a terminal, at the other end, that takes no more lines.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import IO

import unisono
from unisono.errors import UnisonoError
from unisono.launch import protocol as orders
from unisono.launch.local import Child, Job
from unisono.launch.output import Speaker, Stage
from unisono.launch.protocol import Done, Ended, Hello, Order, Refused, Said, Started
from unisono.runtime.world.address import free_port
from unisono.transports.addresses import Address, is_loopback

_PAUSES = (signal.SIGSTOP, signal.SIGCONT)
_CONNECTION_ENDED = 4


class _Line:
    """The way back to the launcher; whole messages, from any thread."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._lock = descriptor, threading.Lock()

    def send(self, message: orders.Message) -> None:
        """Now, however long it takes."""
        self.raw(orders.frame(message))

    def raw(self, data: bytes) -> None:
        """Bytes that are no message: the greeting."""
        with self._lock:
            try:
                orders.write(self._descriptor, data)
            except OSError:  # nobody hears us any more
                os._exit(_CONNECTION_ENDED)


class _PassOn(Speaker):
    """One stream of one rank, sent home as it comes."""

    def __init__(self, line: _Line, rank: int, stream: int) -> None:
        super().__init__(())
        self._line, self._rank, self._stream = line, rank, stream

    def hear(self, data: bytes) -> None:
        self._line.send(Said(self._rank, self._stream, data))

    def finish(self) -> None:
        """What is left over is the launcher's to finish."""


class _Elsewhere(Stage):
    """A stage whose audience sits at another host."""

    def __init__(self, line: _Line) -> None:
        self._line = line

    def speakers(self, rank: int) -> tuple[Speaker, Speaker]:
        return _PassOn(self._line, rank, 1), _PassOn(self._line, rank, 2)

    def close(self) -> None:
        """Nothing is open."""


class Agent(Job):
    """The ranks of this host, at the orders of a launcher elsewhere."""

    def __init__(self, order: Order, line: _Line) -> None:
        """Ready to run."""
        super().__init__(order.command, order.ranks, _Elsewhere(line), {}, 0.0)
        self._environment.update(order.environment)
        self._environment["UNISONO_LOCAL_WORLD_SIZE"] = str(order.ranks)
        self._numbers = range(order.first, order.first + order.ranks)
        self._line = line
        self._given: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def obey(self, messages: Iterator[orders.AnyMessage]) -> None:
        """Do what the launcher says until it says no more; then all ends.

        The warden hears of our end and kills the ranks.
        """
        try:
            for message in messages:
                if isinstance(message, orders.Signal):
                    self._receive(signal.Signals(message.number))
                elif isinstance(message, orders.Input):
                    self._given.put(message.data)
        finally:  # whatever it was: without orders there is nothing to do here
            os._exit(_CONNECTION_ENDED)

    def _receive(self, number: signal.Signals) -> None:
        if self._asked is None and number not in _PAUSES:
            self._asked = time.monotonic(), number  # no more ranks are started
        self._signal(number)

    def _input(self) -> int:
        return subprocess.PIPE

    def _feed(self, pipe: IO[bytes]) -> None:
        threading.Thread(target=self._hand_over, args=(pipe,), daemon=True).start()

    def _hand_over(self, pipe: IO[bytes]) -> None:
        """One piece at a time: more is asked for when it was taken."""
        with contextlib.suppress(OSError), pipe:
            while True:
                self._line.send(orders.Wants())
                data = self._given.get()
                if not data:
                    return
                orders.write(pipe.fileno(), data)

    def _note_start(self, rank: Child) -> None:
        self._line.send(Started(rank.number, rank.pid))

    def _see_end(self, rank: Child) -> None:
        super()._see_end(rank)
        if rank.ended is not None:
            self._line.send(Ended(rank.number, rank.status))

    def _begin_grace(self) -> None:
        """The launcher gives it, to all hosts alike."""

    def _hearing_signals(self) -> contextlib.AbstractContextManager[None]:
        """None: those that matter come as messages, and the others may end us."""
        return contextlib.nullcontext()


def _what_is_wrong(order: Order) -> str:
    """Why the order cannot be carried out here, if so."""
    told = order.environment
    # Where an interface is named, that is where rank 0 listens, whatever its name.
    address = "" if told.get("UNISONO_INTERFACE") else told.get("UNISONO_ADDRESS", "")
    if address and order.first == 0 and (own := _own_loopback(address)):
        return (
            f"it takes its own name for {own}, where the other hosts cannot reach it; "
            "put its real address beside the name in /etc/hosts there, or give "
            "--address host:port"
        )
    try:
        os.chdir(order.folder)
    except OSError as why:
        return (
            f"the folder {order.folder} cannot be entered there: {why.strerror}; share "
            "it between the hosts, or name another with --chdir"
        )
    return ""


def _own_loopback(address: str) -> str:
    """The loopback address that a host's name stands for here, if it is a name."""
    place = Address.parse(address)
    if is_loopback(place.host) or place.host == "localhost":
        return ""  # meant so
    try:
        found = [str(where[0]) for _, where in place.resolve()]
    except UnisonoError:  # the rank that listens will say so
        return ""
    return found[0] if all(map(is_loopback, found)) else ""


def main() -> int:
    """Greet, take the order, carry it out."""
    # Both are moved out of reach: nothing that prints or reads may come in between.
    line, messages = _Line(os.dup(1)), orders.listen(os.dup(0))
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    line.raw(b"\n%s%s\n" % (orders.GREETING, unisono.__version__.encode()))
    line.send(Hello(len(os.sched_getaffinity(0)), free_port()))
    order = next(messages, None)
    if not isinstance(order, Order):
        return _CONNECTION_ENDED
    if wrong := _what_is_wrong(order):
        line.send(Refused(wrong))
        return 2
    agent = Agent(order, line)
    threading.Thread(target=agent.obey, args=(messages,), daemon=True).start()
    try:
        agent.run()
    except UnisonoError as why:
        line.send(Refused(str(why)))
        return 2
    line.send(Done())
    return 0


if __name__ == "__main__":
    sys.exit(main())
