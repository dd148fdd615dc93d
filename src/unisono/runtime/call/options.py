"""What any collective can be told beside its arguments."""

from __future__ import annotations

from typing import Any, NamedTuple, TypedDict

from unisono.errors import BadArgument


class Options(TypedDict, total=False):
    """What any collective can be told beside its arguments."""

    algorithm: str | None
    async_op: bool
    timeout_s: float | None
    reproducible: bool
    label: str
    codec: Any
    coded: str | None
    error_bound: float | None


class How(NamedTuple):
    """The same with its defaults."""

    algorithm: str | None = None
    async_op: bool = False
    timeout_s: float | None = None
    reproducible: bool = False
    label: str = ""
    codec: Any = None
    coded: str | None = None
    error_bound: float | None = None

    def refuse_idle(self, where: str) -> None:
        """Raise BadArgument if something is told about a codec, but no codec."""
        if self.coded is not None or self.error_bound is not None:
            raise BadArgument(
                f"{where}: coded= and error_bound= need a codec, as in codec='fp8'"
            )

    def refuse_codec(self, where: str, instead: str) -> None:
        """Raise BadArgument if a codec is given where there can be none."""
        if self.codec is not None:
            raise BadArgument(f"{where}: codec= is not for this call; {instead}")
