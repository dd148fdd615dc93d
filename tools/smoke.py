"""Use an installed unisono as a stranger would, without a compiler on PATH.

    python tools/smoke.py            with the interpreter it is installed for

Nothing of the source tree is imported: every command runs in an empty folder. The first
check that fails ends the script with exit code 1.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

COMPILERS = ("c++", "g++", "gcc", "cc", "clang", "clang++", "cmake", "ninja", "make")
LIMIT_S = 120

EXAMPLE = """
import numpy as np
import unisono

with unisono.init() as comm:
    x = np.full(1000, comm.rank + 1, dtype=np.float32)
    comm.all_reduce(x)
    assert (x == 3).all(), x
    print(f"rank {comm.rank} of {comm.world_size}: the sum is {x[0]:g}")
"""

IMPORT = """
import unisono, unisono._native
print(unisono.__version__, unisono.__file__, unisono._native.__file__)
"""

HOOKS = """
from unisono import _native
print(*{"arm_failpoints", "failpoint_names", "fuzz_frames"} & set(dir(_native)))
"""


def main() -> None:
    """Every check, in an empty folder."""
    with tempfile.TemporaryDirectory() as folder:
        smoke = Smoke(Path(folder))
        smoke.no_compiler()
        smoke.imports()
        smoke.no_test_hooks()
        smoke.two_ranks()
        smoke.explains()
    print("smoke test: passed")


class Smoke:
    """The checks, each a command in `folder` with a PATH that has no compiler."""

    def __init__(self, folder: Path) -> None:
        """A folder for PATH that holds the command `unisono` alone."""
        self.folder = folder
        self.tools = folder / "bin"
        self.tools.mkdir()
        self.path = str(self.tools)
        script = Path(sys.executable).parent / "unisono"
        if not script.is_file():
            raise SystemExit(f"smoke test: there is no {script}")
        (self.tools / "unisono").symlink_to(script)

    def no_compiler(self) -> None:
        """A precondition of the others, not a property of unisono."""
        found = [name for name in COMPILERS if shutil.which(name, path=self.path)]
        expect(not found, f"PATH has {found}")

    def imports(self) -> None:
        """The package and its native part are the installed ones, of one version."""
        found, *files = self.run(sys.executable, "-c", IMPORT).split()
        expect(
            found == version("unisono"), f"version {found}, not {version('unisono')}"
        )
        for file in files:
            inside = Path(file).is_relative_to(sys.prefix)
            expect(inside, f"{file} is not installed in {sys.prefix}")
        print(f"import: unisono {found}")

    def no_test_hooks(self) -> None:
        """Failpoints and the fuzzer are for editable installs."""
        found = self.run(sys.executable, "-c", HOOKS).split()
        expect(not found, f"the native core has {found}, which are for tests")

    def two_ranks(self) -> None:
        """An all_reduce of two processes gives the sum on both."""
        (self.folder / "example.py").write_text(EXAMPLE, encoding="utf-8")
        lines = self.run("unisono", "run", "-n", "2", "example.py").splitlines()
        for rank in range(2):
            line = f"rank {rank} of 2: the sum is 3"
            expect(any(line in text for text in lines), f"no {line!r} in {lines}")
        print("run -n 2: all_reduce is right on both ranks")

    def explains(self) -> None:
        """The command line draws a schedule, and writes the page that plays it."""
        words = ("unisono", "explain", "all_reduce", "ring", "-n", "3")
        output = self.run(*words)
        expect("every rank ends with a+b+c" in output, output)
        self.run(*words, "--html", "ring.html")
        page = (self.folder / "ring.html").read_text(encoding="utf-8")
        expect(page.startswith("<!doctype html>"), page[:80])
        print("explain: text and page")

    def run(self, *words: str) -> str:
        """What a command prints; it must succeed."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        program = shutil.which(words[0], path=self.path) or words[0]
        done = subprocess.run(
            [program, *words[1:]],
            cwd=self.folder,
            env={**kept, "PATH": self.path, "PYTHONIOENCODING": "utf-8"},
            capture_output=True,
            text=True,
            encoding="utf-8",
            check=False,
            timeout=LIMIT_S,
        )
        why = f"{' '.join(words)}: exit code {done.returncode}\n{done.stderr}"
        expect(done.returncode == 0, why)
        return done.stdout


def expect(true: bool, why: str) -> None:
    """End the script if a check does not hold."""
    if not true:
        raise SystemExit(f"smoke test: {why}")


if __name__ == "__main__":
    main()
