"""The public names of unisono.parallel, and the size of its files."""

import subprocess
import sys
from pathlib import Path

import pytest

from slow_link import SlowLink
from unisono import parallel
from unisono.errors import BadArgument, MissingExtra
from unisono.testing import world

ROOT = Path(parallel.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))


def test_public_names_are_importable():
    for name in parallel.__all__:
        assert getattr(parallel, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'DPP'"):
        _ = parallel.DPP


@pytest.mark.parametrize("file", FILES, ids=[str(f.relative_to(ROOT)) for f in FILES])
def test_files_have_less_than_300_lines(file):
    assert len(file.read_text().splitlines()) < 300


@pytest.mark.sweep
def test_mesh_does_not_import_torch():
    code = (
        "import sys, unisono; unisono.parallel.Mesh; "
        "assert 'torch' not in sys.modules; unisono.parallel.DDP; "
        "assert 'torch' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_missing_torch_is_explained(monkeypatch):
    for name in [m for m in sys.modules if m.startswith("unisono.parallel.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtra, match=r"pip install 'unisono\[torch\]'"):
        _ = parallel.DDP


@pytest.mark.parametrize(
    "wrong", [{"bytes_per_s": 0}, {"bytes_per_s": 1, "latency_s": -1}]
)
def test_slow_link_refuses_rates_out_of_range(wrong):
    with world(1) as w, pytest.raises(BadArgument, match="SlowLink"):
        SlowLink(w.comms[0], **wrong)
