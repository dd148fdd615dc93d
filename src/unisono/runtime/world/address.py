"""The rendezvous address of ranks on several hosts: where rank 0 listens.

One host needs none. Across hosts every launcher has its own way to name rank 0's host:

    any         UNISONO_ADDRESS=host:port, which wins; `unisono run --hosts` sets it
    torchrun    MASTER_ADDR, at MASTER_PORT + 100: torch's store uses MASTER_PORT
    Slurm       the first node of the step, at a port that srun reserved
                (--resv-ports) or else one that follows from the job's number
    mpirun      has no such variable: UNISONO_ADDRESS must be set

Every host must find the same address without communication. The secret comes from
the launcher of the job; without one, the error says how to make one.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from unisono.errors import BadArgument
from unisono.runtime.world.environment import WorldEnvironment, inside_a_step

ADDRESS = "UNISONO_ADDRESS"
BESIDE_TORCH = 100
"""Our distance from MASTER_PORT: jobs of one host often have consecutive ports."""
_PORTS = range(20_000, 32_000)
"""The range that we choose from: below the ports of outgoing connections."""
_EXAMPLE_PORT = 29400


@dataclass(frozen=True)
class RendezvousAddress:
    """host:port, and the variables that it comes from."""

    address: str
    why: str


def rendezvous_address(
    world: WorldEnvironment, environ: Mapping[str, str] = os.environ
) -> RendezvousAddress:
    """The rendezvous address of a world on several hosts."""
    if environ.get(ADDRESS):
        address = environ[ADDRESS].strip()
        _refuse_misspelt(ADDRESS, address)
        return RendezvousAddress(address, ADDRESS)
    if environ.get("MASTER_ADDR") and environ.get("MASTER_PORT"):
        return _beside_torch(environ)
    if _is_srun_s(world, environ):
        return _on_first_node(environ)
    raise BadArgument(
        f"{world.why}: {world.launcher} does not give rank 0's address; set {ADDRESS} "
        f"to its host and a free port, the same on all ranks{_recipe(world)}"
    )


def free_port() -> int:
    """A port that is free now, and that no outgoing connection gets; 0 if none is."""
    return next(iter(free_ports(1)), 0)


def free_ports(count: int) -> list[int]:
    """So many different ports, or fewer if not so many are found."""
    ports: list[int] = []
    for port in random.sample(_PORTS, 100):
        if len(ports) == count:
            break
        with socket.socket() as trial, contextlib.suppress(OSError):
            trial.bind(("", port))  # without listen: free again when closed
            ports.append(port)
    return ports


def no_secret(world: WorldEnvironment) -> BadArgument:
    """The error for a job on several hosts that was given no secret."""
    return BadArgument(
        f"{world.why}: the job has no secret, so any process could connect; "
        "make one where you start the job, export UNISONO_SECRET=$(unisono secret), "
        f"and pass it to all ranks{_HOW.get(world.launcher, _HOW['torchrun'])}"
    )


_HOW = {
    "unisono run": "; unisono run --hosts does this by itself",
    "torchrun": ": the same on every host",
    "Open MPI": ": mpirun -x UNISONO_SECRET ...",
    "MPICH (PMI)": ": mpiexec -genvlist UNISONO_SECRET,UNISONO_ADDRESS ...",
    "Slurm": "; srun passes it with the rest of the environment",
}


def _recipe(world: WorldEnvironment) -> str:
    variable = f"{ADDRESS}=<host of rank 0>:{_EXAMPLE_PORT}"
    if world.launcher == "Open MPI":
        return f": mpirun -x {variable} -x UNISONO_SECRET ..."
    if world.launcher == "MPICH (PMI)":
        return f": mpiexec -genv {ADDRESS} <host of rank 0>:{_EXAMPLE_PORT} ..."
    return f": {variable}"


def _refuse_misspelt(name: str, address: str) -> None:
    found = re.fullmatch(
        r"(?:\[[^\[\]]+\]|[^:\[\]\s]+):([0-9]{1,5})", address, re.ASCII
    )
    if not found or not 0 < int(found[1]) < 1 << 16:
        raise BadArgument(
            f"{name}={address!r}: expected host:port, as in node1:{_EXAMPLE_PORT} or "
            f"[fd00::1]:{_EXAMPLE_PORT}"
        )


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _beside_torch(environ: Mapping[str, str]) -> RendezvousAddress:
    text = environ["MASTER_PORT"].strip()
    if not re.fullmatch(r"[0-9]{1,5}", text, re.ASCII) or not 0 < int(text) < 1 << 16:
        raise BadArgument(f"MASTER_PORT={text!r}: expected a port, 1 to 65535")
    port = int(text) + BESIDE_TORCH
    if port >= 1 << 16:
        port -= 2 * BESIDE_TORCH
    host = environ["MASTER_ADDR"].strip().strip("[]")
    address = _join(host, port)
    _refuse_misspelt("MASTER_ADDR", address)
    return RendezvousAddress(
        address, f"MASTER_ADDR, {port - int(text):+d} from MASTER_PORT"
    )


# --- Slurm


def _is_srun_s(world: WorldEnvironment, environ: Mapping[str, str]) -> bool:
    """Whether srun started this rank itself, whichever variables gave its rank.

    Under mpirun in a Slurm job, ranks inherit the variables of mpirun's daemons: a step
    with one task on each node, which need not include the first.
    """
    numbers = environ.get("SLURM_PROCID"), environ.get("SLURM_NTASKS")
    ours = str(world.rank), str(world.world_size)
    if world.launcher == "Slurm":
        return True
    return inside_a_step(environ) and numbers == ours


def _on_first_node(environ: Mapping[str, str]) -> RendezvousAddress:
    names = ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
    name = next((name for name in names if environ.get(name)), None)
    if name is None:
        raise BadArgument(
            f"this is a Slurm step on several nodes, but {names[0]} is not set; "
            f"set {ADDRESS}=<host of rank 0>:{_EXAMPLE_PORT}"
        )
    host = next(nodes(environ[name], name))
    reserved = re.match(r"\d{1,5}", environ.get("SLURM_STEP_RESV_PORTS", ""), re.ASCII)
    if reserved:
        return RendezvousAddress(
            _join(host, int(reserved[0])), f"{name}, SLURM_STEP_RESV_PORTS"
        )
    job = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID", "")
    step = environ.get("SLURM_STEP_ID", "")
    if not (job.isdecimal() and step.isdecimal()):
        raise BadArgument(f"SLURM_JOB_ID={job!r}, SLURM_STEP_ID={step!r}: not numbers")
    # Steps of one job may share a node, and so may jobs with close numbers.
    port = _PORTS[(int(job) * 16 + int(step)) % len(_PORTS)]
    return RendezvousAddress(_join(host, port), f"{name}, the port by SLURM_JOB_ID")


def nodes(text: str, name: str = "node list") -> Iterator[str]:
    """The hosts of a Slurm node list: rack[1-2]n[01-03,7],login."""
    for part in _split(text, name):
        yield from _expanded(part, name)


def _split(text: str, name: str) -> Iterator[str]:
    """Split at the commas outside brackets."""
    depth, part = 0, ""
    for letter in text.strip():
        depth += (letter == "[") - (letter == "]")
        if depth not in (0, 1):
            raise _wrong(name, text)
        if letter == "," and not depth:
            yield part
            part = ""
        else:
            part += letter
    if depth:
        raise _wrong(name, text)
    yield part


def _expanded(part: str, name: str) -> Iterator[str]:
    head, bracket, rest = part.partition("[")
    if not bracket:
        if not re.fullmatch(r"[\w.-]+", part, re.ASCII):
            raise _wrong(name, part)
        yield part
        return
    inside, _, tail = rest.partition("]")
    for piece in inside.split(","):
        found = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", piece, re.ASCII)
        if not found or int(found[2] or found[1]) < int(found[1]):
            raise _wrong(name, part)
        for number in range(int(found[1]), int(found[2] or found[1]) + 1):
            digits = str(number).zfill(len(found[1]))
            yield from _expanded(head + digits + tail, name)


def _wrong(name: str, text: str) -> BadArgument:
    return BadArgument(f"{name}={text!r}: expected hosts, as in node[01-03,7],login")
