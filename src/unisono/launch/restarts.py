"""Jobs that are started again after a failure: all ranks, as a new job."""

from __future__ import annotations

from collections.abc import Callable

from unisono.launch.outcome import Outcome


def with_restarts(
    attempt: Callable[[int], Outcome], most: int, tell: Callable[[str], None]
) -> tuple[Outcome, int]:
    """Run until an attempt succeeds or is stopped, and at most `most` times again.

    Returns how the last one ended, and how often it was started again. The failures
    before it are reported to `tell`.
    """
    number = 0
    while True:
        outcome = attempt(number)
        if not outcome.exit_code or outcome.stop_request or number == most:
            return outcome, number
        number += 1
        tell(f"{outcome.report()}\nunisono: restart {number} of at most {most}")
