"""One rank as an actor: where it is, and what it does.

Two ranks share a host, in our sense, if they can reach each other's memory and Unix
sockets. Ray's nodes are something else: two of them may be on one machine, and two
containers of one machine may be one node each. So the host is identified by the
kernel, as at the rendezvous.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray import cloudpickle

import unisono
from unisono.launch.exceptions import RankReport, pickled_error
from unisono.runtime.world.address import free_port
from unisono.transports.rank_table import host_identity


@dataclass(frozen=True)
class ActorAddress:
    """Of one actor. `host` is equal for those that share memory."""

    host: str
    node: str
    address: str
    port: int
    pid: int
    version: str


def whereabouts() -> ActorAddress:
    """Of this process."""
    return ActorAddress(
        host=host_identity(),
        node=ray.get_runtime_context().get_node_id(),
        address=ray.util.get_node_ip_address(),
        port=free_port(),
        pid=os.getpid(),
        version=unisono.__version__,
    )


@contextlib.contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """These variables for as long as it lasts."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def places(hosts: list[str]) -> list[dict[str, str]]:
    """The variables of each rank, given the host of every rank."""
    seen: dict[str, int] = {}
    variables = []
    for rank, host in enumerate(hosts):
        local = seen.get(host, 0)
        seen[host] = local + 1
        variables.append({"UNISONO_RANK": str(rank), "UNISONO_LOCAL_RANK": str(local)})
    for host, place in zip(hosts, variables, strict=True):
        place["UNISONO_WORLD_SIZE"] = str(len(hosts))
        place["UNISONO_LOCAL_WORLD_SIZE"] = str(seen[host])
    return variables


class RankActor:
    """The actor."""

    def where(self) -> ActorAddress:
        """Its address; rank 0's port is that of the rendezvous."""
        return whereabouts()

    def play(
        self,
        variables: Mapping[str, str],
        takes_comm: bool,
        work: tuple[Callable[..., Any], tuple[Any, ...]],
    ) -> bytes:
        """Be a rank: `variables` is the environment of one. The report, pickled."""
        fn, args = work
        os.environ.update(variables)
        try:
            if takes_comm:
                with unisono.init() as comm:  # left in any case: the others wait
                    result = fn(comm, *args)
            else:
                result = fn(*args)
            return bytes(cloudpickle.dumps(RankReport(result)))
        except BaseException as error:
            return pickled_error(error, cloudpickle.dumps)


def play_script(path: str, argv: Sequence[str]) -> None:
    """A file as Python would run it; an exit without a code is a good end."""
    sys.argv = [path, *argv]
    sys.path.insert(0, str(Path(path).parent))
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
