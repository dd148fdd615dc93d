"""Other libraries, as models: what their calls take, without their schedules.

engine     the constants of a library, and the quickest of its paths
paths      the algorithms: how many steps, how many bytes
fabric     a machine as a library sees it
measured   an engine that is nothing but measured times, from `unisono fit`
"""

from unisono.simulate.engines.engine import (
    ENGINES,
    Calibration,
    Engine,
    EngineTime,
    engine,
    modelled,
)
from unisono.simulate.engines.fabric import Fabric
from unisono.simulate.engines.measured import MeasuredCalls, MeasuredEngine

__all__ = [
    "ENGINES",
    "Calibration",
    "Engine",
    "EngineTime",
    "Fabric",
    "MeasuredCalls",
    "MeasuredEngine",
    "engine",
    "modelled",
]
