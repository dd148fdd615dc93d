"""What only tests use is in the editable install that they run on, and nowhere else."""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from protocol_model import NATIVE, compiler

from unisono import _native

ROOT = NATIVE.parent


def test_this_build_has_test_hooks() -> None:
    assert _native.TEST_HOOKS
    assert "call.begin" in _native.failpoint_names()


def test_only_editable_installs_ask_for_test_hooks() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["scikit-build"]
    asking = [o for o in build["overrides"] if "UNISONO_TEST_HOOKS" in str(o)]
    assert [o["if"] for o in asking] == [{"state": "editable"}]
    assert "UNISONO_TEST_HOOKS" not in str(build.get("cmake", {}))


@pytest.mark.sweep
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler")
@pytest.mark.parametrize("hooks", [False, True])
def test_failpoint_is_no_code_without_test_hooks(tmp_path: Path, hooks: bool) -> None:
    made = tmp_path / "stream.o"
    asked = ["-DUNISONO_TEST_HOOKS"] if hooks else []
    flags = ["-std=c++20", "-O1", "-I.", *asked, "-c", "net/stream.cpp", "-o", made]
    subprocess.run([*compiler(), *flags], check=True, cwd=NATIVE)
    names = subprocess.run(["nm", made], check=True, capture_output=True, text=True)
    assert ("failpoint" in names.stdout) == hooks
