"""What codecs do to training: the small GPT of the examples on 4 ranks, loss by loss.

    python benchmarks/convergence.py                       all runs, and the picture
    python benchmarks/convergence.py fp8 topk --steps 20   some of them
    python benchmarks/convergence.py --draw                only the picture, anew

Every run begins with the same weights and sees the same batches, so what differs is the
codec; how much the beginning alone matters is seen from an uncompressed run that begins
elsewhere. They learn the licence, which does not change as the project does; `final` is
the mean loss over its last tenth, which no run is trained on. Results are kept run by
run, in results/convergence.json; another number of steps begins it anew. Ranks are
threads: this is about losses, not about time.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from unisono.cli._plot import pyplot, save, style
from unisono.parallel import DDP
from unisono.runtime.communicator import Communicator
from unisono.testing import world

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "convergence.json"
PICTURE = HERE.parent / "docs" / "convergence.svg"
TEXT = HERE.parent / "LICENSE"
RANKS, UNSEEN = 4, 10


def example() -> Any:
    """examples/train_gpt.py as a module."""
    file = HERE.parent / "examples" / "train_gpt.py"
    spec = importlib.util.spec_from_file_location("train_gpt", file)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


GPT = example()


def ddp(net: Any, comm: Communicator, codec: Any = None) -> Any:
    """A step of DDP with this codec, and Adam."""
    model = DDP(net, comm, codec=codec)
    return GPT.stepping(model, GPT.adam(model.parameters()), comm, GPT.rows(comm))


def with_momentum(net: Any, comm: Communicator, codec: Any = None) -> Any:
    """The same with SGD; top-k has its momentum in the feedback."""
    model = DDP(net, comm, codec=codec)
    momentum = 0.0 if codec else 0.9
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    return GPT.stepping(model, optimizer, comm, GPT.rows(comm))


# name: how a step is made, and the seed of the weights
RUNS: dict[str, tuple[Any, int]] = {
    "uncompressed": (ddp, 0),
    "uncompressed, seed 1": (ddp, 1),
    "fp8": (partial(ddp, codec="fp8"), 0),
    "int8": (partial(ddp, codec="int8"), 0),
    "topk": (partial(ddp, codec="topk:0.01,warmup=75"), 0),
    "powersgd": (partial(ddp, codec="powersgd:4"), 0),
    "onebit": (partial(ddp, codec="onebit"), 0),
    "1-bit Adam": (partial(GPT.onebit_adam, warmup=50), 0),
    "SGD": (with_momentum, 0),
    "SGD, topk": (partial(with_momentum, codec="topk:0.01,momentum=0.9"), 0),
}


def parted() -> tuple[Any, Any]:
    """The text to learn, and the rest of it, in the same letters."""
    text = GPT.Text(TEXT.read_text(encoding="utf-8"))
    rest, cut = copy.copy(text), len(text._all) * 9 // 10
    text._all, rest._all = text._all[:cut], text._all[cut:]
    return text, rest


def trained(name: str, text: Any, rest: Any, steps: int) -> dict[str, Any]:
    """The losses of a run, what it ends at, and what a rank sends in its last step."""
    make, seed = RUNS[name]
    torch.manual_seed(seed)
    nets = [GPT.gpt(text.words)]
    nets += [copy.deepcopy(nets[0]) for _ in range(RANKS - 1)]

    def run(comm: Communicator) -> tuple[list[float], int]:
        step, losses, sent = make(nets[comm.rank], comm), [], 0
        for number in range(steps):
            before = comm.sent_bytes
            losses.append(step(*text.batch(number)))
            sent = comm.sent_bytes - before
        return losses, sent

    begun = time.perf_counter()
    with world(RANKS) as ranks:
        losses, sent = ranks.run(run)[0]
    alike(nets)
    return {
        "final": unseen(nets[0], rest),
        "sent_bytes": sent,
        "seconds": round(time.perf_counter() - begun, 1),
        "losses": [round(loss, 5) for loss in losses],
    }


def alike(nets: list[Any]) -> None:
    """Raise if the ranks' weights differ in a single bit."""
    for net in nets[1:]:
        for mine, first in zip(net.parameters(), nets[0].parameters(), strict=True):
            if not torch.equal(mine, first):
                raise SystemExit("ranks have different weights")


@torch.no_grad()
def unseen(net: Any, rest: Any) -> float:
    """The mean loss over batches of what was not trained on."""
    losses = []
    for number in range(UNSEEN):
        x, y = rest.batch(number)
        losses.append(float(GPT.loss_of(net(x), y)))
    return round(sum(losses) / len(losses), 5)


def written(kept: dict[str, Any]) -> str:
    """As JSON, a line for each run."""
    runs = (f"  {json.dumps(n)}: {json.dumps(r)}" for n, r in kept["runs"].items())
    head = (
        f" {json.dumps(k)}: {json.dumps(v)},\n" for k, v in kept.items() if k != "runs"
    )
    return "{\n" + "".join(head) + ' "runs": {\n' + ",\n".join(runs) + "\n }\n}\n"


def draw(kept: dict[str, Any]) -> None:
    """The curves, each smoothed over 10 steps."""
    figure, axes = pyplot("convergence").subplots(1, 2, figsize=(11, 4.5), sharey=True)
    for name, run in kept["runs"].items():
        losses = torch.tensor(run["losses"])
        smooth = losses.unfold(0, 10, 1).mean(1)
        panel, other = axes[int("SGD" in name)], "seed" in name
        grey = {"color": "lightgrey"} if other else {}
        label = f"{name}: {run['final']:.3f}"
        panel.plot(range(10, len(losses) + 1), smooth, label=label, lw=1.2, **grey)
    for panel, title in zip(axes, ("Adam", "SGD with momentum"), strict=True):
        style(panel, xlabel="step", title=f"{title}, {kept['ranks']} ranks")
        panel.legend(fontsize=8, title="final loss, unseen text")
    axes[0].set_ylabel("loss")
    save(figure, PICTURE)


def main() -> None:
    """Run what is asked for, and keep it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="RUN", help=", ".join(RUNS))
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--draw", action="store_true", help="only draw what is kept")
    args = parser.parse_args()
    if unknown := [name for name in args.names if name not in RUNS]:
        parser.error(f"no run is called {unknown[0]!r}; there are {', '.join(RUNS)}")
    torch.set_num_threads(1)
    text, rest = parted()
    head = {"ranks": RANKS, "steps": args.steps}
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if not args.draw:
        if {key: kept.get(key) for key in head} != head:
            kept = head | {"runs": {}}
        for name in args.names or RUNS:
            kept["runs"][name] = found = trained(name, text, rest, args.steps)
            kept["runs"] = {n: kept["runs"][n] for n in RUNS if n in kept["runs"]}
            RESULTS.write_text(written(kept), encoding="utf-8")
            line = f"{name}: final {found['final']:.4f}, sent {found['sent_bytes']:,}"
            print(f"{line} bytes in a step, {found['seconds']} s", flush=True)
    draw(kept)


if __name__ == "__main__":
    main()
