"""Memory and traffic of strategies, by formula, without ranks: `unisono plan`.

strategies   one strategy on n ranks
meshes       several strategies on the axes of a mesh
"""

from unisono.parallel.estimate.meshes import Axes, best_mesh, idle, on_mesh
from unisono.parallel.estimate.strategies import (
    Estimate,
    Setting,
    estimates,
    first_that_fits,
    the_other_way,
)

__all__ = [
    "Axes",
    "Estimate",
    "Setting",
    "best_mesh",
    "estimates",
    "first_that_fits",
    "idle",
    "on_mesh",
    "the_other_way",
]
