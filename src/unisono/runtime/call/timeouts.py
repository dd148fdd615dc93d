"""How long a call may take, as users say it and as the native core counts it."""

from __future__ import annotations

import os

from unisono.errors import BadArgument

TIMEOUT_S = 300.0


def nanoseconds(timeout_s: float) -> int:
    """A deadline as the native core counts it; more than 30 years is for ever."""
    if not isinstance(timeout_s, int | float) or not timeout_s > 0:
        raise BadArgument(f"timeout_s = {timeout_s!r}: expected a positive number")
    return int(min(timeout_s, 1e9) * 1e9)


def default_timeout_s() -> float:
    """From UNISONO_TIMEOUT_S, or five minutes."""
    told = os.environ.get("UNISONO_TIMEOUT_S", "")
    try:
        seconds = float(told) if told else TIMEOUT_S
    except ValueError:
        seconds = -1.0
    if not seconds > 0:
        raise BadArgument(f"UNISONO_TIMEOUT_S={told}: expected a positive number")
    return seconds
