"""Measurements: what links cost here, and which algorithm is fastest at which size.

fit         latency and bandwidth from measured times, in pieces, with their errors
measure     times that all ranks of a communicator measure together
candidates  those of the one list that differ in what they do
price       what each would take, from the fits
race        which candidates are tried and raced, and which wins
tuner       the candidates near the best are raced; the winners make the table
files       the table on disk; `runtime/plan/tuned.py` reads it
this        this machine as a topology, with the links that were measured
nccl_logs   tables that nccl-tests has printed, read back
measured    such tables, fitted: an engine for the simulator

`unisono tune` starts its own ranks. On a cluster, start it as any other
program: `unisono run --hosts a:4,b:4 -m unisono.tune`.
"""

from unisono.deprecation import old_names
from unisono.tune.candidates import candidates
from unisono.tune.files import save
from unisono.tune.fit import Fit, FitSegment, fit
from unisono.tune.measured import fit_logs
from unisono.tune.nccl_logs import LogRun, read_log
from unisono.tune.price import LinkCosts
from unisono.tune.this import this_machine, topology_named
from unisono.tune.tuner import QUICK, Effort, Tuner, tune

__all__ = [
    "QUICK",
    "Effort",
    "Fit",
    "FitSegment",
    "LinkCosts",
    "LogRun",
    "Tuner",
    "candidates",
    "fit",
    "fit_logs",
    "read_log",
    "save",
    "this_machine",
    "topology_named",
    "tune",
]

__getattr__ = old_names(__name__, {"Piece": "FitSegment", "Costs": "LinkCosts"})
