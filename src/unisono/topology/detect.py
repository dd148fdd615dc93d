"""This machine, read from the kernel's files: cores, caches, NUMA, cards, GPUs.

Nothing is measured here. Bandwidths of the topology that follows are rough defaults by
kind of link (memory inside a NUMA node, memory across, what a card claims); `unisono
tune` measures them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from unisono.schedule.collective import Ints
from unisono.topology.topology import LinkBundle, Topology, Wiring, lay, padded

MEMORY = 10e9
ACROSS = 6e9


@dataclass(frozen=True)
class NetworkCard:
    """A network card: its name, what it claims, and the NUMA node it hangs on."""

    name: str
    megabits: int
    numa: int


@dataclass(frozen=True)
class Gpu:
    """A GPU: its name, and how many NVLinks are up with how many bytes per second."""

    name: str
    nvlinks: int
    nvlink_bandwidth: float


@dataclass(frozen=True)
class Machine:
    """What there is: cores by NUMA node, caches by level, cards and GPUs."""

    model: str
    numa: list[list[int]]
    caches: dict[str, str]
    cards: list[NetworkCard]
    gpus: list[Gpu]

    @property
    def cores(self) -> int:
        """How many cores this process may use."""
        return sum(len(cores) for cores in self.numa)

    def as_dict(self) -> dict[str, object]:
        """Plain data, for JSON."""
        return asdict(self) | {"cores": self.cores}

    def topology(
        self, latency: float = 0.0, bandwidth: float = 0.0, reduce: float = 0.0
    ) -> Topology:
        """A rank on each core; memory of a NUMA node is a switch, linked to others.

        The latency and bandwidth of a message to the switch can be given if they were
        measured; otherwise they are defaults.
        """
        measured = bool(latency or bandwidth)
        late, rate = (latency, bandwidth or MEMORY) if measured else (0.1e-6, MEMORY)
        n, nodes = self.cores, len(self.numa)
        home = np.repeat(np.arange(nodes), [len(cores) for cores in self.numa])

        def route(src: Ints, dst: Ints) -> Ints:
            a, b = home[src], home[dst]
            far = np.where(a == b, -1, 2 * n + a * (nodes - 1) + b - (b > a))
            return np.where((src == dst)[..., None], -1, padded([src, far, n + dst]))

        def wire() -> Wiring:
            rank, hub = np.arange(n), n + home
            a = np.repeat(np.arange(nodes), nodes - 1)
            place = np.tile(np.arange(nodes - 1), nodes)
            b = place + (place >= a)
            cables = [
                LinkBundle("memory", rank, hub, late, rate),
                LinkBundle("memory", hub, rank, late, rate),
                LinkBundle("numa", n + a, n + b, 0.2e-6, min(rate, ACROSS)),
            ]
            level = np.concatenate([home, np.arange(nodes)])
            parts = (("numa", nodes),)
            return Wiring(n, lay(cables), route, parts, (("numa", level),))

        about = f"{self.model}; bandwidths are defaults, not measured"
        adding = reduce if measured else 1 / 20e9
        return Topology(
            "this", n, wire, 0.0 if measured else 0.5e-6, adding, about=about
        )


def detect(root: Path = Path("/")) -> Machine:
    """Read this machine, or the files of another below `root`."""
    return Machine(
        model(root), numa_nodes(root), _caches(root), _cards(root), _gpus(root)
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def model(root: Path = Path("/")) -> str:
    """The name of the processor, as the kernel gives it."""
    match = re.search(r"(?m)^model name\s*:\s*(.+)$", _text(root / "proc/cpuinfo"))
    return match[1] if match else "unknown processor"


def numa_nodes(root: Path = Path("/")) -> list[list[int]]:
    """The cores of each NUMA node; of this machine, those we may use."""
    ours = root == Path("/")
    allowed = os.sched_getaffinity(0) if ours else None
    folders = sorted((root / "sys/devices/system/node").glob("node[0-9]*"))
    nodes = [_ranges(_text(folder / "cpulist")) for folder in folders]
    if allowed is not None:
        nodes = [[core for core in node if core in allowed] for node in nodes]
    nodes = [node for node in nodes if node]
    if nodes:
        return nodes
    online = _ranges(_text(root / "sys/devices/system/cpu/online"))
    return [sorted(allowed) if allowed else online or [0]]


def _ranges(text: str) -> list[int]:
    """The numbers that "0-3,8" lists."""
    numbers: list[int] = []
    for low, high in re.findall(r"(\d+)(?:-(\d+))?", text):
        numbers.extend(range(int(low), int(high or low) + 1))
    return numbers


def _caches(root: Path) -> dict[str, str]:
    """The caches of the first core, as {"L2": "2048K"}; data where there are two."""
    caches = {}
    cache = root / "sys/devices/system/cpu/cpu0/cache"
    for folder in sorted(cache.glob("index*")):
        if _text(folder / "type") != "Instruction":
            caches[f"L{_text(folder / 'level')}"] = _text(folder / "size")
    return caches


def _cards(root: Path) -> list[NetworkCard]:
    """Network cards that are hardware; virtual ones have no device behind them."""
    cards = []
    for folder in sorted((root / "sys/class/net").glob("*")):
        if not (folder / "device").exists():
            continue
        speed, node = _text(folder / "speed"), _text(folder / "device/numa_node")
        megabits = int(speed) if re.fullmatch(r"[0-9]+", speed) else 0
        place = int(node) if re.fullmatch(r"-?[0-9]+", node) else -1
        cards.append(NetworkCard(folder.name, megabits, place))
    return cards


def _gpus(root: Path) -> list[Gpu]:
    """NVIDIA's, from the driver's files; their NVLinks, if nvidia-smi is there."""
    files = sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))
    names = re.findall(r"(?m)^Model:\s*(.+)$", "\n".join(map(_text, files)))
    nvlinks = _nvlinks() if names and root == Path("/") else []
    nvlinks += [(0, 0.0)] * (len(names) - len(nvlinks))
    return [Gpu(name, *links) for name, links in zip(names, nvlinks, strict=False)]


def _nvlinks() -> list[tuple[int, float]]:
    if shutil.which("nvidia-smi") is None:
        return []
    try:
        done = subprocess.run(
            ["nvidia-smi", "nvlink", "--status"],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return links_in(done.stdout)


def links_in(status: str) -> list[tuple[int, float]]:
    """How many links each GPU has up, and their bytes per second together."""
    links = []
    for block in re.split(r"(?m)^GPU \d+:", status)[1:]:
        rates = [float(x) for x in re.findall(r"Link \d+: ([0-9.]+) GB/s", block)]
        links.append((len(rates), sum(rates) * 1e9))
    return links
