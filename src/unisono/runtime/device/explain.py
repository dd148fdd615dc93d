"""`comm.explain` for arrays on a device: what the kernel would run, and how."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod

from unisono import _native, cuda_queues
from unisono.algorithms import read
from unisono.devices.arrays import DeviceView
from unisono.runtime.device.choice import algorithm_on_device
from unisono.runtime.device.nccl_calls import lacks
from unisono.runtime.device.plane import WINDOW, DevicePlane, may_use_packets
from unisono.runtime.observe.subject import DeviceCall
from unisono.runtime.plan.plans import rank_program, verified
from unisono.units import format_bytes


def explain_on_device(plane: DevicePlane | None, call: DeviceCall, engine: str) -> str:
    """A few readable lines; nothing is run. `plane` is None before the first call.

    `engine` says which one it is, and why.
    """
    n, _, what, view, nbytes, root, _, how = call
    choice = algorithm_on_device(
        what.name,
        nbytes,
        n,
        view.dtype,
        named=how.algorithm,
        reproducible=how.reproducible,
        packets=(may_use_packets if plane is None else plane.may_use_packets)(nbytes),
    )
    key = what.name, choice.algorithm, n, root
    spec = read(choice.algorithm)
    places = [
        rank_program(what.name, spec, n, root, mode, (), 0).places for mode in range(4)
    ]
    lines = [
        f"{what.name} of {format_bytes(nbytes)} on {n} ranks by {choice.algorithm}",
        device_line(view),
        f"  engine     {engine}",
        f"  why        {choice.why}",
        f"  verified   {what.meaning}",
        f"  costs      {verified(*key).num_steps} steps in one kernel",
        *_memory(plane, places, view),
    ]
    if plane is None:
        lines.append("  kernel     the ranks connect at their first call on the device")
    else:
        facts = plane.facts
        chunks, size = verified(*key).num_chunks, view.dtype.itemsize
        piece = -(-nbytes // max(1, chunks * size))
        shape = plane.shape(
            nbytes, partial(_native.packets_fit, places[0], piece, size)
        )
        lines.append(
            f"  kernel     {shape.blocks} blocks of {shape.threads} threads; "
            f"{facts.ranks_per_device} ranks share a device"
        )
        if shape.packets:
            lines.append("  packets    every 4 bytes travel with a flag of 4 bytes")
        lines += _queues(plane.native.ranks_here())
    return "\n".join(lines)


def explain_nccl(plane: DevicePlane | None, call: DeviceCall, engine: str) -> str:
    """The same where the engine is NCCL; `plane` is of the calls that it cannot do."""
    what = call.what
    if why := lacks(what.name, call.view.dtype, call.op, call.how):
        return explain_on_device(plane, call, f"unisono: {why}")
    return "\n".join(
        [
            f"{what.name} of {format_bytes(call.nbytes)} on {call.n} ranks by nccl",
            device_line(call.view),
            f"  engine     {engine}",
            "  why        NCCL chooses its algorithm itself (NCCL_DEBUG=INFO)",
            "  verified   not by unisono; ranks compare their calls on the host",
            "  order      NCCL's own: other bits than on the CPU are possible",
        ]
    )


def device_line(view: DeviceView) -> str:
    """Which device an array is on."""
    name = _native.cuda_device(view.ordinal).name
    emulated = " (emulated)" if _native.cuda_is_emulated() else ""
    return f"  device     cuda:{view.ordinal}, {name}{emulated}"


def _queues(ranks_here: int) -> list[str]:
    """Whether what the ranks of this process have on streams can run side by side."""
    number = cuda_queues.count()
    ranks = f"{ranks_here} ranks" if ranks_here > 1 else "the rank"
    line = f"  queues     {cuda_queues.words()} for {ranks} of this process"
    if ranks_here == 1:
        if number >= cuda_queues.FEWEST:
            return []
        wanted = cuda_queues.DEFAULT
    else:
        if ranks_here < number:  # one is for the host's own copies
            return [line]
        wanted = cuda_queues.MOST
    return [
        f"{line}: too few, so",
        "             kernels may be queued behind those that wait for them; set",
        f"             {cuda_queues.VARIABLE}={wanted} before CUDA is used",
    ]


_SHARING = (
    "shared at its first call",
    "used in place by all ranks",
    "through the windows, until all ranks have mapped it",
    "through the windows: a rank cannot map its memory",
    "through the windows: its memory cannot be shared, as that of pools",
)
"""By the numbers of SharedSegments::State."""


def _memory(
    plane: DevicePlane | None, places: Sequence[int], view: DeviceView
) -> list[str]:
    """Where the data passes; `places` are those of a window, by what is exposed."""
    through = f"  memory     through windows of {format_bytes(WINDOW)}"
    if plane is not None and plane.facts.why_on_host:
        return [
            f"{through} in host memory: {places[0]} places",
            f"             because {plane.facts.why_on_host}",
        ]
    lines = [
        f"{through}: {places[0]} places; with buffers that all ranks can use in place: "
        f"{places[3]}"
    ]
    if plane is not None:
        nbytes = prod(view.shape) * view.dtype.itemsize
        state = plane.native.sharing_of(view.address, nbytes)
        lines.append(f"             this array: {_SHARING[state]}")
    return lines
