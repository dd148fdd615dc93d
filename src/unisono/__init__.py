"""unisono: collective communication where every algorithm is data.

import unisono

s = unisono.schedule("all_reduce", "ring", n=5)
s.verify(); s.cost(); print(s)
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unisono import parallel as parallel
    from unisono import trace as trace
    from unisono.algorithms import algorithm as algorithm
    from unisono.algorithms import schedule as schedule
    from unisono.errors import (
        BadArgument,
        CollectiveMismatch,
        CollectiveTimeout,
        CompilationFailed,
        ConnectFailed,
        Corrupted,
        DeviceError,
        MissingExtra,
        MissingLibrary,
        NcclMissing,
        NotAuthentic,
        NvrtcMissing,
        NvrtcTooOld,
        PeerLost,
        ScheduleError,
        TransportError,
        UnisonoError,
        UnsupportedDevice,
        UnsupportedWorld,
        UsageError,
    )
    from unisono.launch.spawn import spawn
    from unisono.runtime.call.reductions import ReduceOp, premul_sum
    from unisono.runtime.call.work import Work
    from unisono.runtime.communicator import Communicator
    from unisono.runtime.world.init import init
    from unisono.schedule import Schedule, Step
    from unisono.view import explain, to_svg
    from unisono.view.html import to_html

__version__ = "0.1.0"

__all__ = [
    "BadArgument",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "Communicator",
    "CompilationFailed",
    "ConnectFailed",
    "Corrupted",
    "DeviceError",
    "MissingExtra",
    "MissingLibrary",
    "NcclMissing",
    "NotAuthentic",
    "NvrtcMissing",
    "NvrtcTooOld",
    "PeerLost",
    "ReduceOp",
    "Schedule",
    "ScheduleError",
    "Step",
    "TransportError",
    "UnisonoError",
    "UnsupportedDevice",
    "UnsupportedWorld",
    "UsageError",
    "Work",
    "algorithm",
    "explain",
    "init",
    "premul_sum",
    "schedule",
    "spawn",
    "to_html",
    "to_svg",
]

_MODULES = {
    "unisono.errors": [
        "BadArgument",
        "CollectiveMismatch",
        "CollectiveTimeout",
        "CompilationFailed",
        "ConnectFailed",
        "Corrupted",
        "DeviceError",
        "MissingExtra",
        "MissingLibrary",
        "NcclMissing",
        "NotAuthentic",
        "NvrtcMissing",
        "NvrtcTooOld",
        "PeerLost",
        "ScheduleError",
        "TransportError",
        "UnisonoError",
        "UnsupportedDevice",
        "UnsupportedWorld",
        "UsageError",
    ],
    "unisono.runtime.world.init": ["init"],
    "unisono.launch.spawn": ["spawn"],
    "unisono.runtime.communicator": ["Communicator"],
    "unisono.runtime.call.reductions": ["ReduceOp", "premul_sum"],
    "unisono.runtime.call.work": ["Work"],
    "unisono.schedule": ["Schedule", "Step"],
    "unisono.algorithms": ["algorithm"],
    "unisono.view": ["explain", "to_svg"],
    "unisono.view.html": ["to_html"],
}
_RENAMED = {
    "copy": ("unisono.schedule", "copy_step"),
    "reduce": ("unisono.schedule", "reduce_step"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def _refuse_sub_interpreters() -> None:
    """The native core, like NumPy, serves one interpreter of a process: the first."""
    for name in ("_interpreters", "_xxsubinterpreters"):  # the latter until Python 3.12
        try:
            interpreters = import_module(name)
        except ImportError:
            continue
        if interpreters.get_current() != interpreters.get_main():
            raise ImportError(
                "unisono cannot be used in a sub-interpreter: make ranks of threads "
                "(unisono.testing.world) or of processes (unisono.spawn, unisono run)"
            )
        return


_refuse_sub_interpreters()


class _LazyPackage(ModuleType):
    """The package `unisono`, which imports a public name's module at its first use.

    So `import unisono` is fast: not even NumPy is imported. `unisono.schedule` is a
    function and there is a package of the same name: when that package is imported,
    the import system sets this attribute, and the setter below ignores it.
    """

    @property
    def schedule(self) -> Any:
        """The function `unisono.schedule`; what it makes can be drawn."""
        import_module("unisono.view")
        return import_module("unisono.algorithms").schedule

    @schedule.setter
    def schedule(self, package: ModuleType) -> None:
        """Ignored; `from unisono.schedule import ...` works nevertheless."""

    def __getattr__(self, name: str) -> Any:
        """A public name, from its module."""
        if name in ("parallel", "trace"):  # packages used by name
            return import_module(f"unisono.{name}")
        if name in _RENAMED:
            module, new = _RENAMED[name]
            import_module("unisono.deprecation").warn_renamed(
                f"unisono.{name}", f"{module}.{new}"
            )
            return getattr(import_module(module), new)
        if name in _MODULE_OF:
            value = getattr(import_module(_MODULE_OF[name]), name)
            setattr(self, name, value)
            return value
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")

    def __dir__(self) -> list[str]:
        """The public names, whether fetched or not."""
        return sorted({*super().__dir__(), *__all__})


sys.modules[__name__].__class__ = _LazyPackage
