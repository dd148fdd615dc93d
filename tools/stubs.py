"""Writes src/unisono/_native.pyi, the types of the native core, from the built module.

    make stubs                        writes it
    python tools/stubs.py --check     fails if it is out of date

nanobind's stub generator reads the module; `tools/stubs.pat` has the types that it
cannot know. What arrays must look like besides their element type (contiguous, on the
CPU) is left out: a type checker does not use it, and the module itself checks it.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

from nanobind.stubgen import StubGen, load_pattern_file

ROOT = Path(__file__).parents[1]
STUB = ROOT / "src" / "unisono" / "_native.pyi"
PATTERNS = ROOT / "tools" / "stubs.pat"
HEADER = "# Made by tools/stubs.py (make stubs); do not edit.\n"
ANNOTATED = re.compile(r"Annotated\[(NDArray\[numpy\.\w+\]), dict\([^\[\]]*?\)\]")


def generated() -> str:
    """The stub of the module that is installed."""
    native = importlib.import_module("unisono._native")
    if not native.TEST_HOOKS:
        sys.exit("tools/stubs.py: needs an editable install, which has all names")
    stubs = StubGen(native, patterns=load_pattern_file(str(PATTERNS)))
    stubs.put(native)
    text = ANNOTATED.sub(r"\1", stubs.get())
    text = text.replace("from typing import Annotated\n", "")
    for extra in (("check", "--select", "I", "--fix-only"), ("format",)):
        text = _ruff(*extra, text=text)
    return HEADER + text


def _ruff(*command: str, text: str) -> str:
    named = ["--quiet", "--stdin-filename", str(STUB), "-"]
    done = subprocess.run(
        [sys.executable, "-m", "ruff", *command, *named],
        input=text,
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    return done.stdout


def main() -> None:
    """Write the stub, or with --check compare it."""
    text = generated()
    if "--check" not in sys.argv[1:]:
        STUB.write_text(text)
    elif STUB.read_text() != text:
        sys.exit(f"{STUB.relative_to(ROOT)} is out of date: make stubs writes it anew")


if __name__ == "__main__":
    main()
