"""The backend is there without an import, and a first call works."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import torch, torch.distributed as dist
dist.init_process_group("unisono")
x = torch.full((10,), dist.get_rank() + 1.0)
dist.all_reduce(x)
assert "unisono" not in globals()
print(f"sum {x[0].item()} {dist.get_backend()}\\n", end="", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.sweep
@pytest.mark.quick(n=[1])
@pytest.mark.parametrize("n", [1, 3])
def test_backend_works_without_importing_unisono(n, tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(n)]
    done = subprocess.run(
        [*run, "--standalone", str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = [line for line in done.stdout.splitlines() if line.startswith("sum")]
    assert result == [f"sum {n * (n + 1) / 2} unisono"] * n
