"""The variables of ranks: those of unisono, and those that torchrun sets.

Programs written for torchrun read RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and so on;
with them `torch.distributed` works under `unisono run` with any backend. Nothing
listens at MASTER_PORT unless the program itself does.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from unisono.runtime.world.address import free_port

_THREADS = "OMP_NUM_THREADS"
_NODE = ("GROUP_RANK", "NODE_RANK")
_OF_TORCHRUN = "TORCHELASTIC_"  # that of a torchrun around us would mislead torch


@dataclass(frozen=True)
class HostRanks:
    """The ranks of one host: `ranks` of a world of `world_size`, from `first` on.

    `node` is the host's number; `binding` is one of `unisono.launch.binding`.
    """

    ranks: int
    first: int
    world_size: int
    node: int
    binding: str = "none"

    @classmethod
    def all_of(cls, n: int, binding: str = "none") -> HostRanks:
        """A world of n ranks on one host."""
        return cls(n, 0, n, 0, binding)

    @property
    def numbers(self) -> range:
        """The ranks of this host."""
        return range(self.first, self.first + self.ranks)


def host_variables(
    here: HostRanks, given: Mapping[str, str], job: str
) -> dict[str, str]:
    """What all ranks of this host get; `given` replaces what is only a default."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_OF_TORCHRUN)
    }
    variables = {
        "PYTHONUNBUFFERED": "1",
        **_threads(here.ranks),
        **inherited,
        "MASTER_ADDR": "127.0.0.1",
        **restart_variables(0, 0),
        **given,
        "UNISONO_JOB": job,
    }
    if "MASTER_PORT" not in given:
        variables["MASTER_PORT"] = str(free_port() or 29500)
    for prefix in ("", "UNISONO_"):
        variables[f"{prefix}WORLD_SIZE"] = str(here.world_size)
        variables[f"{prefix}LOCAL_WORLD_SIZE"] = str(here.ranks)
    return variables | dict.fromkeys(_NODE, str(here.node))


def rank_variables(rank: int, local_rank: int) -> dict[str, str]:
    """What one rank gets beside the variables of its host."""
    return {
        f"{prefix}{name}": str(value)
        for prefix in ("", "UNISONO_")
        for name, value in (("RANK", rank), ("LOCAL_RANK", local_rank))
    }


def restart_variables(number: int, most: int) -> dict[str, str]:
    """What programs read to know that they were restarted, as torchrun names it."""
    return {
        "TORCHELASTIC_RESTART_COUNT": str(number),
        "TORCHELASTIC_MAX_RESTARTS": str(most),
    }


def _threads(ranks: int) -> dict[str, str]:
    """Every rank its share of the cores: n ranks with a thread per core are slow."""
    if ranks == 1:
        return {}
    return {_THREADS: str(max(1, len(os.sched_getaffinity(0)) // ranks))}
