"""How to train a model on given ranks: the quickest ways that fit into memory.

space     what is chosen: mesh, ZeRO, recomputing, micro-batches, placement, codec
memory    what a choice needs
network   prices of collectives on a mesh: by closed form, or simulated
cost      passes of a choice, and its step by closed form
played    its step pass by pass, with a pipeline and overlap
api       the search: what fits, then what is quick, then simulated
explain   why the best won
"""

from unisono.search.api import Found, Plan, search
from unisono.search.explain import explain
from unisono.search.space import Choice, Limits

__all__ = ["Choice", "Found", "Limits", "Plan", "explain", "search"]
