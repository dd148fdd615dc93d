"""Schedules made for one topology, whatever its links are.

    made = synthesize("all_reduce", "torus:4x4", failed=["0-1"])
    made.schedule.verify()

The result is a schedule as any other. It is as fast as any for large buffers, where
cuts of the topology decide; for small ones, where latency does, it is not made.
"""

from unisono.synthesize.api import OFFERED, Synthesis, synthesize
from unisono.synthesize.files import SUFFIXES, save
from unisono.synthesize.packing import Tree

__all__ = ["OFFERED", "SUFFIXES", "Synthesis", "Tree", "save", "synthesize"]
