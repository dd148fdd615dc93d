"""Ranks as processes for tests that need such, and not any way to start them.

They are forked from one server that has imported what they need: to import it takes
each rank longer than most tests do. `unisono.spawn` by itself has tests of its own.

The environment is that of the server. Our own variables are set as they are here, but
only when the ranks have connected.
"""

import multiprocessing
import os
from multiprocessing import forkserver

import unisono
from unisono import cuda_queues

PRELOADED = ["numpy", "pytest", "unisono.runtime.world.init", "unisono.testing"]

OF_ALL = {"UNISONO_TUNED", "UNISONO_PROBE", "UNISONO_GPU_TESTS"}
"""Set for all tests, and read where modules are imported."""


def on_processes(function, n, args=(), **options):
    """What `function(comm, *args)` returns on each of n processes."""
    variables = our_variables()
    _start_server(variables)
    args = function, variables, *args
    return unisono.spawn(_with_variables, n, args, method="forkserver", **options)


def our_variables():
    """Our own variables, as they are here."""
    return {
        name: os.environ[name] for name in os.environ if name.startswith("UNISONO_")
    }


def _start_server(variables):
    """Start it, if it does not run, without what one test has set.

    Nor with the queues of ranks that are threads: under MPS processes share them.
    """
    multiprocessing.set_forkserver_preload(PRELOADED)
    without = dict(variables)
    if cuda_queues.VARIABLE in os.environ:
        without[cuda_queues.VARIABLE] = os.environ[cuda_queues.VARIABLE]
    for name in without:
        del os.environ[name]
    try:
        os.environ.update({name: variables[name] for name in OF_ALL & set(variables)})
        forkserver.ensure_running()
    finally:
        os.environ.update(without)


def _with_variables(comm, function, variables, *args):
    os.environ.update(variables)
    return function(comm, *args)
