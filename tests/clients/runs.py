"""What is run: other people's programs, and scripts as their users write them."""

from dataclasses import dataclass, replace
from pathlib import Path

from clients.snippets import snippets

SCRIPTS = Path(__file__).parent / "scripts"
ACCELERATE = ("test_script", "test_ops", "test_sync")
"""Of accelerate's own; the others need a GPU or a download, or hang on gloo."""


ON_CUDA = {
    "Accelerator(cpu=True)": "Accelerator()",
    "use_cpu=True, ": "",
    'accelerator="cpu", devices=2': 'accelerator="gpu", devices=1, num_nodes=2',
    "x = torch.randn(8, 10)\n": "x = torch.randn(8, 10).to(engine.device)\n",
}
"""What users write for a GPU in the place of what the page has for a CPU."""
NOT_ON_CUDA = ("Ray", "torchtitan", "torchrun")
"""How clients are called that want a GPU for each rank, or do nothing with tensors."""


@dataclass(frozen=True)
class Client:
    """One row of the table: commands that must all end well on either backend."""

    name: str
    needs: tuple[str, ...]
    commands: tuple[str, ...]
    files: tuple[tuple[str, str], ...] = ()  # to be written first, with their text


def torchrun(ranks, program, options=""):
    options = f"--standalone --nproc-per-node {ranks} {options}"
    return f"torchrun {options.strip()} {program}"


def on_cuda(client):
    """The client for ranks that share a GPU; None if there is none."""
    if client.name.startswith(NOT_ON_CUDA):
        return None
    files = tuple((file, replaced(code)) for file, code in client.files)
    return replace(client, files=files)


def replaced(code):
    for old, new in ON_CUDA.items():
        code = code.replace(old, new)
    return code


def clients():
    """All of them."""
    found = [
        Client(
            f"accelerate's `{name}`",
            ("accelerate",),
            (torchrun(2, f"-m accelerate.test_utils.scripts.{name}"),),
        )
        for name in ACCELERATE
    ]
    names = {
        "accelerate_ddp.py": "Accelerate, as below",
        "trainer.py": "HF Trainer, as below",
        "lightning_ddp.py": "Lightning, as below",
        "deepspeed_zero.py": "DeepSpeed ZeRO, as below",
        "ray_train.py": "Ray Train, as below",
    }
    for file, snippet in snippets().items():
        found.append(
            Client(
                names[file],
                tuple(set(snippet.imports) - {"torch"}),
                (snippet.command,),
                ((file, snippet.code),),
            )
        )
    phases = [
        torchrun(ranks, f"{SCRIPTS / 'checkpoint.py'} saved {phase} {ranks}")
        for phase, ranks in enumerate((4, 2, 3))
    ]
    found += [
        Client(
            "torchmetrics",
            ("torchmetrics",),
            (torchrun(2, SCRIPTS / "metrics.py"),),
        ),
        Client("DCP of FSDP2: 4, then 2, then 3 ranks", (), tuple(phases)),
        Client(
            "torchrun `--max-restarts`, a worker killed",
            (),
            (torchrun(2, SCRIPTS / "restarts.py", "--max-restarts 1"),),
        ),
    ]
    found += [
        Client(
            f"torchtitan's debug model, {name}",
            ("torchtitan",),
            (torchrun(2, f"{SCRIPTS / 'titan.py'} {kind}"),),
        )
        for kind, name in (("fsdp", "FSDP"), ("tensor", "tensor parallel"))
    ]
    return found
