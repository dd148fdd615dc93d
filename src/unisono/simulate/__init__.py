"""WHEN it arrives: schedules on a topology, given a clock.

api         the one call, `simulate`, and `sweep` for many sizes
conditions  late ranks, slow or failed links, and codecs
closed      any number of ranks in microseconds, by laws that are derived
steps       a clock for every rank, a load for every link, step by step
events      flows that share links fairly, event by event (native)
bound       what no schedule can beat on this topology
overlap     a collective during computation: how much of it is exposed
limits      what would not fit, or take minutes, is refused first
result      time, bandwidth, utilisation, critical path
chrome      the same as a trace for Perfetto or chrome://tracing
candidates  the algorithms there are, under names that fit a topology
compare     which algorithm is fastest at each size, and where that changes
groups      collectives of all groups of a mesh axis at once
streams     tasks on concurrent streams
training    a training step: what a strategy computes and sends
engines     other libraries as models: NCCL, gloo, MPI, XLA, or measured times
"""

from unisono.deprecation import old_names
from unisono.simulate.api import FIDELITIES, simulate, sweep
from unisono.simulate.bound import least_time
from unisono.simulate.candidates import candidates, fitted
from unisono.simulate.chrome import to_chrome
from unisono.simulate.compare import Comparison, compare
from unisono.simulate.conditions import CodecModel, Conditions
from unisono.simulate.engines import ENGINES, Engine, EngineTime, Fabric, engine
from unisono.simulate.overlap import Compute
from unisono.simulate.result import Hop, Result, Timeline
from unisono.simulate.training import TrainingStep, train

__all__ = [
    "ENGINES",
    "FIDELITIES",
    "CodecModel",
    "Comparison",
    "Compute",
    "Conditions",
    "Engine",
    "EngineTime",
    "Fabric",
    "Hop",
    "Result",
    "Timeline",
    "TrainingStep",
    "candidates",
    "compare",
    "engine",
    "fitted",
    "least_time",
    "simulate",
    "sweep",
    "to_chrome",
    "train",
]

__getattr__ = old_names(__name__, {"Codec": "CodecModel"})
