"""A transport of its own: ranks are threads, and bytes move over wires in memory.

It has all that a transport needs: a name, what it can do, and `connect`. Its wire is
native/test/memory_wire.cpp. CONTRIBUTING.md walks through both.
"""

from unisono import _native
from unisono.transports.interface import Capabilities, ConnectOptions, Transport
from unisono.transports.session import Session
from unisono.transports.streams import StreamEnd, pair_of
from unisono.transports.threads import connect_threads, sessions


class MemoryTransport(Transport):
    """Threads of one process that talk as ranks of different hosts do."""

    name = "memory"
    capabilities = Capabilities(between_processes=False)
    fault = ""
    """How its wires are broken; see MemoryWire."""

    def connect(self, options: ConnectOptions) -> Session:
        """Wait for the other threads; every rank is on a host of its own."""
        options.announce(options.address)
        return connect_threads(
            options, lambda n: sessions(n, hosts=range(n), pair=self.pair)
        )

    def pair(self) -> tuple[StreamEnd, StreamEnd]:
        """The two ends of a stream."""
        return pair_of(*_native.MemoryWire.pair(self.fault))
