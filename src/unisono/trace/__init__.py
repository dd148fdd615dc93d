"""Seeing it: what the ranks did, when, and what went wrong.

    unisono.trace.start(); ...; unisono.trace.stop()     switch this process's ranks
    with unisono.trace.recording(comm, "run.json"):      all ranks, and one file
    with unisono.trace.span("forward"):                  a range of your own

    UNISONO_TRACE=folder python train.py                 each rank leaves its part there
    unisono trace run -n 4 train.py                      the same, put together

draw        the parts of all ranks as lanes, slices and arrows
document    one file: written, read, looked over
summary     time per collective, what was exposed, who was late, and what differs
flights     the flight records of a job; why: what went wrong, and where
ask         the ranks of a job that runs, asked over their sockets
"""

from __future__ import annotations

from unisono.trace.document import Document, faults, merge, read, write
from unisono.trace.record import gather, recording, span, start, stop

__all__ = [
    "Document",
    "faults",
    "gather",
    "merge",
    "read",
    "recording",
    "span",
    "start",
    "stop",
    "write",
]
