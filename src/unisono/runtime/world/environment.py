"""Which rank am I, and of how many? Asked of whoever started this process.

Every launcher tells its processes in environment variables of its own. They are asked
in a fixed order, and the first that has said anything is believed:

    explicit arguments    rank=, world_size=
    unisono run           UNISONO_RANK, UNISONO_WORLD_SIZE
    torchrun              RANK, WORLD_SIZE; so do Ray Train and many scripts
    Open MPI              OMPI_COMM_WORLD_RANK, ..._SIZE
    MPICH (PMI)           PMI_RANK, PMI_SIZE, as Intel MPI does; MVAPICH: MV2_...
    Slurm                 SLURM_PROCID, but only inside a job step
    alone                 nobody said anything: a world of one

Half an answer is an error, not a reason to ask the next one. With the rank comes the
name of the job, equal on its ranks and on no others of this host: there they meet. It
is `job=` or UNISONO_JOB if given, or else put together from what the launcher says.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from unisono.errors import BadArgument, whole_number

Environ = Mapping[str, str]

_RESERVED_STEPS = range(0xFFFF_FFFA, 0x1_0000_0000)
"""Slurm's numbers of steps that are none: interactive, batch, extern, pending."""

_STARTERS = {
    *("hydra_pmi_proxy", "hydra_bstrap_pr", "mpiexec", "mpiexec.hydra"),
    *("mpiexec.gforker", "mpirun", "mpispawn", "orted", "prted", "prterun"),
    "slurmstepd",
}
"""Processes that start ranks, by the fifteen letters that Linux keeps of a name."""


@dataclass(frozen=True)
class World:
    """Where this process stands among those of its job, and who said so.

    `hosts_several` is the launcher's word that the job runs on more than one host;
    `why` is one line for people.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    job: str
    launcher: str
    hosts_several: bool
    why: str


@dataclass(frozen=True)
class _Rule:
    """One launcher: the variables it sets, the first of each that is there counting."""

    launcher: str
    rank: tuple[str, ...]
    size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...]
    job: Callable[[Environ], str | None]
    job_hint: str = ""
    nodes: tuple[str, ...] = ()


def find_world(
    environ: Environ = os.environ,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    job: str | None = None,
) -> World:
    """The world of this process, by arguments, by its launcher, or a world of one."""
    if job is not None and (not isinstance(job, str) or not job):
        raise BadArgument(f"job = {job!r}: expected a text that is not empty")
    if rank is None and world_size is None:
        return _by_environment(environ, job)
    if rank is None or world_size is None:
        raise BadArgument(
            f"rank = {rank}, world_size = {world_size}: one without the other; "
            "give both, or none to ask the launcher"
        )
    return _by_arguments(environ, rank, world_size, job)


def _by_arguments(
    environ: Environ, rank: int, world_size: int, job: str | None
) -> World:
    size = whole_number("world_size", world_size)
    rank = whole_number("rank", rank)
    _refuse_misfit("rank", rank, "world_size", size)
    why = f"rank {rank} of {size}, by arguments"
    try:
        told = _by_environment(environ, job)
    except BadArgument:  # a launcher that nobody asked
        told = None
    if told is not None and told.launcher != "alone" and told.world_size == size:
        return replace(told, rank=rank, launcher="arguments", why=why)
    if told is None or told.launcher == "alone":
        job = job or environ.get("UNISONO_JOB")
    if not job and size > 1:
        raise BadArgument(
            f"job: rank {rank} of {size} is given, but not the job it belongs to; "
            "pass the same job= on every rank"
        )
    return World(rank, size, rank, size, job or _new_job(), "arguments", False, why)


def _by_environment(environ: Environ, job: str | None) -> World:
    job = job or environ.get("UNISONO_JOB")
    for rule in _RULES:
        if rule.launcher == "Slurm":
            if not inside_a_step(environ):
                continue
        elif not _first(environ, rule.rank + rule.size):
            continue
        return _by_rule(rule, environ, job)
    why = "no launcher's variables are set"
    if _first(environ, ("SLURM_JOB_ID", "SLURM_PROCID")):
        why = "Slurm's variables are those of a shell, not of a job step"
    why = f"rank 0 of 1, alone: {why}"
    return World(0, 1, 0, 1, job or _new_job(), "alone", False, why)


def _by_rule(rule: _Rule, environ: Environ, job: str | None) -> World:
    size_name, size = _needed(rule.size, rule.rank, environ)
    rank_name, rank = _needed(rule.rank, rule.size, environ)
    _refuse_misfit(rank_name, rank, size_name, size)
    local_rank, local_size = _local(rule, environ, rank, size_name, size)
    nodes = _number(environ, rule.nodes)
    several = local_size < size or (nodes is not None and nodes[1] > 1)
    job = job or rule.job(environ)
    if not job and size > 1:
        raise BadArgument(
            f"{rank_name}={rank} and {size_name}={size} are set, but not "
            f"{rule.job_hint}; set the same UNISONO_JOB for all ranks of this job"
        )
    why = f"rank {rank} of {size}, by {rule.launcher} ({rank_name}, {size_name})"
    return World(
        rank,
        size,
        local_rank,
        local_size,
        job or _new_job(),
        rule.launcher,
        several,
        why + (", on several hosts" if several else ""),
    )


def _local(
    rule: _Rule, environ: Environ, rank: int, size_name: str, size: int
) -> tuple[int, int]:
    """Rank and number of ranks on this host; all on one host if nothing is said."""
    told_size = _number(environ, rule.local_size)
    if told_size is None and rule.launcher == "Slurm":
        told_size = _tasks_of_this_node(environ)
    name, local_size = told_size or (size_name, size)
    if not 1 <= local_size <= size:
        raise BadArgument(
            f"{name}={local_size}: expected 1 to {size}, as {size_name}={size}"
        )
    told_rank = _number(environ, rule.local_rank)
    if told_rank is None:
        return rank % local_size, local_size
    _refuse_misfit(*told_rank, name, local_size)
    return told_rank[1], local_size


def _first(environ: Environ, names: tuple[str, ...]) -> str | None:
    """The first of these variables that is set and not empty."""
    return next((name for name in names if environ.get(name)), None)


def _number(environ: Environ, names: tuple[str, ...]) -> tuple[str, int] | None:
    """The first of these variables that is set, with its value."""
    name = _first(environ, names)
    if name is None:
        return None
    if not re.fullmatch(r"\s*[0-9]{1,9}\s*", environ[name], re.ASCII):
        raise BadArgument(
            f"{name}={environ[name]!r}: expected a whole number, 0 or more"
        )
    return name, int(environ[name])


def _needed(
    names: tuple[str, ...], others: tuple[str, ...], environ: Environ
) -> tuple[str, int]:
    found = _number(environ, names)
    if found is not None:
        return found
    other = _first(environ, others) or others[0]
    raise BadArgument(
        f"{other}={environ.get(other, '')!r} is set, but {names[0]} is not; "
        "set both, or neither"
    )


def _refuse_misfit(rank_name: str, rank: int, size_name: str, size: int) -> None:
    if size < 1:
        raise BadArgument(f"{size_name}={size}: a world has at least one rank")
    if not 0 <= rank < size:
        raise BadArgument(
            f"{rank_name}={rank}: expected 0 to {size - 1}, as {size_name}={size}"
        )


def _new_job() -> str:
    return secrets.token_hex(16)


def _torchrun_job(environ: Environ) -> str | None:
    if not (environ.get("MASTER_ADDR") and environ.get("MASTER_PORT")):
        return None
    return "torchrun-{}:{}-{}-{}".format(
        environ["MASTER_ADDR"],
        environ["MASTER_PORT"],
        environ.get("TORCHELASTIC_RUN_ID", ""),
        environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
    )


def _openmpi_job(environ: Environ) -> str:
    name = _first(environ, ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"))
    if name:
        return f"openmpi-{environ[name]}"
    sizes = "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE"
    return f"openmpi-{_in_common(environ, *sizes, 'OMPI_COMM_WORLD_RANK')}"


def _pmi_job(environ: Environ) -> str:
    """Slurm's and Cray's PMI name the job, and so does Intel; MPICH's hydra does not.

    Its ranks on one host have in common the process that started them; on several
    they have only the address at which they are told to meet.
    """
    name = _first(environ, ("PMI_JOBID", "I_MPI_HYDRA_UUID"))
    if name:
        return f"pmi-{environ[name]}"
    local = _first(environ, _PMI_LOCAL_SIZE) or ""
    size = _first(environ, _PMI_SIZE) or ""
    rank = _first(environ, _PMI_RANK) or _PMI_RANK[0]
    return f"pmi-{_in_common(environ, local, size, rank)}"


def _in_common(environ: Environ, local_size: str, size: str, rank: str) -> str:
    """What a nameless job's ranks share: where they meet, or who started them."""
    several = environ.get(local_size, environ.get(size)) != environ.get(size)
    return (several and environ.get("UNISONO_ADDRESS")) or _starter(rank)


def _slurm_job(environ: Environ) -> str | None:
    name = _first(environ, ("SLURM_JOB_ID", "SLURM_JOBID"))
    if name is None:
        return None
    again = environ.get("SLURM_RESTART_COUNT", "0")
    return f"slurm-{environ[name]}.{environ['SLURM_STEP_ID']}-{again}"


def inside_a_step(environ: Environ) -> bool:
    """Whether srun started this process: a shell in an allocation has variables too."""
    step = environ.get("SLURM_STEP_ID", "").strip()
    if not (step.isdecimal() and environ.get("SLURM_PROCID")):
        return False
    return int(step) not in _RESERVED_STEPS


def _tasks_of_this_node(environ: Environ) -> tuple[str, int] | None:
    """The entry for this node in Slurm's list, as in "4(x2),3"."""
    name, node = "SLURM_STEP_TASKS_PER_NODE", _number(environ, ("SLURM_NODEID",))
    if node is None or not environ.get(name):
        return None
    left = node[1]
    for entry in environ[name].split(","):
        found = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", entry.strip())
        if not found:
            raise BadArgument(
                f"{name}={environ[name]!r}: expected tasks per node, as in 4(x2),3"
            )
        left -= int(found[2] or 1)
        if left < 0:
            return name, int(found[1])
    return None


def _starter(variable: str) -> str:
    """The process that started the ranks of this host, told apart from all others.

    It is the parent; but where a shell or a wrapper stands between, which inherited
    the rank's own `variable`, one further up.
    """
    pid = os.getppid()
    try:
        name, parent, began = _process(pid)
        while parent > 0 and name not in _STARTERS and _carries(pid, variable):
            pid = parent
            name, parent, began = _process(pid)
    except OSError:  # a system without /proc
        return f"{pid}"
    return f"{pid}-{began}"


def _carries(pid: int, variable: str) -> bool:
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # another user's: not one of our ranks
        return False
    mark = f"{variable}=".encode()
    return any(entry.startswith(mark) for entry in environ.split(b"\0"))


def _process(pid: int) -> tuple[str, int, str]:
    """Name, parent, and time of start (in ticks since the machine's) of a process."""
    text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    name, _, rest = text.partition("(")[2].rpartition(")")
    fields = rest.split()
    return name, int(fields[1]), fields[19]


_PMI_RANK = ("PMI_RANK", "PMI_ID", "MV2_COMM_WORLD_RANK")
_PMI_SIZE = ("PMI_SIZE", "MV2_COMM_WORLD_SIZE")
_PMI_LOCAL_SIZE = ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE")
_RULES = (
    _Rule(
        "unisono run",
        rank=("UNISONO_RANK",),
        size=("UNISONO_WORLD_SIZE",),
        local_rank=("UNISONO_LOCAL_RANK",),
        local_size=("UNISONO_LOCAL_WORLD_SIZE",),
        job=lambda environ: environ.get("UNISONO_JOB"),
        job_hint="UNISONO_JOB",
    ),
    _Rule(
        "torchrun",
        rank=("RANK",),
        size=("WORLD_SIZE",),
        local_rank=("LOCAL_RANK",),
        local_size=("LOCAL_WORLD_SIZE",),
        job=_torchrun_job,
        job_hint="MASTER_ADDR and MASTER_PORT",
    ),
    _Rule(
        "Open MPI",
        rank=("OMPI_COMM_WORLD_RANK",),
        size=("OMPI_COMM_WORLD_SIZE",),
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        job=_openmpi_job,
    ),
    _Rule(
        "MPICH (PMI)",
        rank=_PMI_RANK,
        size=_PMI_SIZE,
        local_rank=("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK"),
        local_size=_PMI_LOCAL_SIZE,
        job=_pmi_job,
    ),
    _Rule(
        "Slurm",
        rank=("SLURM_PROCID",),
        size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"),
        local_rank=("SLURM_LOCALID",),
        local_size=(),
        job=_slurm_job,
        job_hint="SLURM_JOB_ID",
        nodes=("SLURM_STEP_NUM_NODES", "SLURM_NNODES"),
    ),
)
