"""Ranks as processes for tests that need such, and not any way to start them.

They are forked from one server that has imported what they need: to import it takes
each rank longer than most tests do. `unisono.spawn` by itself has tests of its own.

The environment is that of the server: what a test sets is not there.
"""

import multiprocessing

import unisono

PRELOADED = ["numpy", "pytest", "unisono.runtime.world.init", "unisono.testing"]


def on_processes(function, n, args=(), **options):
    """What `function(comm, *args)` returns on each of n processes."""
    multiprocessing.set_forkserver_preload(PRELOADED)  # counts when the server starts
    return unisono.spawn(function, n, args, method="forkserver", **options)
