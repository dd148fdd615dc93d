"""Compressed gradients: the same on all ranks; error feedback saved and loaded."""

import numpy as np
import pytest
import torch
from nets import Gpt, Mlp, alone, device, made, same, sgd, train, weights
from torch import nn

from unisono import codecs
from unisono.codecs.options import PowerSGD
from unisono.errors import BadArgument, UsageError
from unisono.parallel import DDP, FSDP, OneBitAdam, ZeRO
from unisono.parallel import load_checkpoint as load
from unisono.parallel import save_checkpoint as save
from unisono.parallel.data import compression
from unisono.testing import world

SMALL = 0.005  # MB: several buckets even for small modules
REMEMBER = ["topk:0.05", "randomk:0.1", "powersgd:2", "onebit", "int4+feedback"]
PLAIN = {"lr": 0.05}


def ddp(comm, codec, kind=Gpt):
    model = DDP(made(kind), comm, bucket_cap_mb=SMALL, codec=codec)
    return model, model, torch.optim.SGD(model.parameters(), **PLAIN)


def zero(comm, codec, kind=Gpt, stage=2):
    model = made(kind)
    optimizer = ZeRO(
        *(model, comm, torch.optim.SGD),
        stage=stage,
        bucket_cap_mb=SMALL,
        codec=codec,
        **PLAIN,
    )
    return model, optimizer, optimizer


@pytest.mark.cases(2)
@pytest.mark.quick(make=[ddp])
@pytest.mark.parametrize("codec", REMEMBER)
@pytest.mark.parametrize("make", [ddp, zero])
def test_training_from_a_saved_state_continues_with_the_same_bits(
    threads, tmp_path, make, codec
):
    """Saved after some steps and loaded by others: as if nothing had happened."""

    def run(comm):
        model, holder, optimizer = make(comm, codec)
        train(comm, model, optimizer, Gpt, steps=3)
        file = tmp_path / f"{comm.rank}"
        save(file, holder.compression.state_dict())
        at = weights(getattr(model, "module", model))
        train(comm, model, optimizer, Gpt, steps=3, first=3)
        right = weights(getattr(model, "module", model))
        model, holder, optimizer = make(comm, codec)
        getattr(model, "module", model).load_state_dict(at)
        train(comm, model, optimizer, Gpt, steps=1)  # something to forget
        getattr(model, "module", model).load_state_dict(at)
        holder.compression.load_state_dict(load(file))
        train(comm, model, optimizer, Gpt, steps=3, first=3)
        same(weights(getattr(model, "module", model)), right)
        return right

    found = threads(3, run)
    for other in found[1:]:
        same(other, found[0])


def test_codec_that_keeps_everything_equals_no_codec(threads):
    """All elements, or all columns: what is left is another order of sums."""
    _, right = alone(Gpt, 2, steps=4)

    def run(comm, codec):
        model = DDP(made(Gpt), comm, codec=codec, bucket_cap_mb=SMALL)
        train(comm, model, sgd(model.parameters()), Gpt, steps=4)
        return weights(model.module)

    for codec in ("topk:1", "randomk:1", "powersgd:1,warmup=9"):
        for found in threads(2, run, codec):
            same(found, right, 1e-5)


def test_zero_stages_1_and_2_compress_alike(threads):
    def run(comm, stage):
        model, _, optimizer = zero(comm, "topk:0.1", stage=stage)
        train(comm, model, optimizer, Gpt, steps=3)
        return weights(model)

    same(threads(2, run, 1)[0], threads(2, run, 2)[0])


def test_codec_function_chooses_for_each_bucket(threads):
    """Large buckets have error feedback, small ones a dense codec; both as objects."""

    def choose(bucket):
        return PowerSGD(1) if bucket.count > 500 else codecs.get("fp16")

    def run(comm):
        model = DDP(made(Gpt), comm, bucket_cap_mb=SMALL, codec=choose)
        train(comm, model, sgd(model.parameters()), Gpt, steps=2)
        state = model.compression.state_dict()
        sizes = {b.number: b.count for b in model._buckets.buckets}
        return state, sizes, weights(model.module)

    (state, sizes, one), (_, _, other) = threads(2, run)
    same(one, other)
    found = {n for n in sizes if f"bucket {n}: residual" in state}
    assert found == {n for n, count in sizes.items() if count > 500}
    assert found


def test_16_bit_gradients_are_compressed(threads):
    """Gradients of 16 bits are compressed in 32 and rounded at the end."""

    def run(comm):
        model = DDP(made(Mlp).to(torch.bfloat16), comm, codec="topk:0.2")
        x = torch.ones(2, 5, dtype=torch.bfloat16)
        model(x * (comm.rank + 1)).sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    one, other = threads(2, run)
    assert one[0].dtype is torch.bfloat16
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    some = torch.cat([grad.flatten() for grad in one])
    assert 0 < some.count_nonzero() < some.numel()


def test_compression_with_uneven_inputs_and_unused_parameters(threads):
    """Who is done sends what still waits; both get the same."""

    def run(comm):
        model = DDP(made(Mlp), comm, codec="topk:0.2", find_unused_parameters=True)
        with model.join():
            train(comm, model, sgd(model.parameters()), Mlp, steps=2 + comm.rank)
        return weights(model.module)

    one, other = threads(2, run)
    same(one, other)


def test_codecs_send_fewer_bytes(threads):
    def run(comm, codec):
        model = DDP(nn.Linear(100, 100, bias=False), comm, codec=codec)
        before = comm.sent_bytes
        model(torch.eye(100) * (1 + comm.rank)).square().sum().backward()
        return comm.sent_bytes - before

    whole, topk, low, signs = (
        threads(4, run, codec)[0]
        for codec in (None, "topk:0.01", "powersgd:1", "onebit")
    )
    assert whole == 2 * 3 * 10_000  # bytes: 2(n-1)/n of 4 each
    assert low == 2 * 3 * 200 * 4 // 2  # small ones are sent to all
    assert signs == 2 * 3 * (2500 // 8 + 1 + 20 * 4)
    assert topk < 16 * 100 + 16 * 4 * 3


@pytest.mark.parametrize("make", [ddp, zero])
@pytest.mark.parametrize("codec", ["fp8", "int8"])
def test_dense_codecs_change_weights_little(threads, make, codec):
    """The same on all ranks, and near to where it goes without."""

    def run(comm, codec):
        model, _, optimizer = make(comm, codec)
        train(comm, model, optimizer, Gpt, steps=5)
        return weights(getattr(model, "module", model))

    right, found = threads(2, run, None), threads(2, run, codec)
    for one in found:
        same(one, found[0])
    moved = lost = 0.0
    for name, begun in made(Gpt).state_dict().items():
        moved += float((right[0][name] - begun).square().sum())
        lost += float((right[0][name] - found[0][name]).square().sum())
    assert 0 < lost < moved * 0.1**2


def square():
    return nn.Linear(64, 64, bias=False)


def fsdp_step(comm, codecs):
    """What was sent, the output, and the gradient of this rank's shard."""
    model = FSDP(made(square), comm, **codecs)
    before, shard = comm.sent_bytes, model.units[0].shard.clone()
    y = model(torch.eye(64, device=device()))
    y.square().sum().backward()
    assert torch.equal(model.units[0].shard, shard)
    return comm.sent_bytes - before, y.detach(), model.units[0].shard_grad.clone()


FSDP_CODECS = {"param_codec": "fp8", "reduce_codec": "fp8"}


def test_fsdp_codecs_keep_shards_exact_and_send_less(threads):
    """Gathered twice and reduced once, each a quarter; shards stay as they were."""
    exact, coded = threads(4, fsdp_step, {}), threads(4, fsdp_step, FSDP_CODECS)
    assert [sent for sent, _, _ in exact] == [3 * 3 * 1024 * 4] * 4
    assert [sent for sent, _, _ in coded] == [3 * 3 * (1024 + 8 * 4)] * 4
    for (_, y, grad), (_, right, right_grad) in zip(coded, exact, strict=True):
        assert torch.equal(y, coded[0][1])
        assert 0 < (y - right).norm() < 0.05 * right.norm()
        assert 0 < (grad - right_grad).norm() < 0.1 * right_grad.norm()


def test_codecs_of_other_devices_work_on_copies(threads, monkeypatch):
    """As on a GPU, whose memory no codec reads: same bits, same bytes sent."""
    right = threads(4, fsdp_step, FSDP_CODECS)
    copied = []
    on_host = compression._on_host
    monkeypatch.setattr(compression, "CPU", torch.device("meta"))
    monkeypatch.setattr(
        compression, "_on_host", lambda *args: copied.append(1) or on_host(*args)
    )
    found = threads(4, fsdp_step, FSDP_CODECS)
    assert len(copied) == 4 * 3
    for (sent, y, grad), (bytes_, right_y, right_grad) in zip(
        found, right, strict=True
    ):
        assert sent == bytes_
        assert torch.equal(y, right_y)
        assert torch.equal(grad, right_grad)


def test_fsdp_codec_at_hosts_encodes_only_between_hosts():
    def run(comm, codec):
        model = FSDP(made(square), comm, reduce_codec=codec)
        model(torch.eye(64)).square().sum().backward()
        return model.units[0].shard_grad.clone()

    with world(4, hosts=(0, 0, 1, 1)) as w:
        exact, coded = w.run(run, None), w.run(run, "fp8@hosts")
    for mine, right in zip(coded, exact, strict=True):
        assert 0 < (mine - right).norm() < 0.1 * right.norm()


def test_zero_stage_3_takes_dense_codecs_only(threads):
    def run(comm):
        model = made(Mlp)
        zero = ZeRO(model, comm, torch.optim.SGD, stage=3, codec="fp8", lr=0.1)
        train(comm, model, zero, Mlp, steps=2)
        assert zero.compression is None
        with pytest.raises(BadArgument, match="ZeRO, stage 3: codec topk:0"):
            ZeRO(made(Mlp), comm, torch.optim.SGD, stage=3, codec="topk:0.1", lr=0.1)
        with pytest.raises(BadArgument, match="unknown codec 'fp9'"):
            FSDP(made(Mlp), comm, param_codec="fp9")

    threads(2, run)


def on_processes(rank):
    torch.set_num_threads(1)
    with rank.init(timeout_s=60) as comm:
        model, _, optimizer = ddp(comm, "topk:0.05")
        train(comm, model, optimizer, Gpt, steps=3)
        return [value.tolist() for value in weights(model.module).values()]


@pytest.mark.sweep
def test_compression_has_the_same_bits_on_processes_and_threads(processes, threads):
    def run(comm):
        model, _, optimizer = ddp(comm, "topk:0.05")
        train(comm, model, optimizer, Gpt, steps=3)
        return [value.tolist() for value in weights(model.module).values()]

    one, other = processes(2, on_processes)
    assert one == other == threads(2, run)[0]


# --- what cannot be


@pytest.mark.parametrize(
    ("codec", "message"),
    [
        ("topk:7", "density = 7.0"),
        ("topk:k=99999", "but there are"),
        ("fq8", "unknown codec 'fq8'"),
        ("fp8:block=33", "block 33"),
        ("powersgd:0", "rank = 0"),
        (0.01, "a float: expected a name"),
    ],
)
def test_unknown_codecs_are_refused(threads, codec, message):
    def run(comm):
        with pytest.raises(BadArgument, match=message):
            DDP(made(Mlp), comm, codec=codec)

    threads(2, run)


def test_gradients_that_are_not_floats_are_refused(threads):
    def run(comm):
        net = made(Mlp).double()
        with pytest.raises(BadArgument, match=r"torch\.float64; expected float32"):
            DDP(net, comm, codec="topk:0.1")
        DDP(net, comm, codec=lambda bucket: None)

    threads(2, run)


def test_error_feedback_of_another_rank_or_codec_is_refused(threads):
    def run(comm):
        one, other = (DDP(made(Mlp), comm, codec=c) for c in ("topk", "powersgd:1"))
        state = one.compression.state_dict()
        with pytest.raises(BadArgument, match=r"expected \[.*use the module, codec"):
            other.compression.load_state_dict(state)
        theirs = dict(state, place=torch.tensor([1 - comm.rank, 2]))
        with pytest.raises(BadArgument, match=f"this is rank {comm.rank} of 2"):
            one.compression.load_state_dict(theirs)
        with pytest.raises(BadArgument, match="'place' is missing"):
            one.compression.load_state_dict(
                {k: v for k, v in state.items() if k != "place"}
            )
        one.compression.load_state_dict(state)

    threads(2, run)


# --- 1-bit Adam

SURE = 1e-4  # so that gradients which are only rounding errors do not count


def onebit(comm, warmup, **options):
    model = made(Gpt)
    return model, OneBitAdam(model, comm, lr=1e-3, warmup=warmup, **options)


def test_onebit_adam_warm_up_equals_adam(threads):
    def adam(params):
        return torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1, eps=SURE)

    _, right = alone(Gpt, 3, steps=5, optimizer=adam)

    def run(comm):
        model, optimizer = onebit(comm, 5, weight_decay=0.1, eps=SURE)
        train(comm, model, optimizer, Gpt, steps=5)
        return weights(model)

    for found in threads(3, run):
        same(found, right, 1e-5)


def test_onebit_adam_sends_signs_after_warm_up(threads):
    """The same on all ranks, a 20th of the bytes, and bit for bit when loaded."""

    def run(comm):
        model, optimizer = onebit(comm, 2)
        sent = []
        for step in range(6):
            before = comm.sent_bytes
            train(comm, model, optimizer, Gpt, steps=1, first=step)
            sent.append(comm.sent_bytes - before)
            if step == 3:
                at, state = weights(model), optimizer.state_dict()
        right = weights(model)
        other, optimizer = onebit(comm, 2)
        other.load_state_dict(at)
        optimizer.load_state_dict(state)
        train(comm, other, optimizer, Gpt, steps=2, first=4)
        same(weights(other), right)
        return right, sent

    (one, sent), (other, _) = threads(2, run)
    same(one, other)
    assert sent[0] == sent[1] > 20 * sent[2]
    assert sent[2] == sent[5]
    for value in one.values():
        assert value.isfinite().all()


def test_onebit_adam_leaves_parameters_without_gradient(threads):
    """Signs would push it about, and there is no variance to divide by."""

    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.rows = nn.Embedding(8, 4)

        def forward(self, x):
            return self.rows(x)

    def run(comm):
        model = made(Part)
        before = model.rows.weight.detach().clone()
        optimizer = OneBitAdam(model, comm, warmup=1)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.tensor([1, 2])).square().sum().backward()
            optimizer.step()
        moved = (model.rows.weight.detach() != before).any(1)
        return np.flatnonzero(moved).tolist()

    assert threads(1, run) == [[1, 2]]


def test_onebit_adam_refuses_wrong_options(threads):
    def run(comm):
        with pytest.raises(BadArgument, match="warmup = 0: expected 1 step"):
            OneBitAdam(made(Mlp), comm, warmup=0)
        with pytest.raises(BadArgument, match="expected float32 parameters"):
            OneBitAdam(made(Mlp).double(), comm)
        with pytest.raises(BadArgument, match="unknown codec"):
            OneBitAdam(made(Mlp), comm, codec="twobit")
        with pytest.raises(UsageError, match="closures are not supported"):
            OneBitAdam(made(Mlp), comm).step(lambda: 1.0)

    threads(2, run)
