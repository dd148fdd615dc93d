"""Cases of collectives on arrays of a device, which may be an emulated one."""

import numpy as np

from conformance import REDUCING, ROOTED, numpy_dtype
from unisono import _native
from unisono.devices.arrays import DeviceArray


def to_device(x, ordinal=0):
    """A copy of a NumPy array on the device."""
    made = DeviceArray(x.shape, x.dtype.name, ordinal)
    made.copy_from(x)
    return made


def perform_on_own_device(comm, cases):
    """The same where each rank has a device of its own."""
    return perform_on_device(comm, cases, comm.rank)


def perform_on_device(comm, cases, ordinal=0):
    """Make all calls, then wait: the results, in the form of `conformance.check`."""
    stream = _native.CudaStream(ordinal)  # each rank has its own
    started = [_start(comm, case, ordinal, stream) for case in cases]
    comm.synchronize(60)
    return [(None if out is None else out.numpy().reshape(-1), True) for out in started]


def _start(comm, case, ordinal, stream):
    rank = comm.rank
    given = case.given(rank)
    how = {"stream": stream}
    if case.algorithm is not None:
        how["algorithm"] = case.algorithm
    if case.what in ROOTED:
        how["root"] = case.root
    if case.what in REDUCING:
        how["op"] = case.op
    x = None if given is None else to_device(given, ordinal)
    if case.what == "broadcast" and x is None:
        zeros = np.zeros(case.size(rank, after=True), numpy_dtype(case.dtype))
        x = to_device(zeros, ordinal)
    out = None
    if case.has_result(rank) and (case.what == "scatter" or case.style == "out"):
        size = case.size(rank, after=True)
        out = to_device(np.zeros(size, numpy_dtype(case.dtype)), ordinal)
    result = getattr(comm, case.what)(x, out=out, **how)
    return result if case.has_result(rank) else None
