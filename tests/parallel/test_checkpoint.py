"""Checkpoints: plain files, whole or not at all."""

import pytest
import torch
from nets import Gpt, alone, made, same, train, weights

from unisono.errors import BadArgument, Corrupted
from unisono.parallel import FSDP, ZeRO
from unisono.parallel.common.checkpoint import load, save


def test_every_type_there_and_back(tmp_path):
    kinds = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64]
    kinds += [torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
    state = {str(k): torch.arange(6).reshape(2, 3).to(k) for k in kinds}
    state |= {"scalar": torch.tensor(3.5), "empty": torch.zeros(0, 4)}
    state["strided"] = torch.arange(6.0).reshape(2, 3).t()
    save(tmp_path / "a.safetensors", state)
    same(load(tmp_path / "a.safetensors"), state)
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]


def test_others_can_read_it_and_we_can_read_theirs(tmp_path):
    theirs = pytest.importorskip("safetensors.torch")
    state = weights(made(Gpt))
    save(tmp_path / "ours", state)
    found = theirs.load_file(tmp_path / "ours")
    same({name: found[name] for name in state}, state)
    theirs.save_file(state, tmp_path / "theirs", metadata={"format": "pt"})
    found = load(tmp_path / "theirs")
    same({name: found[name] for name in state}, state)


def test_the_format_itself(tmp_path):
    save(tmp_path / "f", {"x": torch.tensor([1, 2], dtype=torch.int16)})
    raw = (tmp_path / "f").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    assert length % 8 == 0
    header = raw[8 : 8 + length].decode().strip()
    assert header == '{"x":{"dtype":"I16","shape":[2],"data_offsets":[0,4]}}'
    assert raw[8 + length :] == b"\1\0\2\0"


def test_training_goes_on_with_fewer_ranks(threads, tmp_path):
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


HEADER = b'{"x":{"dtype":"I16","shape":[2],"data_offsets":[0,4]}}'


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "cut short"),
        (b"\xff" * 8, "cut short"),
        ((2).to_bytes(8, "little") + b"[]", "cannot be read"),
        ((3).to_bytes(8, "little") + b"{,}", "cannot be read"),
        (len(HEADER).to_bytes(8, "little") + HEADER, "does not lie"),
    ],
)
def test_files_that_are_none(tmp_path, raw, said):
    (tmp_path / "bad").write_bytes(raw)
    with pytest.raises(Corrupted, match=said):
        load(tmp_path / "bad")


def test_what_cannot_be_saved(tmp_path):
    with pytest.raises(BadArgument, match="x is str"):
        save(tmp_path / "bad", {"x": "text"})
    with pytest.raises(BadArgument, match=r"x is torch.complex64"):
        save(tmp_path / "bad", {"x": torch.zeros(1, dtype=torch.complex64)})
    assert list(tmp_path.iterdir()) == []
