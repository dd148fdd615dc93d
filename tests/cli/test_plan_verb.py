"""unisono plan, run in this process."""

import json

import pytest


def test_plan_prints_a_row_for_each_strategy_and_advice(run):
    code, out, _ = run("plan", "gpt2", "-n", "8", "--memory", "1536M")
    lines = out.splitlines()
    assert code == 0
    known = "# gpt2: 124,439,808 parameters, 12 layers of width 768, the head tied to"
    assert lines[0].startswith(known)
    named = [line.split()[0] for line in lines[2:-1]]
    assert named[:4] == ["ddp", "zero1", "zero2", "fsdp"]
    assert named[4:] == ["tensor", "sequence", "ring", "all_to_all", "pipeline"]
    assert lines[2].endswith(" -")
    assert lines[-1] == "1.5 GiB: use fsdp, the simplest that fits"


def test_plan_help_has_an_example(run):
    _, out, _ = run("plan", "--help")
    assert "Example: unisono plan" in out
    assert "--json" in out


def test_plan_suggests_more_ranks_if_nothing_fits(run):
    _, out, _ = run("plan", "gpt3", "-n", "8", "--memory", "80G")
    assert "nothing fits on 8 ranks; fsdp does on" in out
    _, out, _ = run("plan", "gpt3", "--memory", "1K")
    assert "nothing fits on up to 1024 ranks" in out


MEGATRON = (
    *("gpt3", "--mesh", "tp=8,pp=8,dp=16", "--batch", "1536", "--tokens", "2048"),
    *("--microbatches", "96", "--dtype", "mixed", "--json"),
)
"""How GPT-3 was trained on 1,024 GPUs of 80 GB."""


def test_plan_judges_what_was_trained_as_fitting(run):
    code, out, _ = run("plan", *MEGATRON, "--recompute", "--memory", "80G")
    again = json.loads(out)["strategies"][0]
    assert (code, again["fits"]) == (0, True)
    assert again["optimizer"] == 6 * again["parameters"]
    kept = json.loads(run("plan", *MEGATRON)[1])["strategies"][0]
    assert kept["fits"] is None
    assert kept["activations"] > 4 * again["activations"]
    assert kept["needed"] == pytest.approx(1.1 * kept["memory"])


def test_plan_that_does_not_fit_has_an_exit_code(run):
    how = ("70B", "--mesh", "dp=8,tp=8", "--dtype", "mixed", "--recompute", "--json")
    code, out, _ = run("plan", *how, "--memory", "16G")
    assert code == 1
    assert json.loads(out)["fits"] is False
    code, out, _ = run("plan", *how, "--memory", "80G")
    assert (code, json.loads(out)["fits"]) == (0, True)
    fits = {row["strategy"]: row["fits"] for row in json.loads(out)["strategies"]}
    assert fits == {"ddp": False, "zero1": True, "zero2": True, "fsdp": True}


def test_plan_of_a_mesh_prints_what_each_axis_sends(run):
    code, out, _ = run(
        *("plan", "gpt2-xl", "--mesh", "dp=2,tp=4", "--batch", "16", "--memory", "24G")
    )
    lines = out.splitlines()
    assert code == 0
    assert "; 8 ranks, 16 x 1024 tokens" in lines[0]
    assert [line.split()[0] for line in lines[2:6]] == ["ddp", "zero1", "zero2", "fsdp"]
    assert lines[6].startswith("# dp=2,tp=4 ddp sends: average ")
    assert ", tp " in lines[6]
    assert lines[-1].startswith("24 GiB: ")
    _, out, _ = run("plan", "gpt2", "--mesh", "pp=4,dp=2", "--batch", "32")
    assert "a stage of the pipeline idles 16% of the time" in out
    assert "zero" not in out


def test_plan_of_experts_has_the_axis_ep(run):
    _, out, _ = run("plan", "gpt:layers=4,experts=8", "--mesh", "dp=2,ep=4", "--json")
    result = json.loads(out)
    assert set(result["strategies"][0]["axes"]) == {"average", "ep"}
    assert result["mesh"] == "dp=2,ep=4"


def test_plan_suggests_a_mesh_if_no_strategy_fits(run):
    shape = "gpt:layers=32,hidden=4096,vocabulary=50304,positions=8192"
    model = (shape, "--tokens", "8192")
    how = ("--batch", "16", "--dtype", "bfloat16", "-n", "16", "--memory", "24G")
    _, out, _ = run("plan", *model, *how)
    assert "none of these fits on 16 ranks; --mesh" in out
    suggested = out.rpartition("--mesh ")[2].split()[0]
    how = (*how[:4], "--mesh", suggested, "--memory", "24G")
    _, out, _ = run("plan", *model, *how)
    assert "the simplest that fits" in out


def test_plan_compare_says_that_fsdp_sends_half_as_much_again(run):
    code, out, _ = run("plan", "7B", "-n", "4", "--compare")
    assert code == 0
    assert "2(n-1)/n P                 3(n-1)/n P" in out
    result = {line.split("  ")[0]: line for line in out.splitlines() if line}
    ddp, fsdp = (float(w) for w in result["sent per step"].split()[3::2])
    assert fsdp == pytest.approx(1.5 * ddp, rel=0.01)


def test_plan_compare_shows_the_other_way_round(run):
    _, out, _ = run("plan", "7B", "-n", "4", "--compare")
    assert "Why not the other way round?" in out
    assert "that is zero" in " ".join(out.split())
    _, out, _ = run("plan", "7B", "-n", "4", "--compare", "--json")
    result = json.loads(out)
    (ddp, *_, fsdp) = result["strategies"][:4]
    gradients, parameters, reduced = result["the_other_way"]
    assert gradients["sent"] == ddp["sent"]
    assert gradients["calls"] == 2 * ddp["calls"]
    assert parameters["sent"] == fsdp["sent"] == pytest.approx(1.5 * ddp["sent"])
    assert parameters["memory"] == gradients["memory"] == ddp["memory"]
    assert reduced["sent"] == pytest.approx(4 / 3 * fsdp["sent"])
    assert reduced["memory"] == fsdp["memory"]
    assert "the_other_way" not in json.loads(run("plan", "7B", "--json")[1])


def test_plan_of_a_trillion_parameters_fits(run):
    _, out, _ = run("plan", "1T", "-n", "1024", "--memory", "96G")
    assert "172 equal layers are assumed" in out
    assert "96 GiB: use fsdp, the simplest that fits" in out
    mesh = ("--mesh", "pp=128,dp=8", "--batch", "8192", "--memory", "130G")
    assert "use ddp, the simplest that fits" in run("plan", "1T", *mesh)[1]


def test_plan_suggests_a_shape_where_a_number_alone_does_not_fit(run):
    how = ("--batch", "64", "--tokens", "64", "--dtype", "bfloat16")
    _, out, _ = run("plan", "5B", "-n", "8", *how, "--memory", "500M")
    last = out.splitlines()[-1]
    assert "without a shape; plan gpt:layers=29,hidden=3712,heads=29" in last
    shape, mesh = last.partition("plan ")[2].split(", of ")[0], last.split("--mesh ")[1]
    how = (*how, "--memory", "500M", "--mesh", mesh.split()[0])
    assert "the simplest that fits" in run("plan", shape, *how)[1]


def test_plan_json_has_the_parameters_of_the_model(run):
    _, out, _ = run(
        "plan",
        "gpt:layers=2,width=24,words=36,positions=24",
        "--tokens",
        "24",
        "--json",
    )
    result = json.loads(out)
    assert result["model"]["parameters"] == 2 * result["model"]["block"] + 98 * 24
    assert result["strategies"][0]["strategy"] == "ddp"


def test_plan_counts_the_parameters_of_a_torch_module(run, tmp_path):
    pytest.importorskip("torch")
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
    for name, message in [
        ("Nat", "has no class or function Nat"),
        ("number", "has no class or function number"),
        ("text", "is not a torch module"),
    ]:
        code, _, err = run("plan", f"{file}:{name}")
        assert code == 2
        assert message in err
    assert "there is no file" in run("plan", "nowhere.py:Net")[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gtp2"], "unknown model 'gtp2'; nearest: gpt2"),
        (["gpt:depth=3"], "expected each of layers, hidden"),
        (["--dtype", "int7"], "unknown element type 'int7'"),
        (["--optimizer", "lion"], "unknown optimizer 'lion'"),
        (["--batch", "0"], "batch = 0: at least one"),
        (["-n", "0"], "n = 0: at least one"),
        (["--memory", "lots"], "size 'lots'"),
        (["--mesh", "dp=2,xp=4"], "'xp=4': expected each of dp, tp, pp, cp, ep"),
        (["--mesh", "dp=2,dp=4"], "'dp=4': expected each"),
        (["--mesh", "dp=0"], "mesh: dp = 0: at least one"),
        (["--mesh", "dp=2", "-n", "4"], "mesh dp=2: it has 2 ranks, there are 4"),
        (["--mesh", "tp=5"], "hidden = 768 cannot be divided by tp"),
        (["--mesh", "dp=2", "--compare"], "leave out --mesh"),
        (["gpt:experts=4,top_k=5"], "top_k = 5: expected 1..4"),
    ],
)
def test_plan_refuses_arguments_out_of_range(run, arguments, message):
    code, _, err = run("plan", *arguments)
    assert code == 2
    assert message in err


@pytest.mark.parametrize(
    "model",
    [
        "gpt2-xl",
        "7B",
        "70B",
        "3.5B",
        "gpt:layers=4,hidden=256,vocabulary=1000",
        "gpt:layers=2,width=64,words=100,experts=4",
        "layers=4,hidden=256,heads=8,kv_heads=2",
        "FILE:Net",
    ],
)
def test_plan_and_simulate_train_agree_on_every_spelling_of_a_model(
    run, tmp_path, model
):
    file = tmp_path / "net.py"
    file.write_text("from torch import nn\nNet = lambda: nn.Linear(30, 40)\n")
    model = model.replace("FILE", str(file))
    code, out, err = run("plan", model, "-n", "8", "--json")
    assert code == 0, err
    planned = json.loads(out)["model"]
    train = ("simulate", "train", "--model", model, "--sequence", "1024")
    code, out, err = run(*train, "-t", "dgx-h100:1", "--memory", "1024G", "--json")
    assert code == 0, err
    simulated = json.loads(out)["model"]
    assert simulated["parameters"] == planned["parameters"] > 0
    assert {key: simulated[key] for key in planned} == planned


def test_simulate_train_that_does_not_fit_has_an_exit_code(run):
    how = ("simulate", "train", "--model", "13B", "-t", "dgx-h100:1", "--strategy")
    code, out, _ = run(*how, "ddp", "--algorithm", "ring")
    assert code == 1
    assert "DOES NOT FIT into 79 GiB; try fsdp, or a larger tp" in out
    code, out, _ = run(*how, "fsdp", "--algorithm", "ring", "--json")
    result = json.loads(out)
    assert (code, result["fits"]) == (0, True)
    assert sum(result["memory_use"].values()) == pytest.approx(result["memory"])


def test_simulate_train_refuses_an_algorithm_of_a_library_that_has_none_of_ours(run):
    how = ("simulate", "train", "--model", "13B", "-t", "dgx-h100:1")
    code, _, err = run(*how, "--engine", "nccl", "--algorithm", "ring")
    assert code == 2
    assert "--algorithm: is for schedules, and --engine nccl has none" in err


SMALL = "gpt:layers=8,hidden=512,vocabulary=1024,positions=512,heads=8"
SEARCH = ("plan", "--search", SMALL, "-t", "dgx-h100:1", "--batch", "16")


def test_plan_search_ranks_what_fits_and_explains(run):
    how = (*SEARCH, "--tokens", "512", "--top", "3")
    code, out, _ = run(*how, "--explain")
    lines = out.splitlines()
    assert code == 0
    assert "choices," in lines[0]
    assert lines[1].split()[:2] == ["step", "tokens/s"]
    assert any(line.startswith("Why not ") for line in lines)
    code, out, _ = run(*how, "--explain", "--json", "--zero", "0,1", "--mesh", "tp=1")
    result = json.loads(out)
    times = [plan["time"] for plan in result["plans"]]
    assert times == sorted(times)
    assert len(times) == 3
    for plan in result["plans"]:
        assert plan["simulated"]
        assert plan["zero"] in (0, 1)
        assert plan["axes"]["tp"] == 1
        assert sum(plan["parts"].values()) == pytest.approx(plan["time"], rel=0.01)
    assert result["explanation"][0].startswith("Why not")


def test_plan_search_with_nothing_that_fits_has_an_exit_code(run):
    code, out, _ = run(*SEARCH, "--tokens", "512", "--memory", "10M")
    assert code == 1
    assert "Nothing fits" in out


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--search", "-n", "8"), "--n is not for --search"),
        (("-t", "dgx-h100:1"), "--topology is for --search"),
        (("--attention", "plain"), "--attention is for --search"),
        (("--search", "--attention", "flat"), "unknown attention 'flat'"),
        (("--search", "--mesh", "xp=2"), "'xp=2': expected some of dp"),
        (("--search", "--zero", "x"), "expected stages from 0 to 3"),
    ],
)
def test_plan_search_refuses_options_of_the_other(run, words, problem):
    code, _, err = run("plan", "gpt2", *words)
    assert code == 2
    assert problem in " ".join(err.split())
