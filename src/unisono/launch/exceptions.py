"""Exceptions that travel from the process that raised them to another.

An exception can be pickled if its constructor takes its `args`; many do not, among them
our own, which have keywords. Those are sent as type, args and attributes. What cannot
be sent even so is sent as text; the traceback always is.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from unisono.errors import PeerLost


@dataclass
class RankReport:
    """A rank's result, or why there is none."""

    result: Any = None
    failed: bool = False
    error: BaseException | None = None  # the exception, if it can be sent
    summary: str = ""
    traceback: str = ""
    lost_a_peer: bool = False


def pickled_error(
    error: BaseException, dumps: Callable[[Any], bytes] = pickle.dumps
) -> bytes:
    """The pickled report of an error, with the exception itself if it can be sent."""
    report = RankReport(
        failed=True,
        summary=f"{type(error).__name__}: {error}",
        traceback="".join(traceback.format_exception(error)),
        lost_a_peer=isinstance(error, PeerLost),
    )
    for carried in (error, _Parts(error)):
        report.error = carried  # type: ignore[assignment]
        try:
            data = dumps(report)
            if type(pickle.loads(data).error) is type(error):
                return data
        except Exception:  # pickling runs the exception's own code
            continue
    report.error = None
    return dumps(report)


class _Parts:
    """An exception as type, args and attributes, for constructors with other args."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __reduce__(self) -> tuple[Any, ...]:
        error = self._error
        return _from_parts, (type(error), error.args, error.__dict__)


def _from_parts(
    kind: type[BaseException], args: tuple[Any, ...], values: dict[str, Any]
) -> BaseException:
    error = kind.__new__(kind, *args)
    error.args = args  # some types leave this to the constructor
    error.__dict__.update(values)
    return error
