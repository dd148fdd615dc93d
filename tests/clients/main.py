"""Runs each client on gloo and on unisono, and writes a table of both.

Scripts of the documentation name unisono; for gloo that word is changed. The others ask
for gloo or for nothing, and get unisono by UNISONO_TORCH_REPLACES.

With `--device cuda` unisono's ranks share one GPU, beside gloo's on the CPU: each is
started as a node of its own, so that its local rank, and so its GPU, is 0.
"""

import argparse
import importlib.util
import math
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from clients.runs import clients, on_cuda
from clients.snippets import PAGE

BUILD = Path(__file__).parents[2] / "build" / "clients"
BEGIN, END = "<!-- clients: begin -->\n", "<!-- clients: end -->\n"
RESULTS = ("result", "loss", "weights")
ENDING_S = 60.0
LINES = 40  # of what a client wrote, if it failed
TOLERANCE = 1e-4  # of float32 that was summed in another order


@dataclass
class Outcome:
    status: int | None  # None: it has not ended
    seconds: float
    numbers: list[float]
    text: str

    def __str__(self):
        if self.status is None:
            return "hangs"
        return f"{self.seconds:.0f} s" if self.ok else "fails"

    @property
    def ok(self):
        return self.status == 0


def main():
    options = arguments()
    BUILD.mkdir(parents=True, exist_ok=True)
    rows, bad = [], []
    for client in clients():
        if options.only and options.only not in client.name:
            continue
        if lacking := [n for n in client.needs if not importlib.util.find_spec(n)]:
            print(f"{client.name}: not run, {', '.join(lacking)} is not installed")
            continue
        if options.device == "cuda" and on_cuda(client) is None:
            continue
        ends = {
            "gloo": run(client, "gloo", options.limit),
            "unisono": run(client, "unisono", options.limit, options.device),
        }
        same = agree(ends["gloo"], ends["unisono"])
        row = f"| {client.name} | {ends['gloo']} | {ends['unisono']} | {same} |"
        print(row, flush=True)
        rows.append(row)
        if not ends["unisono"].ok or same == "no":
            bad.append(client.name)
            print("\n".join(ends["unisono"].text.splitlines()[-LINES:]), flush=True)
    if options.write:
        write(rows)
    print(f"{len(rows)} clients, {len(bad)} failed" + "".join(f"; {n}" for n in bad))
    return bool(bad)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="those whose name has this in it")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for each")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--write", action="store_true", help=f"the table into {PAGE}")
    return parser.parse_args()


def run(client, backend, limit_s, device="cpu"):
    """All commands of one client in a folder of its own."""
    begun, output = time.monotonic(), ""
    if device == "cuda":
        client = on_cuda(client)
    env = environment(backend, device)
    with tempfile.TemporaryDirectory(dir=BUILD) as folder:
        for file, code in client.files:
            text = code.replace('"unisono"', f'"{backend}"')
            (Path(folder) / file).write_text(text)
        for command in client.commands:
            status, written = execute(launches(command, device), folder, env, limit_s)
            output += written
            if status != 0:
                break
    found = [line.split()[1:] for line in output.splitlines() if is_result(line)]
    numbers = [float(word) for words in found for word in words]
    return Outcome(status, time.monotonic() - begun, numbers, output)


def launches(command, device):
    """The processes of a command: one, or for ranks that share a GPU one for each."""
    words = shlex.split(command)
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    if device == "cpu":
        start = [sys.executable] if words[0] == "python" else torchrun
        return [[*start, *words[1:]]]
    ranks, program = "2", words[1:]
    if words[0] == "torchrun":
        ranks, program = words[3], words[4:]
    nodes = ["--nnodes", ranks, "--nproc-per-node", "1", "--master-port", free_port()]
    return [
        [*torchrun, *nodes, "--node-rank", str(rank), *program]
        for rank in range(int(ranks))
    ]


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as made:
        return str(made.getsockname()[1])


def execute(commands, folder, env, limit_s):
    """The worst status of all, None if one hangs, and what the first one wrote."""
    until = time.monotonic() + limit_s
    with tempfile.TemporaryFile("w+") as file:
        processes = [
            subprocess.Popen(
                words,
                cwd=folder,
                env=env,
                stdout=file if number == 0 else subprocess.DEVNULL,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            for number, words in enumerate(commands)
        ]
        ends = [ended(process, until) for process in processes]
        status = None if None in ends else max(ends, key=abs)
        file.seek(0)
        return status, file.read()


def ended(process, until):
    """Its status; None if it had to be ended."""
    try:
        return process.wait(max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        end(process)
        return None


def end(process):
    """End one that hangs; torchrun ends its workers, which have their own sessions."""
    process.terminate()
    try:
        process.wait(ENDING_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def environment(backend, device="cpu"):
    """Nothing is fetched, nothing is left in the user's home, all is on loopback."""
    env = os.environ | {
        "HOME": str(BUILD / "home"),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "DS_ACCELERATOR": device,
        "CLIENT_DEVICE": device,
        "TORCH_EXTENSIONS_DIR": str(BUILD / "extensions"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300",
        "PYTHONWARNINGS": "ignore",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    if device == "cpu":
        env |= {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    (BUILD / "home").mkdir(exist_ok=True)
    env.pop("UNISONO_TORCH_REPLACES", None)
    if backend == "unisono":
        env["UNISONO_TORCH_REPLACES"] = "gloo" if device == "cpu" else "nccl"
    return env


def is_result(line):
    return line.startswith(tuple(f"{word} " for word in RESULTS))


def agree(one, other):
    """Whether both have printed the same numbers; a dash if they print none."""
    if not one.ok or not other.ok or not (one.numbers or other.numbers):
        return "–"
    pairs = zip(one.numbers, other.numbers, strict=False)
    close = all(math.isclose(a, b, rel_tol=TOLERANCE) for a, b in pairs)
    return "yes" if close and len(one.numbers) == len(other.numbers) else "no"


def write(rows):
    """The table in the place of the one before."""
    text = PAGE.read_text()
    head = text[: text.index(BEGIN) + len(BEGIN)]
    tail = text[text.index(END) :]
    title = "| client | gloo | unisono | same result |\n|---|---|---|---|\n"
    PAGE.write_text(head + title + "".join(f"{row}\n" for row in rows) + tail)
