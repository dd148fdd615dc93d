"""Schedules made for one topology, whatever its links are.

    made = synthesize("all_reduce", "torus:4x4", failed=["0-1"])
    made.schedule.verify()

    made = quickest("all_reduce", "cloud:2x3", 4096)

The result is a schedule as any other. That of `synthesize` is as fast as any for large
buffers, where cuts of the topology decide; that of `quickest` is for small buffers of
few ranks, where latency does.
"""

from unisono.synthesize.api import OFFERED, Synthesis, synthesize
from unisono.synthesize.files import SUFFIXES, save
from unisono.synthesize.packing import Tree
from unisono.synthesize.quickest import SEARCHED, Quickest, quickest

__all__ = [
    "OFFERED",
    "SEARCHED",
    "SUFFIXES",
    "Quickest",
    "Synthesis",
    "Tree",
    "quickest",
    "save",
    "synthesize",
]
