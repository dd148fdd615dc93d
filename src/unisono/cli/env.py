"""`unisono env`: what to paste into a bug report."""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version

import unisono
from unisono.cli._doctor import fabric
from unisono.cli.output import print_json, print_text
from unisono.devices import found
from unisono.errors import BadArgument
from unisono.runtime.world.address import rendezvous_address
from unisono.runtime.world.environment import find_world
from unisono.transports.addresses import INTERFACE, choose

_LIBRARIES = (
    "numpy",
    "msgspec",
    "cyclopts",
    "rich",
    "torch",
    "ml_dtypes",
    "matplotlib",
)


def env(*, json: bool = False) -> int:
    """Print versions and facts of this machine, for bug reports.

    Example: unisono env

    Parameters
    ----------
    json
        Print a JSON object.
    """
    facts = {
        "unisono": unisono.__version__,
        "native core": "yes"
        if importlib.util.find_spec("unisono._native")
        else "no (NumPy)",
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": str(
            len(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else os.cpu_count()
        ),
        "world": _world(),
        "rendezvous": _rendezvous(),
        "interfaces": _interfaces(),
        "GPU driver": found.driver().words,
        "GPU windows": found.windows().words,
        "NVRTC": found.compiler().words,
        "NCCL": found.collectives().words,
        "kernels": found.kernels().words,
        **{fact.name: fact.words for fact in fabric.facts()},
        **{name: _installed(name) for name in _LIBRARIES},
    }
    variables = {
        name: value if name != "UNISONO_SECRET" else "(is set)"
        for name, value in sorted(os.environ.items())
        if name.startswith("UNISONO_")
    }
    facts |= variables
    if json:
        print_json(facts)
    else:
        for name, value in facts.items():
            print_text(f"{name:<12} {value}")
    return 0


def _world() -> str:
    """What `unisono.init()` would find here, and by which launcher."""
    try:
        return find_world().why
    except BadArgument as error:
        return f"none: {error}"


def _rendezvous() -> str:
    """Where the ranks of that world connect first."""
    try:
        world = find_world()
        if not world.hosts_several:
            return "on this host, without a port"
        place = rendezvous_address(world)
    except BadArgument as error:
        return f"none: {error}"
    return f"{place.address} ({place.why})"


def _interfaces() -> str:
    """Which network cards UNISONO_INTERFACE chooses; without it the route does."""
    named = os.environ.get(INTERFACE)
    if not named:
        return "the one by which rank 0 is reached"
    try:
        chosen = choose(named)
    except BadArgument as error:
        return f"none: {error}"
    return ", ".join(map(str, chosen.rails)) or str(chosen)


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
