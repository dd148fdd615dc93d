"""Types of the native core; see native/module.cpp."""

import numpy as np
from numpy.typing import NDArray

def instruction_sets() -> list[str]: ...
def reduce(
    out: NDArray[np.uint8],
    sources: list[NDArray[np.uint8]],
    itemsize: int,
    dtype: int,
    op: int,
    divisor: int,
    instruction_set: int = 0,
) -> None: ...

class ValueRunner:
    def __init__(
        self,
        state: NDArray[np.uint64],
        modulus: int,
        n: int,
        num_slots: int,
        lo: int,
        hi: int,
        may_rename: bool,
    ) -> None: ...
    def run(
        self,
        src: NDArray[np.int64],
        dst: NDArray[np.int64],
        chunk: NDArray[np.int64],
        into: NDArray[np.int64] | None,
        mask: NDArray[np.bool_] | None,
        all_reduce: bool,
    ) -> int: ...

class PresenceRunner:
    def __init__(
        self,
        state: NDArray[np.uint8],
        n: int,
        num_slots: int,
        lo: int,
        hi: int,
        may_rename: bool,
    ) -> None: ...
    def run(
        self,
        src: NDArray[np.int64],
        dst: NDArray[np.int64],
        chunk: NDArray[np.int64],
        into: NDArray[np.int64] | None,
        mask: NDArray[np.bool_] | None,
        all_reduce: bool,
    ) -> int: ...
