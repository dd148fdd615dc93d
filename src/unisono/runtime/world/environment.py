"""Rank and world size of this process, from arguments or from its launcher.

Every launcher has environment variables of its own. They are read in a fixed order, and
the first launcher with any variable set counts:

    explicit arguments    rank=, world_size=
    unisono run           UNISONO_RANK, UNISONO_WORLD_SIZE
    torchrun              RANK, WORLD_SIZE; also Ray Train and many scripts
    Open MPI              OMPI_COMM_WORLD_RANK, ..._SIZE
    MPICH (PMI)           PMI_RANK, PMI_SIZE, also Intel MPI; MVAPICH: MV2_...
    Slurm                 SLURM_PROCID, but only inside a job step
    alone                 no variable is set: a world of one

A rank without a world size is an error, not a reason to read the next launcher's. With
the rank comes the name of the job, the same on all its ranks and on no others of this
host: it names their rendezvous. It is `job=` or UNISONO_JOB if given, or else derived
from the launcher's variables.
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
"""Slurm's step numbers that are not job steps: interactive, batch, extern, pending."""

_STARTERS = {
    *("hydra_pmi_proxy", "hydra_bstrap_pr", "mpiexec", "mpiexec.hydra"),
    *("mpiexec.gforker", "mpirun", "mpispawn", "orted", "prted", "prterun"),
    "slurmstepd",
}
"""Processes that start ranks, by the first fifteen characters of their names."""


@dataclass(frozen=True)
class WorldEnvironment:
    """Rank, world size and job of this process, and the launcher that gave them.

    `hosts_several`: the launcher says that the job runs on more than one host; `why` is
    one line for errors and `unisono env`.
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
class _LauncherVariables:
    """The variables of one launcher; of each tuple the first that is set counts."""

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
) -> WorldEnvironment:
    """The world of this process: by arguments, by its launcher, or a world of one."""
    if job is not None and (not isinstance(job, str) or not job):
        raise BadArgument(f"job = {job!r}: expected a non-empty string")
    if rank is None and world_size is None:
        return _by_environment(environ, job)
    if rank is None or world_size is None:
        raise BadArgument(
            f"rank = {rank}, world_size = {world_size}: one without the other; "
            "give both, or neither to use the launcher's"
        )
    return _by_arguments(environ, rank, world_size, job)


def _by_arguments(
    environ: Environ, rank: int, world_size: int, job: str | None
) -> WorldEnvironment:
    size = whole_number("world_size", world_size)
    rank = whole_number("rank", rank)
    _refuse_misfit("rank", rank, "world_size", size)
    why = f"rank {rank} of {size}, by arguments"
    try:
        found = _by_environment(environ, job)
    except BadArgument:  # arguments replace a launcher's incomplete variables
        found = None
    if found is not None and found.launcher != "alone" and found.world_size == size:
        return replace(found, rank=rank, launcher="arguments", why=why)
    if found is None or found.launcher == "alone":
        job = job or environ.get("UNISONO_JOB")
    if not job and size > 1:
        raise BadArgument(
            f"job: rank {rank} of {size} is given, but not the job it belongs to; "
            "pass the same job= on every rank"
        )
    return WorldEnvironment(
        rank, size, rank, size, job or _new_job(), "arguments", False, why
    )


def _by_environment(environ: Environ, job: str | None) -> WorldEnvironment:
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
    return WorldEnvironment(0, 1, 0, 1, job or _new_job(), "alone", False, why)


def _by_rule(
    rule: _LauncherVariables, environ: Environ, job: str | None
) -> WorldEnvironment:
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
    return WorldEnvironment(
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
    rule: _LauncherVariables, environ: Environ, rank: int, size_name: str, size: int
) -> tuple[int, int]:
    """Rank and number of ranks on this host; one host if no variable says more."""
    given_size = _number(environ, rule.local_size)
    if given_size is None and rule.launcher == "Slurm":
        given_size = _tasks_of_this_node(environ)
    name, local_size = given_size or (size_name, size)
    if not 1 <= local_size <= size:
        raise BadArgument(
            f"{name}={local_size}: expected 1 to {size}, as {size_name}={size}"
        )
    given_rank = _number(environ, rule.local_rank)
    if given_rank is None:
        return rank % local_size, local_size
    _refuse_misfit(*given_rank, name, local_size)
    return given_rank[1], local_size


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
    return f"openmpi-{_shared_name(environ, *sizes, 'OMPI_COMM_WORLD_RANK')}"


def _pmi_job(environ: Environ) -> str:
    """The job's name from PMI: Slurm, Cray and Intel give one, MPICH's hydra does not.

    Hydra's ranks on one host share the process that started them; on several hosts they
    share only UNISONO_ADDRESS.
    """
    name = _first(environ, ("PMI_JOBID", "I_MPI_HYDRA_UUID"))
    if name:
        return f"pmi-{environ[name]}"
    local = _first(environ, _PMI_LOCAL_SIZE) or ""
    size = _first(environ, _PMI_SIZE) or ""
    rank = _first(environ, _PMI_RANK) or _PMI_RANK[0]
    return f"pmi-{_shared_name(environ, local, size, rank)}"


def _shared_name(environ: Environ, local_size: str, size: str, rank: str) -> str:
    """What the ranks of a job without a name share: an address, or their starter."""
    several = environ.get(local_size, environ.get(size)) != environ.get(size)
    return (several and environ.get("UNISONO_ADDRESS")) or _starter(rank)


def _slurm_job(environ: Environ) -> str | None:
    name = _first(environ, ("SLURM_JOB_ID", "SLURM_JOBID"))
    if name is None:
        return None
    again = environ.get("SLURM_RESTART_COUNT", "0")
    return f"slurm-{environ[name]}.{environ['SLURM_STEP_ID']}-{again}"


def inside_a_step(environ: Environ) -> bool:
    """Whether srun started this process; a shell in an allocation has them, too."""
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
    """A unique name of the process that started the ranks of this host.

    It is the parent; or, above a shell or a wrapper, which has inherited the rank's own
    `variable`, an ancestor.
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
    except OSError:  # a process of another user
        return False
    mark = f"{variable}=".encode()
    return any(entry.startswith(mark) for entry in environ.split(b"\0"))


def _process(pid: int) -> tuple[str, int, str]:
    """Name, parent, and start time (in ticks since boot) of a process."""
    text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    name, _, rest = text.partition("(")[2].rpartition(")")
    fields = rest.split()
    return name, int(fields[1]), fields[19]


_PMI_RANK = ("PMI_RANK", "PMI_ID", "MV2_COMM_WORLD_RANK")
_PMI_SIZE = ("PMI_SIZE", "MV2_COMM_WORLD_SIZE")
_PMI_LOCAL_SIZE = ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE")
_RULES = (
    _LauncherVariables(
        "unisono run",
        rank=("UNISONO_RANK",),
        size=("UNISONO_WORLD_SIZE",),
        local_rank=("UNISONO_LOCAL_RANK",),
        local_size=("UNISONO_LOCAL_WORLD_SIZE",),
        job=lambda environ: environ.get("UNISONO_JOB"),
        job_hint="UNISONO_JOB",
    ),
    _LauncherVariables(
        "torchrun",
        rank=("RANK",),
        size=("WORLD_SIZE",),
        local_rank=("LOCAL_RANK",),
        local_size=("LOCAL_WORLD_SIZE",),
        job=_torchrun_job,
        job_hint="MASTER_ADDR and MASTER_PORT",
    ),
    _LauncherVariables(
        "Open MPI",
        rank=("OMPI_COMM_WORLD_RANK",),
        size=("OMPI_COMM_WORLD_SIZE",),
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        job=_openmpi_job,
    ),
    _LauncherVariables(
        "MPICH (PMI)",
        rank=_PMI_RANK,
        size=_PMI_SIZE,
        local_rank=("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK"),
        local_size=_PMI_LOCAL_SIZE,
        job=_pmi_job,
    ),
    _LauncherVariables(
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
