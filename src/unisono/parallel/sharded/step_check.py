"""All ranks make an optimizer step, or none: how one that differs is found, and told.

In stages 1 and 2 of ZeRO a step gathers, so a rank that skips it makes other calls than
the rest. In FSDP a step sends nothing, and a rank that skips it would go on with shards
of another age. But torch counts the changes of a tensor, so the next forward pass knows
whether the shards are new, and says so in a label: ranks that differ do not match.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor

from unisono.errors import CollectiveMismatch

_FORWARD, _NEW = "forward, ", " step, new"


@contextmanager
def all_step(where: str, stepped: Callable[[str], bool | None]) -> Iterator[None]:
    """If calls differ since only some ranks have stepped, the error says so.

    `stepped` tells that of a call, or None if the call does not show it.
    """
    try:
        yield
    except CollectiveMismatch as error:
        if {stepped(call) for call in error.calls.values()} != {True, False}:
            raise
        raise CollectiveMismatch(
            f"{error}. {where}: some ranks have made an optimizer step that others "
            "have skipped, as after an overflow that these alone have seen; all step, "
            "or none. torch.amp.GradScaler asks all ranks; who looks at gradients by "
            "hand must, too",
            calls=error.calls,
            seq=error.seq,
        ) from None


class Updates:
    """Whether tensors have changed since the last time that it was asked."""

    def __init__(self) -> None:
        """As if they had not changed yet."""
        self._version = 0
        self.new = False

    def look(self, tensors: Iterable[Tensor]) -> None:
        """Compare them with what they were."""
        version = sum(t._version for t in tensors if not t.is_inference())
        self.new, self._version = version != self._version, version

    @property
    def told(self) -> str:
        """What the label of a call in forward ends with."""
        return ", new" if self.new else ""


def shows_new(call: str) -> bool | None:
    """Whether a call of some rank told of new tensors; None if it is no such call."""
    return _NEW in call if _FORWARD in call else None
