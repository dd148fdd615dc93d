"""What many processes need: time to start, memory, descriptors, small calls.

    python benchmarks/many_ranks.py                  16, 64 and 256 ranks on one host
    python benchmarks/many_ranks.py 64 --per-host 4  the same on pretended hosts

The ranks are started by `unisono run`. "started" is from then until every rank has
initialised; "init" is the slowest rank's `unisono.init` alone. Memory is that of the
slowest: what is private to the process after initialisation, a barrier and a small
all_reduce, less what it was before; and the shared memory it has mapped, each page
divided by the ranks that map it. "group" is the same for a further communicator of all
ranks. Times of calls are medians of twenty; with fewer cores than ranks they are mostly
the time in which the system lets each rank run once.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

WORLDS = (16, 64, 256)
_BEGAN = "MANY_RANKS_BEGAN"
_PER_HOST = "MANY_RANKS_PER_HOST"
_CALLS = 20


def memory() -> tuple[int, int]:
    """Private bytes of this process, and its part of shared memory."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    kib = {name: int(rest.split()[0]) for name, rest in (x.split(":") for x in lines)}
    private = kib["Private_Clean"] + kib["Private_Dirty"] - kib["Private_Hugetlb"]
    shared = kib.get("Pss_Shmem", 0)
    return (private << 10), (shared << 10)


def descriptors() -> int:
    """How many are open here."""
    return len(os.listdir("/proc/self/fd"))


def rank() -> None:
    """One rank; the first prints what the slowest or largest of all has."""
    import numpy as np

    if per_host := int(os.environ.get(_PER_HOST, "0")):
        host = int(os.environ["UNISONO_RANK"]) // per_host
        os.environ["UNISONO_HOST_ID"] = f"host{host}"
    import unisono

    before, files = memory(), descriptors()
    began = time.monotonic()
    comm = unisono.init(timeout_s=300, rendezvous_timeout_s=300)
    now = time.time()
    found = {"init_s": time.monotonic() - began}
    found["started_s"] = now - float(os.environ[_BEGAN])
    x = np.ones(2, np.float32)

    def timed(call: Any) -> float:
        times = []
        for _ in range(_CALLS):
            start = time.monotonic()
            call()
            times.append(time.monotonic() - start)
        return statistics.median(times)

    found["barrier_s"] = timed(comm.barrier)
    found["all_reduce_s"] = timed(lambda: comm.all_reduce(x))
    private, shared = memory()
    found["private_bytes"] = private - before[0]
    found["shared_bytes"] = shared - before[1]
    found["descriptors"] = descriptors() - files
    comm.barrier()
    start = time.monotonic()
    group = comm.duplicate()
    group.barrier()
    found["group_s"] = time.monotonic() - start
    last = memory()
    found["group_private_bytes"] = last[0] - private
    found["group_shared_bytes"] = last[1] - shared
    found["group_descriptors"] = descriptors() - files - found["descriptors"]
    most = comm.all_reduce(np.array(list(found.values())), op="max")
    if comm.rank == 0:
        print(json.dumps(dict(zip(found, most.tolist(), strict=True))), flush=True)
    comm.barrier()
    os._exit(0)  # the exit of so many interpreters is not what is measured


def measured(n: int, per_host: int) -> dict[str, float]:
    """Start a world and return what its first rank printed."""
    env = os.environ | {_BEGAN: str(time.time()), "OMP_NUM_THREADS": "1"}
    env["OPENBLAS_NUM_THREADS"] = "1"
    if per_host:
        from unisono.runtime.world.address import free_port

        env |= {_PER_HOST: str(per_host), "UNISONO_SECRET": secrets.token_hex(32)}
        env["UNISONO_ADDRESS"] = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "unisono", "run", "-n", str(n), "--only", "0"]
    command += [__file__, "--rank"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    lines = [x[x.index("{") :] for x in done.stdout.splitlines() if "{" in x]
    if done.returncode or not lines:
        raise SystemExit(f"{n} ranks: exit code {done.returncode}\n{done.stderr}")
    found: dict[str, float] = json.loads(lines[-1])
    return found


def main() -> None:
    """Measure the worlds and print one line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("worlds", type=int, nargs="*", default=list(WORLDS))
    parser.add_argument("--per-host", type=int, default=0)
    parser.add_argument("--rank", action="store_true")
    options = parser.parse_args()
    if options.rank:
        rank()
    print(
        "ranks  started s  init s  private MiB  shared MiB  descriptors  "
        "barrier ms  all_reduce ms  group: s  private MiB  shared MiB  descriptors"
    )
    for n in options.worlds:
        x = measured(n, options.per_host)
        print(
            f"{n:5}{x['started_s']:11.2f}{x['init_s']:8.2f}"
            f"{x['private_bytes'] / 2**20:13.2f}{x['shared_bytes'] / 2**20:12.2f}"
            f"{x['descriptors']:13.0f}{x['barrier_s'] * 1e3:12.2f}"
            f"{x['all_reduce_s'] * 1e3:15.2f}{x['group_s']:10.2f}"
            f"{x['group_private_bytes'] / 2**20:13.2f}"
            f"{x['group_shared_bytes'] / 2**20:12.2f}{x['group_descriptors']:13.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
