"""What a communicator says of itself, and what can be set of it."""

from __future__ import annotations

from unisono.runtime.core import Core
from unisono.transports.session import Peer


class Identity:
    """The ranks of a communicator, its name, its timeout and its engine."""

    def __init__(self, core: Core) -> None:
        """Of this core."""
        self.core = core
        self.rank = core.rank
        self.world_size = core.world_size
        self.hosts = core.hosts

    @property
    def size(self) -> int:
        """The number of ranks, as `world_size`."""
        return self.world_size

    @property
    def name(self) -> str:
        """What errors and records call it: `world`, or whence it was split."""
        return self.core.name

    @name.setter
    def name(self, name: str) -> None:
        self.core.name = name

    @property
    def timeout_s(self) -> float:
        """How long a call may take that is given no limit of its own; can be set."""
        return self.core.timeout_s

    @timeout_s.setter
    def timeout_s(self, seconds: float) -> None:
        self.core.timeout_s = seconds

    @property
    def peers(self) -> list[Peer]:
        """Who the ranks are: process and host, by rank here."""
        return self.core.peers

    @property
    def world_ranks(self) -> tuple[int, ...]:
        """The ranks that these are in the world, by rank here."""
        return self.core.world_ranks

    @property
    def engine(self) -> str:
        """Who carries out calls on CUDA arrays: "unisono" or "nccl".

        Can be set before the first such call, the same on all ranks; it is that of the
        communicator it was split from, of `unisono.init`, or UNISONO_CUDA_ENGINE.
        """
        return self.core.device.engine

    @engine.setter
    def engine(self, name: str) -> None:
        self.core.device.engine = name

    def __repr__(self) -> str:
        """One line, for debuggers and logs."""
        state = ", closed" if self.core.closed else ""
        who = f"rank {self.rank} of {self.world_size}"
        return f"<Communicator {self.name!r}: {who}{state}>"
