"""`unisono run -n 4 -m unisono.tune [quick]`: tune a world that a launcher began."""

from __future__ import annotations

import os
import sys

import unisono
from unisono.errors import BadArgument
from unisono.runtime.plan.tuned import VARIABLE
from unisono.tune import QUICK, Effort, tune
from unisono.tune.files import destination


def main() -> None:
    """Tune, with a line on standard error for each measurement."""
    words = sys.argv[1:]
    if words not in ([], ["quick"]):
        raise BadArgument(f"unisono.tune {' '.join(words)}: expected quick, or nothing")
    where = destination()
    os.environ[VARIABLE] = "0"  # what is measured must not hang on what was
    with unisono.init() as comm:

        def tell(what: str) -> None:
            if comm.rank == 0:
                sys.stderr.write(f"tune: {what}\n")

        tune(comm, QUICK if words else Effort(), save_to=where, tell=tell)


if __name__ == "__main__":
    main()
