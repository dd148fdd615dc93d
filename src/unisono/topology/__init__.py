"""WHERE it moves: ranks, switches, and the links between them.

topology   what a topology is: nodes, directed links, the way from rank to rank
presets    regular shapes: ring, full, switch, torus, fat-tree, dragonfly
clusters   machines: dgx-h100, cloud, wan
routing    the quickest path in any graph, and around failed links
files      a user's own, as TOML
detect     this machine

`parse("dgx-h100:128")` is the way in; it takes the path of a file as well.
"""

from unisono.topology.detect import detect
from unisono.topology.files import load
from unisono.topology.parse import PRESETS, parse
from unisono.topology.topology import Links, Topology, Wiring

__all__ = ["PRESETS", "Links", "Topology", "Wiring", "detect", "load", "parse"]
