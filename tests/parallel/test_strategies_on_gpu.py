"""Strategies on a GPU that the ranks share: what they do on the CPU.

`make gpu-test` runs these. The ranks are processes, each of which moves the nets and
batches of the other tests to the GPU.
"""

import os

import nets
import pytest
import test_compression
import test_losses
import test_memory
import test_scaling
import test_torch_compile
import torch

ON_GPU = os.environ.get("UNISONO_GPU_TESTS") == "1"
pytestmark = pytest.mark.skipif(not ON_GPU, reason="there is no GPU")
N = 2
USES = [(name, use) for name, uses in test_losses.USES.items() for use in uses]


def move_to_gpu():
    torch.cuda.set_device(0)
    nets.move_to("cuda")


def losses(rank, dtype):
    """Of every strategy in every use, by its name."""
    move_to_gpu()
    with rank.init(timeout_s=200) as comm:
        of = getattr(torch, dtype)
        return {
            f"{name} {use}": test_losses.train(comm, name, use, of)
            for name, use in USES
        }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_losses_of_20_steps_are_those_of_one_process_on_the_cpu(processes, dtype):
    of = getattr(torch, dtype)
    for rank, found in enumerate(processes(N, losses, dtype)):
        for name, use in USES:
            passes, clips = test_losses.passes_of(use), use == "clipping"
            right = test_losses.alone(N, of, passes, clips)
            wanted = pytest.approx(
                [step[rank] for step in right], rel=test_losses.LIMITS[of]
            )
            assert found[f"{name} {use}"] == wanted, f"{name}, {use}"


def scales(rank, name, first):
    """The scale after each step, and whether it changed the weights."""
    move_to_gpu()
    with rank.init(timeout_s=100) as comm:
        run = test_scaling.Sharded(comm, name)
        history, state = test_scaling.learn(comm, run, first)
        return history, sum(x.double().sum().item() for x in state.values())


@pytest.mark.parametrize("first", ["unscale_", "step"])
@pytest.mark.parametrize("name", ["fsdp", "fused", "zero1", "zero2", "zero3"])
def test_all_ranks_skip_if_one_has_an_overflow_on_the_gpu(processes, name, first):
    found = processes(N, scales, name, first)
    for history, total in found:
        assert [tuple(step) for step in history] == test_scaling.RIGHT
        assert total == found[0][1]


def compiled(rank, name):
    move_to_gpu()
    return test_torch_compile.compared(rank, name, "mlp", "aot_eager")


@pytest.mark.parametrize("name", ["ddp", "fsdp", "zero2"])
def test_compiled_strategy_has_the_losses_on_the_gpu(processes, name):
    test_torch_compile.check(processes(N, compiled, name))


def allocated(rank, name):
    """Bytes that torch has on the GPU after three steps."""
    torch.cuda.set_device(0)
    width = 1024
    with rank.init(timeout_s=100) as comm:
        x = torch.ones(1, width, device="cuda")
        weight = torch.ones(width, width, device="cuda", requires_grad=True)
        (x @ weight).sum().backward()  # cuBLAS has memory of its own for each thread
        del weight
        before = torch.cuda.memory_allocated()
        net = test_memory.Net(width).cuda()
        model, opt = test_memory.strategy(name, net, comm, 4 * width * width)
        for _ in range(3):
            opt.zero_grad()
            model(x).sum().backward()
            opt.step()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated() - before


@pytest.mark.parametrize("name", test_memory.FORMULAS)
def test_memory_of_the_gpu_is_that_of_the_formula(processes, name):
    layer = 4 * 1024 * 1024
    for rank, found in enumerate(processes(N, allocated, name)):
        right = test_memory.formula(name, rank) * layer
        # Buckets come from torch's allocator, or are the communicator's own.
        assert found <= 1.05 * right


def coded_step(rank):
    move_to_gpu()
    with rank.init(timeout_s=100) as comm:
        sent, _, grad = test_compression.fsdp_step(comm, test_compression.FSDP_CODECS)
        return sent, grad.tolist()


def test_fsdp_with_codecs_on_the_gpu(processes, threads):
    """As on the CPU, but for the order of sums in a matrix product."""

    def right(comm):
        sent, _, grad = test_compression.fsdp_step(comm, test_compression.FSDP_CODECS)
        return sent, grad

    for (sent, found), (bytes_, grad) in zip(
        processes(N, coded_step), threads(N, right), strict=True
    ):
        assert sent == bytes_
        error = torch.tensor(found) - grad
        assert error.norm() < 0.01 * grad.norm()
