"""The options that every collective has."""

from __future__ import annotations

from typing import Any, NamedTuple, TypedDict

from unisono.errors import BadArgument


class Options(TypedDict, total=False):
    """The options that every collective has, for type checkers."""

    algorithm: str | None
    async_op: bool
    timeout_s: float | None
    reproducible: bool
    label: str
    codec: Any
    coded: str | None
    error_bound: float | None
    stream: Any


CallKey = tuple[int, Any, Any, Any, int, Options]
"""The arguments of a plain call: collective, x, out, op, root and options."""


class CallOptions(NamedTuple):
    """The same options with their defaults."""

    algorithm: str | None = None
    async_op: bool = False
    timeout_s: float | None = None
    reproducible: bool = False
    label: str = ""
    codec: Any = None
    coded: str | None = None
    error_bound: float | None = None
    stream: Any = None

    def refuse_stream(self, where: str) -> None:
        """Raise BadArgument if a stream is given for arrays of the host."""
        if self.stream is not None:
            raise BadArgument(f"{where}: stream= is for CUDA arrays only")

    def refuse_codec_options(self, where: str) -> None:
        """Raise BadArgument if there are codec options without a codec."""
        if self.coded is not None or self.error_bound is not None:
            raise BadArgument(
                f"{where}: coded= and error_bound= need a codec, as in codec='fp8'"
            )

    def first_beyond(self, *allowed: str) -> str:
        """The first option that is set and is not one of `allowed`; "" if none is."""
        plain = CallOptions()
        return next(
            (
                name
                for name, value in self._asdict().items()
                if name not in allowed and value != getattr(plain, name)
            ),
            "",
        )

    def refuse_codec(self, where: str, instead: str) -> None:
        """Raise BadArgument if a codec is given where none is possible."""
        if self.codec is not None:
            raise BadArgument(f"{where}: this call takes no codec; {instead}")
