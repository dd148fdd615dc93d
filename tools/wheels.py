"""Build the sdist and this machine's wheel, check both, and use the wheel.

    python tools/wheels.py [--out dist] [--no-isolation]       (`make wheels` does)

The wheel is built from the sdist, so a file that the sdist lacks is found here. Then
twine checks the metadata, auditwheel gives the wheel its manylinux tag, abi3audit
checks it if it claims the stable ABI, and tools/smoke.py uses it in a fresh environment
with no compiler on PATH. Wheels for every CPython are cibuildwheel's:
`make wheels ALL=1`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

TOOLS = Path(__file__).parent
ROOT = TOOLS.parent


def main() -> None:
    """Everything, in order; the first command that fails ends it."""
    parser = argparse.ArgumentParser(description="Build and check sdist and wheel.")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--no-isolation", action="store_true")
    options = parser.parse_args()
    out = options.out.resolve()
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder)
        build(built, options.no_isolation)
        (sdist,) = built.glob("*.tar.gz")
        (wheel,) = built.glob("*.whl")
        wheel = repaired(wheel, built / "repaired")
        check_stable_abi(wheel)
        module("twine", "check", "--strict", str(sdist), str(wheel))
        smoke(wheel, built / "environment")
        out.mkdir(parents=True, exist_ok=True)
        for file in (sdist, wheel):
            file.replace(out / file.name)
            print(out / file.name)


def build(out: Path, no_isolation: bool) -> None:
    """The sdist, and the wheel from it."""
    more = ["--no-isolation"] if no_isolation else []
    module("build", *more, "--outdir", str(out), str(ROOT))


def repaired(wheel: Path, out: Path) -> Path:
    """The wheel with the manylinux tag that its symbols allow, and libraries inside."""
    module("auditwheel", "show", str(wheel))
    module("auditwheel", "repair", "--wheel-dir", str(out), str(wheel))
    (made,) = out.glob("*.whl")
    return made


def check_stable_abi(wheel: Path) -> None:
    """abi3audit, for a wheel that claims the stable ABI."""
    if "-abi3-" in wheel.name:
        module("abi3audit", "--strict", str(wheel))
    else:
        print(f"abi3audit: does not apply, {wheel.name} is for one CPython")


def smoke(wheel: Path, folder: Path) -> None:
    """Install the wheel, and nothing that would need a compiler, and use it."""
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    pip = [python, "-m", "pip", "--disable-pip-version-check", "-q", "install"]
    run(*pip, "--only-binary", ":all:", f"{wheel}[cli]")
    run(python, str(TOOLS / "smoke.py"))


def module(name: str, *words: str) -> None:
    """A module of this environment as a program; -P: build/ here is no package."""
    run(sys.executable, "-P", "-m", name, *words)


def run(*words: str) -> None:
    """A command that must succeed."""
    print("$", *words, flush=True)
    done = subprocess.run(words, check=False)
    if done.returncode:
        raise SystemExit(f"wheels: {words[0]} ended with exit code {done.returncode}")


if __name__ == "__main__":
    main()
