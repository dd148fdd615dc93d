"""The limits of this process on memory, as `unisono doctor` shows them."""

from __future__ import annotations

import resource

from unisono.units import format_bytes


def memory_limit(which: int) -> tuple[bool, str]:
    """Whether there is no such limit, and how much is allowed in words."""
    soft, _ = resource.getrlimit(which)
    unlimited = soft == resource.RLIM_INFINITY
    return unlimited, "unlimited" if unlimited else format_bytes(soft)
