"""Options of `unisono run` as torchrun, mpirun and accelerate spell them.

They are translated before anything is parsed, so that help has one name for each.
"""

from __future__ import annotations

from unisono.errors import BadArgument

_SAME = {
    "-np": "--np",
    "--nproc": "--ranks",
    "--nproc-per-node": "--ranks",
    "--num-processes": "--np",
    "--num-machines": "--nnodes",
    "--machine-rank": "--node-rank",
    "--main-process-ip": "--master-addr",
    "--main-process-port": "--master-port",
    "-hostfile": "--hostfile",
    "--machinefile": "--hostfile",
    "-machinefile": "--hostfile",
    "-H": "--hosts",
    "-host": "--hosts",
    "--host": "--hosts",
    "-wdir": "--chdir",
    "--wdir": "--chdir",
    "-tag-output": "--tag-output",
    "--timestamp-output": "--timestamps",
    "-timestamp-output": "--timestamps",
    "-bind-to": "--bind-to",
    "--config-file": "--config",
}
_NOT_NEEDED = ("--standalone", "--allow-run-as-root", "--oversubscribe")
_INSTEAD = {
    "--rdzv": "ranks find each other without it; for several hosts give --hosts, or "
    "--nnodes, --node-rank and --master-addr on each",
    "--map-by": "ranks are placed host by host; give their numbers, as --hosts a:2,b:2",
    "--redirects": "give --log-dir",
    "--tee": "give --log-dir: what ranks print is shown, and written there",
    "--mixed-precision": "this is a matter of the script",
}


def our_spelling(word: str) -> str:
    """An option in the spelling of `run`; empty if there is nothing to say."""
    option, equals, value = word.partition("=")
    if option.startswith("--"):
        option = option.replace("_", "-")
    for foreign, instead in _INSTEAD.items():
        if option.startswith(foreign):
            raise BadArgument(f"{option}: not an option of unisono run; {instead}")
    if option in _NOT_NEEDED:
        return ""
    return _SAME.get(option, option) + equals + value


def ranks_by_word(text: str) -> str:
    """The number of ranks, for which torchrun has words, too: `auto` is our default."""
    if text == "gpu":
        raise BadArgument("-n gpu: expected a number of ranks, as in -n 8")
    return "" if text in ("auto", "cpu") else text
