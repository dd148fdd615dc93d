"""Errors that travel from the process that raised them to the one that asked.

An exception can be pickled if its constructor takes what its `args` are; many do not,
ours with their keywords among them. Those are taken apart and put together again. What
does not survive even that is told in words; the traceback is text in any case.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from unisono.errors import PeerLost


@dataclass
class Report:
    """What a rank has to say: a result, or why there is none."""

    result: Any = None
    failed: bool = False
    error: BaseException | None = None  # itself, if it could be sent
    told: str = ""
    traceback: str = ""
    lost_a_peer: bool = False


def pickled_error(
    error: BaseException, dumps: Callable[[Any], bytes] = pickle.dumps
) -> bytes:
    """The report of an error, with the error itself if it survives the journey."""
    report = Report(
        failed=True,
        told=f"{type(error).__name__}: {error}",
        traceback="".join(traceback.format_exception(error)),
        lost_a_peer=isinstance(error, PeerLost),
    )
    for carried in (error, _Parts(error)):
        report.error = carried  # type: ignore[assignment]
        try:
            data = dumps(report)
            if type(pickle.loads(data).error) is type(error):
                return data
        except Exception:  # of whatever kind: its author did not think of pickle
            continue
    report.error = None
    return dumps(report)


class _Parts:
    """An exception as its parts, for those whose constructor takes more than args."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __reduce__(self) -> tuple[Any, ...]:
        error = self._error
        return _from_parts, (type(error), error.args, error.__dict__)


def _from_parts(
    kind: type[BaseException], args: tuple[Any, ...], values: dict[str, Any]
) -> BaseException:
    error = kind.__new__(kind, *args)
    error.args = args  # some kinds leave them to the constructor
    error.__dict__.update(values)
    return error
