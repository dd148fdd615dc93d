"""A world on several hosts without ssh: the same command on each, as for torchrun."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unisono.errors import BadArgument
from unisono.launch.environment import HostRanks
from unisono.launch.hostfile import HostSpec


@dataclass(frozen=True)
class Nodes:
    """--nnodes, --node-rank, --master-addr and --master-port."""

    count: int
    number: int
    address: str
    port: int

    def check(self, places: Sequence[HostSpec], restarts: int) -> None:
        """Refuse what cannot be, or not together."""
        if self.count < 1 or not 0 <= self.number < self.count:
            raise BadArgument(
                f"--nnodes {self.count} --node-rank {self.number}: expected one host "
                "or more, numbered from 0 to nnodes - 1"
            )
        if self.count == 1:
            return
        if places:
            raise BadArgument(
                "--nnodes and --hosts: give one of them; --hosts starts the ranks of "
                "all hosts from here, --nnodes those of this host"
            )
        if not self.address:
            raise BadArgument(
                f"--nnodes {self.count}: give --master-addr, the name of the host with "
                "--node-rank 0, on every host"
            )
        if not 0 < self.port < 1 << 16:
            raise BadArgument(f"--master-port {self.port}: expected 1 to 65535")
        if restarts:
            raise BadArgument(
                "--max-restarts and --nnodes: the launchers of several hosts do not "
                "know of each other's failures; start the ranks with --hosts"
            )

    def ranks_here(self, n: int, binding: str) -> HostRanks:
        """The ranks of this host: n on every host."""
        return HostRanks(n, self.number * n, self.count * n, self.number, binding)

    def variables(self) -> dict[str, str]:
        """What ranks of all hosts have in common."""
        if self.count == 1:
            return {}
        return {
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
            "UNISONO_JOB": f"run-{self.address}:{self.port}",
        }
