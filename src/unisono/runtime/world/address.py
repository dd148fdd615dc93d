"""Where the ranks of several hosts meet: the address at which rank 0 listens.

On one host nobody needs one. Across hosts every engine has its own way to know rank 0:

    anyone      UNISONO_ADDRESS=host:port, which wins; `unisono run --hosts` sets it
    torchrun    MASTER_ADDR, at MASTER_PORT + 100: the port itself is torch's store's
    Slurm       the first node of the step, at a port that srun reserved
                (--resv-ports) or else one that follows from the job's number
    mpirun      tells its ranks nothing of the kind: UNISONO_ADDRESS must be set

All of these have to come to the same result on every host, without a word exchanged.
The secret comes from whoever starts the job; without one, the error tells how.
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
from unisono.runtime.world.environment import World, inside_a_step

ADDRESS = "UNISONO_ADDRESS"
BESIDE_TORCH = 100
"""How far from MASTER_PORT we listen: people number the ports of their jobs in ones."""
_PORTS = range(20_000, 32_000)
"""Ours, where we choose: below those that systems give to outgoing connections."""
_EXAMPLE_PORT = 29400


@dataclass(frozen=True)
class Place:
    """host:port, and who said so, for people."""

    address: str
    why: str


def meeting_place(world: World, environ: Mapping[str, str] = os.environ) -> Place:
    """Where the ranks of this world meet, if they are on several hosts."""
    if environ.get(ADDRESS):
        address = environ[ADDRESS].strip()
        _refuse_misspelt(ADDRESS, address)
        return Place(address, ADDRESS)
    if environ.get("MASTER_ADDR") and environ.get("MASTER_PORT"):
        return _beside_torch(environ)
    if _is_srun_s(world, environ):
        return _on_first_node(environ)
    raise BadArgument(
        f"{world.why}: {world.launcher} does not say where rank 0 is; set {ADDRESS} to "
        f"its host and a free port, for all ranks alike{_recipe(world)}"
    )


def free_port() -> int:
    """One that nobody uses now, and that no outgoing connection will be given."""
    for port in random.sample(_PORTS, 100):
        with socket.socket() as trial, contextlib.suppress(OSError):
            trial.bind(("", port))  # never listened on
            return port
    return 0


def no_secret(world: World) -> BadArgument:
    """The error for a job on several hosts that was given no secret."""
    return BadArgument(
        f"{world.why}: the job has no secret, without which anybody could connect; "
        "make one where you start the job, export UNISONO_SECRET=$(unisono secret), "
        f"and have all ranks get it{_HOW.get(world.launcher, _HOW['torchrun'])}"
    )


_HOW = {
    "unisono run": "; unisono run --hosts does this by itself",
    "torchrun": ": the same on every host",
    "Open MPI": ": mpirun -x UNISONO_SECRET ...",
    "MPICH (PMI)": ": mpiexec -genvlist UNISONO_SECRET,UNISONO_ADDRESS ...",
    "Slurm": "; srun hands it on with the rest of the environment",
}


def _recipe(world: World) -> str:
    place = f"{ADDRESS}=<host of rank 0>:{_EXAMPLE_PORT}"
    if world.launcher == "Open MPI":
        return f": mpirun -x {place} -x UNISONO_SECRET ..."
    if world.launcher == "MPICH (PMI)":
        return f": mpiexec -genv {ADDRESS} <host of rank 0>:{_EXAMPLE_PORT} ..."
    return f": {place}"


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


def _beside_torch(environ: Mapping[str, str]) -> Place:
    text = environ["MASTER_PORT"].strip()
    if not re.fullmatch(r"[0-9]{1,5}", text, re.ASCII) or not 0 < int(text) < 1 << 16:
        raise BadArgument(f"MASTER_PORT={text!r}: expected a port, 1 to 65535")
    port = int(text) + BESIDE_TORCH
    if port >= 1 << 16:
        port -= 2 * BESIDE_TORCH
    host = environ["MASTER_ADDR"].strip().strip("[]")
    address = _join(host, port)
    _refuse_misspelt("MASTER_ADDR", address)
    return Place(address, f"MASTER_ADDR, {port - int(text):+d} from MASTER_PORT")


# Slurm


def _is_srun_s(world: World, environ: Mapping[str, str]) -> bool:
    """Whether srun started this very rank, by whatever variables it was recognised.

    Under mpirun in a job, ranks inherit the variables of mpirun's own daemons: a step
    of one task on each node, and not always of the first.
    """
    numbers = environ.get("SLURM_PROCID"), environ.get("SLURM_NTASKS")
    ours = str(world.rank), str(world.world_size)
    if world.launcher == "Slurm":
        return True
    return inside_a_step(environ) and numbers == ours


def _on_first_node(environ: Mapping[str, str]) -> Place:
    names = ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
    name = next((name for name in names if environ.get(name)), None)
    if name is None:
        raise BadArgument(
            f"this is a step of Slurm's on several nodes, but {names[0]} is not set; "
            f"set {ADDRESS}=<host of rank 0>:{_EXAMPLE_PORT}"
        )
    host = next(nodes(environ[name], name))
    reserved = re.match(r"\d{1,5}", environ.get("SLURM_STEP_RESV_PORTS", ""), re.ASCII)
    if reserved:
        return Place(_join(host, int(reserved[0])), f"{name}, SLURM_STEP_RESV_PORTS")
    job = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID", "")
    step = environ.get("SLURM_STEP_ID", "")
    if not (job.isdecimal() and step.isdecimal()):
        raise BadArgument(f"SLURM_JOB_ID={job!r}, SLURM_STEP_ID={step!r}: no numbers")
    # Steps of one job run side by side on one node; so do jobs of near numbers.
    port = _PORTS[(int(job) * 16 + int(step)) % len(_PORTS)]
    return Place(_join(host, port), f"{name}, the port by SLURM_JOB_ID")


def nodes(text: str, name: str = "node list") -> Iterator[str]:
    """The hosts of Slurm's way to write them: rack[1-2]n[01-03,7],login."""
    for part in _split(text, name):
        yield from _expanded(part, name)


def _split(text: str, name: str) -> Iterator[str]:
    """At the commas outside brackets."""
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
