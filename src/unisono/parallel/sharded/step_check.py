"""All ranks make an optimizer step, or none: how a rank that differs is detected.

In stages 1 and 2 of ZeRO a step gathers parameters, so a rank that skips it makes other
calls than the rest. In FSDP a step sends nothing, and a rank that skips it would go on
with old shards. But torch counts in-place changes of a tensor, so the next forward pass
knows whether its shards are new, and says so in a label: if ranks differ, their calls
do not match.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor

from unisono.errors import CollectiveMismatch

_FORWARD, _NEW = "forward, ", " step, new"


@contextmanager
def explain_step_mismatch(
    where: str, stepped: Callable[[str], bool | None]
) -> Iterator[None]:
    """If calls differ because only some ranks have stepped, say so in the error.

    `stepped` tells from a call whether its rank has stepped, or None if the call does
    not show it.
    """
    try:
        yield
    except CollectiveMismatch as error:
        if {stepped(call) for call in error.calls.values()} != {True, False}:
            raise
        raise CollectiveMismatch(
            f"{error}. {where}: some ranks have made an optimizer step that others "
            "have skipped, as after an overflow that only these have seen; all ranks "
            "must step, or none. torch.amp.GradScaler asks all ranks; code that checks "
            "gradients itself must do so, too",
            calls=error.calls,
            seq=error.seq,
        ) from None


class ShardVersions:
    """Whether tensors have changed since the last check."""

    def __init__(self) -> None:
        """At first, nothing has changed."""
        self._version = 0
        self.new = False

    def check(self, tensors: Iterable[Tensor]) -> None:
        """Compare the tensors' version counters with the last ones."""
        version = sum(t._version for t in tensors if not t.is_inference())
        self.new, self._version = version != self._version, version

    @property
    def label(self) -> str:
        """What the label of a call in forward ends with."""
        return ", new" if self.new else ""


def reports_new_shards(call: str) -> bool | None:
    """Whether a rank's call says that its shards are new; None for other calls."""
    return _NEW in call if _FORWARD in call else None
