"""The methods of a communicator that other collectives are built from.

Groups, objects and compressed sums are below `Communicator`, which offers them, so they
are written against this protocol.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, Unpack

from unisono.runtime.call.options import Options
from unisono.runtime.core import Core
from unisono.transports.session import Peer


class Collectives(Protocol):
    """The part of `Communicator` that other collectives are made of."""

    core: Core
    rank: int
    world_size: int

    def __init__(self, core: Core) -> None:
        """A communicator of this core."""

    @property
    def name(self) -> str: ...  # noqa: D102

    @property
    def timeout_s(self) -> float: ...  # noqa: D102

    @property
    def peers(self) -> list[Peer]: ...  # noqa: D102

    def all_reduce(  # noqa: D102
        self, x: Any, *, op: Any = "sum", out: Any = None, **how: Unpack[Options]
    ) -> Any: ...

    def broadcast(  # noqa: D102
        self, x: Any, *, root: int = 0, out: Any = None, **how: Unpack[Options]
    ) -> Any: ...

    def all_gather(  # noqa: D102
        self,
        x: Any,
        *,
        out: Any = None,
        counts: Sequence[int] | None = None,
        **how: Unpack[Options],
    ) -> Any: ...

    def reduce_scatter(  # noqa: D102
        self,
        x: Any,
        *,
        op: Any = "sum",
        out: Any = None,
        counts: Sequence[int] | None = None,
        **how: Unpack[Options],
    ) -> Any: ...

    def all_to_all(  # noqa: D102
        self, x: Any, *, out: Any = None, **how: Unpack[Options]
    ) -> Any: ...

    def gather(  # noqa: D102
        self,
        x: Any,
        *,
        root: int = 0,
        out: Any = None,
        counts: Sequence[int] | None = None,
        **how: Unpack[Options],
    ) -> Any: ...

    def scatter(  # noqa: D102
        self,
        x: Any = None,
        *,
        root: int = 0,
        out: Any = None,
        counts: Sequence[int] | None = None,
        **how: Unpack[Options],
    ) -> Any: ...

    def barrier(self, **how: Unpack[Options]) -> Any: ...  # noqa: D102

    def close(self) -> None: ...  # noqa: D102
