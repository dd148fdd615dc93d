"""torch.compile around strategies: the same losses, and no trace of communication."""

import os

import pytest
import torch
import torch._dynamo  # here, once for all ranks
from nets import Gpt, Mlp, batch, loss_of, made, sgd
from torch import nn

from unisono.parallel import DDP, FSDP, Column, Row, ZeRO, parallelize


class Wide(nn.Module):
    """Two layers that two ranks can divide."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


def strategy(name, comm, kind):
    """What is called for forward, and the optimizer."""
    net = made(kind)
    if name.startswith("zero"):
        opt = ZeRO(net, comm, torch.optim.SGD, stage=int(name[-1]), lr=0.05)
        return net, opt
    if name == "tensor":
        net = parallelize(net, comm, {"up": Column(), "down": Row()})
        return net, sgd(net.parameters())
    model = DDP(net, comm) if name == "ddp" else FSDP(net, comm)
    return model, sgd(model.parameters())


def losses(comm, name, kind, backend):
    model, opt = strategy(name, comm, kind)
    call = torch.compile(model, backend=backend) if backend else model
    found = []
    for step in range(4):
        opt.zero_grad()
        x, y = batch(kind, step, 0 if name == "tensor" else comm.rank)
        loss = loss_of(call(x), y)
        loss.backward()
        opt.step()
        found.append(loss.item())
    return found


def compared(rank, name, kind, backend, cache=None):
    """Losses without and with the compiler, its graphs, and what it did not trace."""
    torch.set_num_threads(1)
    if cache is not None:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # without more processes
        # Else it compiles, for minutes, only to know what vectors the CPU has.
        os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "0"
    kind = {"mlp": Mlp, "gpt": Gpt, "wide": Wide}[kind]
    with rank.init(timeout_s=200) as comm:
        plain = losses(comm, name, kind, None)
        counters = torch._dynamo.utils.counters
        counters.clear()
        compiled = losses(comm, name, kind, backend)
    return (
        plain,
        compiled,
        counters["stats"]["unique_graphs"],
        [*counters["graph_break"]],
    )


def check(found):
    for plain, compiled, graphs, breaks in found:
        assert compiled == pytest.approx(plain, rel=1e-5)
        assert graphs >= 1
        # Nothing but what strategies mark: the communicator was never looked into.
        assert all("torch.compiler.disable" in reason for reason in breaks), breaks


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_compiled_strategy_has_the_losses_of_the_plain_one(processes, name):
    check(processes(2, compared, name, "mlp", "eager"))


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ddp", "gpt"),
        ("fsdp", "gpt"),
        ("zero2", "gpt"),
        ("zero3", "gpt"),
        ("tensor", "wide"),
    ],
)
def test_compiled_forward_and_backward_have_the_losses(processes, name, kind):
    check(processes(2, compared, name, kind, "aot_eager"))


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Where inductor keeps what it has compiled: for all ranks and tests, once."""
    return str(tmp_path_factory.mktemp("inductor"))


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["ddp", "fsdp", "zero1", "zero2", "zero3"])
def test_code_of_inductor_has_the_losses(processes, cache, name):
    """With the C++ that inductor writes for the CPU, and g++ compiles."""
    check(processes(2, compared, name, "mlp", "inductor", cache))
