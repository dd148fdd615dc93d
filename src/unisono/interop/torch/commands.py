"""`python -m unisono.interop.torch`: the compiled adapter, built or asked after."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from unisono.errors import UnisonoError


def main(arguments: Sequence[str]) -> int:
    """Do what is asked; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m unisono.interop.torch",
        description="The compiled adapter of the unisono backend for PyTorch.",
    )
    parser.add_argument(
        "what",
        choices=("build", "status"),
        help="build it for the torch that is installed; or show which adapter is used",
    )
    what = parser.parse_args(arguments).what
    try:
        sys.stdout.write(_built() if what == "build" else _status())
    except UnisonoError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def _built() -> str:
    from unisono.interop.torch import background, compiled

    compiled.load()
    background.forget_failure()
    return f"built: {compiled.path()}\n"


def _status() -> str:
    import torch

    from unisono.interop.torch import adapters, background, compiled

    there = "" if compiled.is_built() else f" ({background.state()})"
    return (
        f"torch:    {torch.__version__}\n"
        f"adapter:  {adapters.chosen()} ({adapters.VARIABLE}={adapters.wanted()})\n"
        f"compiled: {compiled.path()}{there}\n"
        f"compiler: {compiled.compiler() or 'none'}\n"
    )
