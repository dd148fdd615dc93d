"""Which adapter a group gets.

The one in Python is always there, but it is a whole process group: beside it there is
no place for the backend of another device. The compiled one is part of a group, and
torch's C++ half sees it, and its small calls are faster. So: the compiled one where it
is built, or where a group has several backends; otherwise the one in Python, and the
compiled one is built meanwhile, for programs that begin later (`background.py`).
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any

from unisono.errors import BadArgument

VARIABLE = "UNISONO_TORCH_ADAPTER"
DEVICES = ("cpu", "cuda")
ADAPTERS = ("auto", "python", "compiled")
_LOG = logging.getLogger("unisono")


def wanted() -> str:
    """The adapter that the environment names."""
    name = os.environ.get(VARIABLE, "") or ADAPTERS[0]
    if name not in ADAPTERS:
        raise BadArgument(f"{VARIABLE}={name}: expected one of {', '.join(ADAPTERS)}")
    return name


def chosen(devices: Mapping[str, str] | None = None) -> str:
    """The adapter for a group whose devices have these backends, if that is known."""
    name = wanted()
    if devices is not None and len(set(devices.values())) > 1:
        if name == "python":
            backends = ",".join(
                f"{device}:{which}" for device, which in devices.items()
            )
            raise BadArgument(
                f"{VARIABLE}=python, but the group is {backends}: the Python adapter "
                "takes a whole group; set it to compiled, or unset it"
            )
        return "compiled"
    if name != "auto":
        return name
    from unisono.interop.torch import compiled

    return "compiled" if compiled.is_built() and _loads() else "python"


def served(devices: Mapping[str, str] | None) -> tuple[str, ...]:
    """The kinds of devices whose tensors a group of ours serves.

    Those that have unisono by their name in the group; of CUDA's only if there is one.
    """
    import torch

    ours = [
        kind for kind in DEVICES if devices is None or devices.get(kind) == "unisono"
    ]
    found = tuple(k for k in ours if k != "cuda" or torch.cuda.is_available())
    return found or ("cpu",)


def make(options: Any, pg_options: Any = None) -> Any:
    """A process group, or a backend for one."""
    from unisono.interop.torch.errors import for_torch, raise_originals
    from unisono.interop.torch.rendezvous import GroupRendezvous

    raise_originals()
    devices = _devices(sys._getframe())
    alone = devices is None or len(set(devices.values())) == 1
    try:
        if pg_options is not None and alone:  # else they are the other backend's
            raise BadArgument("the unisono backend has no pg_options")
        name = chosen(devices)
        if name == "compiled":  # before another rank waits for this one
            from unisono.interop.torch import compiled

            compiled.load()
        rendezvous = GroupRendezvous(options)
    except Exception as error:
        raise for_torch(error) from None
    if name == "python":
        if wanted() == "auto":
            from unisono.interop.torch import background

            background.begin()
        from unisono.interop.torch.process_group import UnisonoProcessGroup

        return UnisonoProcessGroup(rendezvous, options.store, served(devices))
    return _compiled_one(rendezvous, options, devices)


def adapter_of(group: Any = None) -> str:
    """Which adapter a group has; the default group, if none is given."""
    import torch
    import torch.distributed as dist

    from unisono.interop.torch.process_group import UnisonoProcessGroup

    group = group or dist.group.WORLD
    if isinstance(group, UnisonoProcessGroup):
        return group.adapter
    for device in DEVICES:
        try:
            backend = group._get_backend(torch.device(device))
            if getattr(backend, "wrapped_pg", backend).name() == "unisono":
                return "compiled"
        except (AttributeError, RuntimeError):
            pass
    raise BadArgument(f"{group!r} is not a group of the unisono backend")


def _compiled_one(
    rendezvous: Any, options: Any, devices: Mapping[str, str] | None
) -> Any:
    """A whole group if unisono is its only backend, so that it has this name."""
    import torch._C._distributed_c10d as c10d

    from unisono.interop.torch import compiled
    from unisono.interop.torch.collectives import TorchCollectives
    from unisono.interop.torch.planned import PlannedCalls

    calls = TorchCollectives(rendezvous, served(devices))
    calls.records = False  # the compiled work does
    planned = PlannedCalls(calls)
    wrapped = c10d.get_debug_level() == c10d.DebugLevel.DETAIL  # by torch, afterwards
    if devices is not None and len(set(devices.values())) == 1 and not wrapped:
        return compiled.make_group(planned, options.timeout, options.store)
    return compiled.make_backend(planned, options.timeout)


def _loads() -> bool:
    from unisono.interop.torch import compiled

    try:
        compiled.load()
    except ImportError as why:
        _LOG.warning("the compiled torch adapter cannot be loaded: %s", why)
        return False
    return True


def _devices(frame: FrameType | None) -> Mapping[str, str] | None:
    """Which device has which backend in the group that torch is making.

    torch does not tell; it is in a variable of the function that calls ours. None where
    that is not so.
    """
    while frame is not None:
        if frame.f_code.co_name == "_new_process_group_helper":
            config = frame.f_locals.get("backend_config")
            try:
                return dict(config.get_device_backend_map())  # type: ignore[union-attr]
            except (AttributeError, TypeError, ValueError):
                return None
        frame = frame.f_back
    return None
