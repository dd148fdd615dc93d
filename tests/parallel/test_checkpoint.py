"""Checkpoints: safetensors files, complete or not there."""

import importlib
import json
import sys
from functools import partial
from pathlib import Path

import pytest
import safetensors.torch
import torch
from nets import Gpt, adam, alone, batch, loss_of, made, same, train, weights

from unisono.errors import BadArgument, Corrupted
from unisono.parallel import FSDP, ZeRO
from unisono.parallel import load_checkpoint as load
from unisono.parallel import save_checkpoint as save

OLD_FILE = Path(__file__).parent / "fixtures" / "checkpoint_0_1_0.safetensors"
"""Written by unisono 0.1.0, before the safetensors library wrote checkpoints."""


def by_name(state, names):
    """The same, in the order of `names`: files have an order of their own."""
    assert set(state) == set(names)
    return {name: state[name] for name in names}


def test_checkpoint_keeps_every_dtype_and_shape(tmp_path):
    kinds = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64]
    kinds += [torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
    state = {str(k): torch.arange(6).reshape(2, 3).to(k) for k in kinds}
    state |= {"scalar": torch.tensor(3.5), "empty": torch.zeros(0, 4)}
    state["strided"] = torch.arange(6.0).reshape(2, 3).t()
    save(tmp_path / "a.safetensors", state)
    same(by_name(load(tmp_path / "a.safetensors"), state), state)
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]


def test_checkpoint_keeps_dicts_in_dicts_lists_and_plain_values(tmp_path):
    x = torch.arange(3.0)
    state = {
        "model": {"weight": x, "bias": x[:1]},
        "model.weight": x + 1,
        "optimizer": {"state": {0: {"step": torch.tensor(7.0)}}, "empty": {}},
        "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999), "foreach": None}],
        "step": 100,
        "best": float("inf"),
        "done": False,
        "name": "gpt",
    }
    save(tmp_path / "a.safetensors", state)
    found = load(tmp_path / "a.safetensors")
    assert torch.equal(found.pop("model.weight"), state.pop("model.weight"))
    same(found.pop("model"), state.pop("model"))
    step = found["optimizer"]["state"][0].pop("step")
    assert torch.equal(step, state["optimizer"]["state"][0].pop("step"))
    assert found == state
    assert isinstance(found["param_groups"][0]["betas"], tuple)
    plain = safetensors.torch.load_file(tmp_path / "a.safetensors")
    assert sorted(plain)[:2] == ["model.bias", "model.weight"]


@pytest.mark.parametrize("text", ["{", "[]", '["value", 1]', '["tensor", "y"]'])
def test_load_refuses_damaged_descriptions(tmp_path, text):
    metadata = {"unisono.state": text}
    safetensors.torch.save_file({"x": torch.ones(1)}, tmp_path / "f", metadata)
    with pytest.raises(Corrupted, match="f: the state's description is damaged"):
        load(tmp_path / "f")


class Scaled(Gpt):
    """With a parameter that has no dims, as a temperature."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(1.5))

    def forward(self, tokens):
        return super().forward(tokens) * self.scale


@pytest.mark.cases(1)
@pytest.mark.parametrize("how", ["fsdp", "zero1", "zero2", "zero3"])
def test_adam_resumes_on_2_3_and_1_ranks_as_if_it_had_not_stopped(
    threads, tmp_path, how
):
    """Every rank has the same batches, so the number of ranks makes no difference."""
    file = tmp_path / "all.safetensors"

    def run(comm, first):
        net = made(Scaled, seed=first).double()
        if how == "fsdp":
            model = FSDP(net, comm, units=[torch.nn.Linear])
            opt = adam(model.parameters())
            states = model.state_dict, lambda: model.optimizer_state_dict(opt)
            loads = model.load_state_dict, partial(model.load_optimizer_state_dict, opt)
        else:
            opt = ZeRO(net, comm, torch.optim.AdamW, stage=int(how[-1]), lr=1e-2)
            model, states = net, (opt.model_state_dict, opt.state_dict)
            loads = opt.load_model_state_dict, opt.load_state_dict
        if first:
            saved = load(file)
            loads[0](saved["model"])
            loads[1](saved["optimizer"])
            assert saved["steps"] == first
            same_nested(states[1](), saved["optimizer"])
        for step in range(first, first + 4):
            opt.zero_grad()
            x, y = batch(Gpt, step, 0)
            loss_of(model(x), y).backward()
            opt.step()
        state = {"model": states[0](), "optimizer": states[1](), "steps": first + 4}
        save(file, state, comm)

    for first, n in ((0, 2), (4, 3), (8, 1)):
        threads(n, run, first)
    right = alone_on_the_same_batches(12)
    same(by_name(load(file)["model"], right), right, 1e-9)


def alone_on_the_same_batches(steps):
    net = made(Scaled).double()
    opt = adam(net.parameters())
    for step in range(steps):
        opt.zero_grad()
        x, y = batch(Gpt, step, 0)
        loss_of(net(x), y).backward()
        opt.step()
    return weights(net)


def same_nested(found, wanted):
    """Two states of optimizers, bit for bit."""
    assert found["param_groups"] == wanted["param_groups"]
    assert set(found["state"]) == set(wanted["state"])
    for name, values in wanted["state"].items():
        same(found["state"][name], values)


def test_optimizer_of_other_parameters_is_refused(threads):
    def run(comm):
        model = FSDP(made(Gpt), comm)
        other = adam(made(Gpt).parameters())
        with pytest.raises(BadArgument, match="parameters of the wrapped model"):
            model.optimizer_state_dict(other)
        with pytest.raises(BadArgument, match="parameters of the wrapped model"):
            model.load_optimizer_state_dict(other, {"param_groups": [], "state": {}})

    threads(2, run)


def test_tensors_that_share_memory_are_saved_separately(tmp_path):
    flat = torch.arange(6.0)
    state = {"tied": flat, "same": flat, "part": flat[2:4], "end": flat[4:]}
    save(tmp_path / "a.safetensors", state)
    same(by_name(load(tmp_path / "a.safetensors"), state), state)


def test_checkpoint_of_zero_buckets_has_every_parameter(threads, tmp_path):
    """The parameters are views of one flat tensor."""

    def run(comm):
        net = made(Gpt)
        ZeRO(net, comm, torch.optim.SGD, stage=2, lr=0.1)
        save(tmp_path / "a.safetensors", net.state_dict(), comm)
        return weights(net)

    right = threads(2, run)[0]
    same(by_name(load(tmp_path / "a.safetensors"), right), right)


def test_loaded_tensors_can_be_changed_and_the_file_stays(tmp_path):
    save(tmp_path / "a.safetensors", {"x": torch.zeros(3)})
    load(tmp_path / "a.safetensors")["x"].add_(1)
    assert torch.equal(load(tmp_path / "a.safetensors")["x"], torch.zeros(3))


def test_saved_file_has_the_permissions_of_any_new_file(tmp_path):
    save(tmp_path / "a.safetensors", {"x": torch.zeros(3)})
    (tmp_path / "b").write_bytes(b"")
    modes = {file.stat().st_mode for file in tmp_path.iterdir()}
    assert len(modes) == 1


def test_failed_save_keeps_the_old_file(tmp_path, monkeypatch):
    file = tmp_path / "a.safetensors"
    save(file, {"x": torch.zeros(3)})
    before = file.read_bytes()

    def fail(descriptor):
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        save(file, {"x": torch.ones(3)})
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]


def test_reference_library_reads_our_file_and_we_read_its_file(tmp_path):
    state = weights(made(Gpt))
    save(tmp_path / "ours", state)
    same(by_name(safetensors.torch.load_file(tmp_path / "ours"), state), state)
    metadata = {"format": "pt"}
    safetensors.torch.save_file(state, tmp_path / "theirs", metadata=metadata)
    same(by_name(load(tmp_path / "theirs"), state), state)


def test_file_is_a_header_length_a_json_header_and_raw_data(tmp_path):
    save(tmp_path / "f", {"x": torch.tensor([1, 2], dtype=torch.int16)})
    raw = (tmp_path / "f").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    assert length % 8 == 0
    header = raw[8 : 8 + length].decode().strip()
    assert header == '{"x":{"dtype":"I16","shape":[2],"data_offsets":[0,4]}}'
    assert raw[8 + length :] == b"\1\0\2\0"


def test_file_of_version_0_1_0_loads():
    right = {
        "weight": torch.arange(6, dtype=torch.float32).reshape(2, 3) / 4,
        "flag": torch.tensor([True, False, True]),
        "bias": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        "steps": torch.tensor(7),
        "empty": torch.zeros(0, 4),
        "table": torch.tensor([[1, 2], [3, 4]], dtype=torch.int16),
    }
    same(by_name(load(OLD_FILE), right), right)


def test_old_module_path_works_and_warns(tmp_path):
    sys.modules.pop("unisono.parallel.checkpoint", None)
    with pytest.warns(DeprecationWarning, match="save_checkpoint and load_checkpoint"):
        old = importlib.import_module("unisono.parallel.checkpoint")
    assert old.save is save
    assert old.load is load


def test_checkpoint_of_3_fsdp_ranks_loads_into_2_zero_ranks(threads, tmp_path):
    file = tmp_path / "model.safetensors"

    def first(comm):
        model = FSDP(made(Gpt), comm, reproducible=True)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        train(comm, model, opt, Gpt, steps=5)
        save(file, model.state_dict(), comm)

    def then(comm):
        net = made(Gpt, seed=4)
        opt = ZeRO(net, comm, torch.optim.SGD, stage=2, lr=0.1, reproducible=True)
        opt.load_model_state_dict(load(file))
        return weights(net)

    threads(3, first)
    _, right = alone(Gpt, 3, 5, lambda params: torch.optim.SGD(params, lr=0.1))
    for found in threads(2, then):
        same(found, right)


def header(**entries):
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


def entry(shape, begin, end):
    return {"dtype": "I16", "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\1\0", id="no header length"),
        pytest.param(b"\xff" * 8, id="header longer than the file"),
        pytest.param((2).to_bytes(8, "little") + b"[]", id="header not an object"),
        pytest.param((3).to_bytes(8, "little") + b"{,}", id="header not JSON"),
        pytest.param(header(x=entry([2], 0, 4)), id="no data"),
        pytest.param(header(x=entry([2], 0, 4)) + bytes(6), id="data left over"),
        pytest.param(header(x=entry([2], 0, 2)) + bytes(2), id="size not of shape"),
        pytest.param(header(x=entry([2], 4, 0)) + bytes(4), id="end before begin"),
        pytest.param(
            header(x=entry([2], 0, 4), y=entry([2], 2, 6)) + bytes(6), id="overlap"
        ),
        pytest.param(
            header(x=entry([1], 0, 2), y=entry([1], 4, 6)) + bytes(6), id="hole"
        ),
    ],
)
def test_load_refuses_files_that_are_not_safetensors(tmp_path, raw):
    (tmp_path / "bad").write_bytes(raw)
    with pytest.raises(Corrupted, match="bad: not a safetensors file"):
        load(tmp_path / "bad")


def test_save_refuses_values_that_are_not_tensors_of_numbers(tmp_path):
    with pytest.raises(BadArgument, match=r"a.x is object"):
        save(tmp_path / "bad", {"a": {"x": object()}})
    with pytest.raises(BadArgument, match=r"a has the key \(1, 2\)"):
        save(tmp_path / "bad", {"a": {(1, 2): 3}})
    with pytest.raises(BadArgument, match=r"x is torch.complex64"):
        save(tmp_path / "bad", {"x": torch.zeros(1, dtype=torch.complex64)})
    assert list(tmp_path.iterdir()) == []
