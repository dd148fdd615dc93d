"""The example that trains with every strategy: the losses are the same."""

import copy
import importlib.util
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

FILE = Path(__file__).parents[2] / "examples" / "train_gpt.py"
STEPS = 3


def load():
    spec = importlib.util.spec_from_file_location("train_gpt", FILE)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


EXAMPLE = load()
TEXT = EXAMPLE.Text("many voices, one result; " * 40)
torch.manual_seed(0)
NET = EXAMPLE.gpt(TEXT.words)
_COPYING = threading.Lock()


def run(comm, strategy, codec=None):
    with _COPYING:
        net = copy.deepcopy(NET)
    options = SimpleNamespace(strategy=strategy, steps=STEPS, codec=codec, device="cpu")
    return EXAMPLE.train(comm, net, TEXT, options)


@pytest.fixture(scope="module")
def alone():
    """Losses of one process, without any strategy."""
    net = copy.deepcopy(NET)
    optimizer = EXAMPLE.adam(net.parameters())
    losses = []
    for number in range(STEPS):
        x, y = TEXT.batch(number)
        optimizer.zero_grad()
        loss = EXAMPLE.loss_of(net(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.quick(strategy=["ddp", "fsdp", "tensor"])
@pytest.mark.parametrize("strategy", [s for s in EXAMPLE.STRATEGIES if s != "experts"])
def test_every_strategy_has_the_losses_of_one_process(threads, strategy, alone, capsys):
    for found in threads(2, run, strategy):
        assert found == pytest.approx(alone, rel=1e-4)
    out = capsys.readouterr().out
    assert f"{STEPS}/{STEPS}  loss" in out
    assert "of the time in communication" in out


@pytest.mark.quick(strategy=["fsdp"])
@pytest.mark.parametrize(
    ("strategy", "codec"), [("ddp", "topk:0.1"), ("fsdp", "fp8"), ("zero3", "int8")]
)
def test_training_with_codecs_lowers_the_loss(threads, strategy, codec, alone):
    one, other = threads(2, run, strategy, codec)
    assert one == other
    assert one[0] == pytest.approx(alone[0], rel=0.01)  # parameters may be in codes
    assert one[-1] < 0.9 * one[0]


def test_training_with_experts_lowers_the_loss(threads):
    one, other = threads(2, run, "experts")
    assert one == other
    assert one[-1] < one[0]
