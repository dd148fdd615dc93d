"""Timeouts of calls, in seconds for users and nanoseconds for the native core."""

from __future__ import annotations

import os

from unisono.errors import BadArgument

TIMEOUT_S = 300.0


def nanoseconds(timeout_s: float) -> int:
    """A timeout in nanoseconds, at most 30 years."""
    if not isinstance(timeout_s, int | float) or not timeout_s > 0:
        raise BadArgument(f"timeout_s = {timeout_s!r}: expected a positive number")
    return int(min(timeout_s, 1e9) * 1e9)


def default_timeout_s() -> float:
    """The timeout from UNISONO_TIMEOUT_S, or five minutes."""
    text = os.environ.get("UNISONO_TIMEOUT_S", "")
    try:
        seconds = float(text) if text else TIMEOUT_S
    except ValueError:
        seconds = -1.0
    if not seconds > 0:
        raise BadArgument(f"UNISONO_TIMEOUT_S={text}: expected a positive number")
    return seconds
