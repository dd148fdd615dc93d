"""WHAT moves: collectives as contracts, schedules as data, and everything derived.

collective    who holds which chunk before, and who must hold it after
step          transfers that happen together
protocol      what functions need of a schedule
schedule      a contract and its steps, generated lazily
transform     then, mirror, split, relabel, refine, fold; embed, which they rest on
product       hierarchies
verify        proof by random values; `domains` holds the values
oracle        proof bit by bit, and counter-examples
consistency   same bits on all ranks? how deep are the sums?
cost          rounds, bytes, reductions, and the lower bounds
placement     which rank is on which host
traffic       what leaves and enters each host
dependencies  which transfers must wait for which
notices       a barrier with one notice from rank to rank
files         JSON and npz
"""

from unisono.deprecation import old_names
from unisono.schedule.collective import (
    COLLECTIVES,
    Collective,
    Contract,
    Holders,
    collective,
)
from unisono.schedule.consistency import Consistency
from unisono.schedule.cost import Bound, Cost
from unisono.schedule.dependencies import Dependencies
from unisono.schedule.files import load, save
from unisono.schedule.oracle import check_exactly
from unisono.schedule.product import product
from unisono.schedule.schedule import Schedule, from_steps
from unisono.schedule.step import Step, Transfer, copy_step, reduce_step, together
from unisono.schedule.transform import (
    at_once,
    embed,
    fold,
    mirror,
    phase,
    refine,
    relabel,
    split,
    then,
)
from unisono.schedule.verify import Proof, verify

__all__ = [
    "COLLECTIVES",
    "Bound",
    "Collective",
    "Consistency",
    "Contract",
    "Cost",
    "Dependencies",
    "Holders",
    "Proof",
    "Schedule",
    "Step",
    "Transfer",
    "at_once",
    "check_exactly",
    "collective",
    "copy_step",
    "embed",
    "fold",
    "from_steps",
    "load",
    "mirror",
    "phase",
    "product",
    "reduce_step",
    "refine",
    "relabel",
    "save",
    "split",
    "then",
    "together",
    "verify",
]

__getattr__ = old_names(
    __name__, {"copy": "copy_step", "reduce": "reduce_step", "Place": "Holders"}
)
