"""The adapter in C++, built for the torch, the Python and the sources that are there.

There is no binary for every torch, and the headers are in its wheel: one call of the
compiler makes the module, in about half a minute, beside the first program that could
use it (`background.py`) or on request. It is kept in the user's cache folder
under a name that tells what it was made from, so that another torch gets another one.
Ranks that build at once wait for the first of them.

What is loaded runs as this user, so no other user may have made or changed it: see
`user_cache.py`. What was checked is what is loaded: the file stays open, and is loaded
through its descriptor.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import importlib.util
import logging
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

import unisono
from unisono.errors import UsageError
from unisono.user_cache import UserCache, alone, opened

if TYPE_CHECKING:
    from unisono.interop.torch.planned import PlannedCalls

_LOG = logging.getLogger("unisono")
_MODULE = "_unisono_torch"
_HERE = Path(__file__).parent
_SOURCE = _HERE / "backend.cpp"
_HEADERS = (
    *("plans.hpp", "messages.hpp", "begun_work.hpp"),
    *("work.hpp", "hooks.hpp", "pool.hpp"),
)
_CACHE = UserCache("torch", "the compiled torch adapter")
_LINES = 30  # of the compiler's, in an error
_COMPILERS = ("c++", "g++", "clang++")


def path() -> Path:
    """Where the module is, or would be."""
    return _CACHE.folder() / _key() / f"{_MODULE}.so"


def make_folder() -> Path:
    """The folder it is kept in; UsageError if another user could change that."""
    folder = path().parent
    _CACHE.make_folders(folder)
    return folder


def is_built() -> bool:
    """Whether it exists for this torch, and no other user could have changed it."""
    try:
        target = path()
        if not target.exists():
            return False
        _CACHE.refuse_folders(target.parent)
        os.close(opened(target))
    except FileNotFoundError:
        return False
    except (UsageError, OSError) as why:
        _LOG.warning("the compiled torch adapter is not used: %s", why)
        return False
    return True


def compiler() -> str | None:
    """The C++ compiler: $CXX, or the first of the usual names."""
    names = (os.environ["CXX"],) if os.environ.get("CXX") else _COMPILERS
    return next((program for name in names if (program := shutil.which(name))), None)


def build() -> Path:
    """Make the module unless it is there; where it is."""
    target = path()
    try:
        make_folder()
        if _CACHE.is_ours(target):
            return target
        with alone(target.parent / "lock"):
            if not _CACHE.is_ours(target):  # no other process was faster
                _compile(target)
    except OSError as error:
        raise UsageError(
            f"the compiled torch adapter cannot be kept in {target.parent}: {error}; "
            "set XDG_CACHE_HOME to a folder that can be written to"
        ) from None
    return target


@functools.cache
def load() -> ModuleType:
    """The module, built if need be."""
    built = build()
    descriptor = opened(built)  # for good: its number is a part of the name below
    inside = f"/proc/self/fd/{descriptor}"
    loader = ExtensionFileLoader(
        _MODULE, inside if os.path.exists(inside) else str(built)
    )
    spec = importlib.util.spec_from_loader(_MODULE, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    # Its threads must not ask for the interpreter once that has begun to end.
    atexit.register(module.end)
    return module


def make_backend(planned: PlannedCalls, timeout: Any) -> Any:
    """A `c10d::Backend` of this rank, to be registered for its devices."""
    calls = planned.calls
    return load().make_backend(calls, planned, calls.rank, calls.size, timeout)


def make_group(planned: PlannedCalls, timeout: Any, store: Any) -> Any:
    """A whole process group around it, which has our name and serves its devices."""
    backend, calls = make_backend(planned, timeout), planned.calls
    kinds = [torch.device(device) for device in calls.devices]
    return load().make_group(store, calls.rank, calls.size, backend, kinds)


@functools.cache
def _key() -> str:
    digest = hashlib.sha256()
    for source in (_SOURCE, *(_HERE / name for name in _HEADERS)):
        digest.update(source.read_bytes())
    return "-".join(
        (
            f"torch{torch.__version__}",
            str(sys.implementation.cache_tag),
            platform.machine(),
            f"unisono{unisono.__version__}",
            digest.hexdigest()[:16],
        )
    )


def _compile(target: Path) -> None:
    found = compiler()
    if found is None:
        raise UsageError(
            "the compiled torch adapter needs a C++20 compiler, and none of "
            f"{os.environ.get('CXX') or ', '.join(_COMPILERS)} is there"
        )
    _LOG.info("building the compiled torch adapter, about half a minute")
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        done = subprocess.run(
            [found, *_arguments(), str(_SOURCE), "-o", str(made), *_libraries()],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
        if done.returncode != 0:
            output = "\n".join(done.stdout.splitlines()[:_LINES])
            raise UsageError(
                f"{found} could not build the torch adapter for torch "
                f"{torch.__version__} (exit code {done.returncode}):\n{output}"
            )
        made.chmod(0o700)  # whatever the umask lets others do
        made.replace(target)


def _torch_folder() -> Path:
    return Path(torch.__file__).parent


def _arguments() -> list[str]:
    include = _torch_folder() / "include"
    folders = (
        include,
        include / "torch" / "csrc" / "api" / "include",
        sysconfig.get_path("include"),
        sysconfig.get_path("platinclude"),
    )
    abi = int(torch.compiled_with_cxx11_abi())
    return [
        *("-O2", "-std=c++20", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread"),
        f"-D_GLIBCXX_USE_CXX11_ABI={abi}",
        *(f"-isystem{folder}" for folder in folders),
    ]


def _libraries() -> list[str]:
    names = ("torch_python", "torch_cpu", "torch", "c10")
    return [f"-L{_torch_folder() / 'lib'}", *(f"-l{name}" for name in names)]
