"""What a transport is: how the ranks of a world find each other, and what it can do.

    class MyTransport(Transport):
        name = "mine"
        capabilities = Capabilities(between_hosts=True)

        def connect(self, options: ConnectOptions) -> Session:
            ...

`connect` is called once on every rank of a world. It finds the other ranks and returns
a `Session`: a native engine, who the peers are and on which host each of them is, and,
between hosts, `Streams`. From there on the engine moves the bytes:

send, receive into    within a host through memory that the ranks share; between hosts
                      over wires (`_native.Wire`), one or more for each direction of
                      two ranks that talk. `Streams` opens them when they are needed.
wait                  the engine sleeps on what a wire says to poll for.
close                 `Session.close` ends the engine, the streams and what else the
                      transport has opened.

So a transport that moves bytes in a new way adds a native class that derives from Wire
(native/net/wire.hpp) and one Python module with its `connect`. It is registered by name
(`unisono.transports.registry`), and `unisono.testing.check_transport` shows whether it
does all that the engine relies on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

from unisono.transports.secret import Secret
from unisono.transports.session import Session


@dataclass(frozen=True)
class Capabilities:
    """What a transport can do.

    `between_processes`: ranks may be processes; otherwise they are threads of one.
    `between_hosts`: ranks may be on several hosts, and `ConnectOptions.address` is
    needed. `zero_copy`: ranks of one host may read each other's arrays in place.
    `encryption`: `ConnectOptions.tls` is honoured. `device_memory`: arrays in the
    memory of a GPU are moved without a copy in host memory.
    """

    between_processes: bool = True
    between_hosts: bool = False
    zero_copy: bool = False
    encryption: bool = False
    device_memory: bool = False


@dataclass(frozen=True)
class ConnectOptions:
    """What a rank knows when it connects.

    `job` is equal on the ranks of a job and on no others; `epoch` numbers its worlds.
    `version` is that of this package, which all ranks must share. Within `timeout_s`
    all ranks are connected, or ConnectFailed names those that are missing. `lost` says
    why it cannot succeed, as soon as that is known; "" until then.

    Between hosts `address` is where rank 0 listens (host:port). If rank 0 gives port 0
    it takes a free one, and `announce` is called with the address for the others; on
    one host it is called with `address` as it is. `secret` authenticates the ranks, and
    without one only loopback addresses are accepted, unless `insecure`. `interface`
    chooses the network. With `tls` everything between hosts is encrypted.

    `tuned` is whether rank 0 has a tuned table; it becomes the session's `note`, on
    rank 0 at least.
    """

    rank: int
    world_size: int
    job: str
    version: str
    timeout_s: float = 60.0
    epoch: int = 0
    address: str = ""
    secret: Secret | None = field(default=None, repr=False)
    interface: str | None = None
    insecure: bool = False
    tls: bool = False
    announce: Callable[[str], None] = lambda address: None
    lost: Callable[[], str] = str
    tuned: bool = False


class Transport(ABC):
    """A way to move bytes between ranks; it has no state of its own.

    `name` is what users call it by. A session has all the state of one world.
    """

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities]

    @abstractmethod
    def connect(self, options: ConnectOptions) -> Session:
        """Find the other ranks of the world; ConnectFailed if that is not possible."""

    def unavailable(self) -> str:
        """Why it cannot be used on this machine, as "libucp.so.0 is missing"; or ""."""
        return ""
