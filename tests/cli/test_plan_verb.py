"""unisono plan, run in this process."""

import json

import pytest

from unisono.cli import main


@pytest.fixture
def run(capsys):
    def call(*arguments):
        code = main(arguments)
        out, err = capsys.readouterr()
        return code, out, err

    return call


def test_the_table(run):
    code, out, _ = run("plan", "gpt2", "-n", "8", "--memory", "1G")
    lines = out.splitlines()
    assert code == 0
    assert lines[0].startswith("# gpt2: 163,037,184 parameters, 12 layers of width 768")
    named = [line.split()[0] for line in lines[2:-1]]
    assert named[:4] == ["ddp", "zero1", "zero2", "fsdp"]
    assert named[4:] == ["tensor", "sequence", "ring", "all_to_all", "pipeline"]
    assert lines[2].endswith(" -")
    assert lines[-1] == "1 GiB: take fsdp, the simplest that fits"


def test_help(run):
    _, out, _ = run("plan", "--help")
    assert "Example: unisono plan" in out
    assert "--json" in out


def test_what_to_try_next(run):
    _, out, _ = run("plan", "gpt3", "-n", "8", "--memory", "80G")
    assert "nothing fits on 8 ranks; fsdp does on" in out
    _, out, _ = run("plan", "gpt3", "--memory", "1K")
    assert "nothing fits, on 1024 ranks neither" in out


def test_the_classic_question(run):
    code, out, _ = run("plan", "7B", "-n", "4", "--compare")
    assert code == 0
    assert "2(n-1)/n P                 3(n-1)/n P" in out
    told = {line.split("  ")[0]: line for line in out.splitlines() if line}
    ddp, fsdp = (float(w) for w in told["sent per step"].split()[3::2])
    assert fsdp == pytest.approx(1.5 * ddp, rel=0.01)


def test_json(run):
    _, out, _ = run(
        "plan", "gpt:layers=2,width=24,words=36", "--tokens", "24", "--json"
    )
    told = json.loads(out)
    assert told["model"]["parameters"] == 2 * told["model"]["block"] + 98 * 24
    assert told["strategies"][0]["strategy"] == "ddp"


def test_a_module_of_the_users(run, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.all = nn.ModuleList(nn.Linear(9, 9) for _ in range(3))\n"
        "number = 3\n"
        "def text(): return 'no module'\n"
    )
    code, out, _ = run("plan", f"{file}:Net", "-n", "2")
    assert code == 0
    assert "270 parameters; 2 ranks" in out
    assert "activations are not known" in out
    for name, told in [
        ("Nat", "has no class or function Nat"),
        ("number", "has no class or function number"),
        ("text", "is no torch module"),
    ]:
        code, _, err = run("plan", f"{file}:{name}")
        assert code == 2
        assert told in err
    assert "there is no file" in run("plan", "nowhere.py:Net")[2]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["gtp2"], "unknown model 'gtp2'; nearest: gpt2"),
        (["gpt:depth=3"], "expected layers=, width= or words="),
        (["--dtype", "int7"], "unknown element type 'int7'"),
        (["--optimizer", "lion"], "unknown optimizer 'lion'"),
        (["--batch", "0"], "batch = 0: at least one"),
        (["-n", "0"], "n = 0: at least one"),
        (["--memory", "lots"], "size 'lots'"),
    ],
)
def test_what_cannot_be(run, arguments, told):
    code, _, err = run("plan", *arguments)
    assert code == 2
    assert told in err
