"""A rank of a world across hosts: its function is in one file, its report in another.

The files have no names and are inherited from the process that made them, so what is
unpickled here comes from our own parent, and from there alone.
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from typing import Any

import unisono
from unisono.errors import BadArgument
from unisono.launch.exceptions import RankReport, pickled_error


def main(order: int, report: int) -> None:
    """Run the function in the descriptor `order`; write its result to `report`."""
    try:
        with os.fdopen(order, "rb") as file:
            function, args, init = pickle.loads(file.read())
        data, failed = _pickled(_result(function, args, init)), False
    except BaseException as error:
        traceback.print_exc()
        data, failed = pickled_error(error), True
    with os.fdopen(report, "wb") as file:
        file.write(data)
    if failed:
        sys.exit(1)


def _result(function: Any, args: tuple[Any, ...], init: bool) -> Any:
    if not init:
        return function(*args)
    comm = unisono.init()
    result = function(comm, *args)
    comm.close()
    return result


def _pickled(result: Any) -> bytes:
    try:
        return pickle.dumps(RankReport(result))
    except Exception as why:
        raise BadArgument(
            f"world_across: what this rank returned, a {type(result).__name__}, cannot "
            f"be sent: {why}"
        ) from why
