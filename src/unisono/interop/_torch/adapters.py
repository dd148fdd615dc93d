"""Which adapter a group gets."""

from __future__ import annotations

import os
from typing import Any

from unisono.errors import BadArgument

VARIABLE = "UNISONO_TORCH_ADAPTER"
ADAPTERS = ("python",)


def chosen() -> str:
    """The adapter that the environment names; the one in Python if it names none."""
    name = os.environ.get(VARIABLE, "") or ADAPTERS[0]
    if name not in ADAPTERS:
        raise BadArgument(f"{VARIABLE}={name}: expected one of {', '.join(ADAPTERS)}")
    return name


def make(options: Any, pg_options: Any = None) -> Any:
    """A process group, or a backend for one."""
    from unisono.interop._torch.meeting import Meeting
    from unisono.interop._torch.pending import for_torch

    if pg_options is not None:
        raise BadArgument("the unisono backend has no pg_options")
    chosen()
    try:
        meeting = Meeting(options)
    except Exception as error:
        raise for_torch(error) from None
    from unisono.interop._torch.process_group import UnisonoProcessGroup

    return UnisonoProcessGroup(meeting, options.store)
