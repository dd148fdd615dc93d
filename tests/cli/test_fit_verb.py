"""`unisono fit` and `unisono simulate --engine`, in this process."""

import json

import pytest

LOG = "".join(
    f" {1 << k} {1 << k >> 2} float sum -1 {t:.2f} {(1 << k) / t / 1e3:.2f} "
    f"{(1 << k) / t / 1e3 * 1.75:.2f} 0\n"
    for k in range(10, 31)
    for t in [20 + (1 << k) / 200e3]
)


def test_log_becomes_an_engine_of_the_simulator(run, tmp_path):
    log, file = tmp_path / "a.log", tmp_path / "cluster.json"
    log.write_text(LOG)
    code, out, err = run("fit", str(log), "-o", str(file))
    assert code == 0, err
    assert "all_reduce on 8 ranks" in out
    assert "200 GB/s" in out
    words = ("simulate", "all_reduce", "--engine", str(file), "-b", "64M", "--json")
    code, out, _ = run(*words, "-t", "dgx-h100:1")
    (result,) = json.loads(out)["results"]
    assert code == 0
    assert result["time"] == pytest.approx(20e-6 + (64 << 20) / 200e9, rel=0.01)
    code, _, err = run(*words, "-t", "dgx-h100:2")
    assert code == 2
    assert "on 16 ranks was not measured" in err
    code, out, _ = run("fit", str(log), "--json")
    assert json.loads(out)["calls"][0]["ranks"] == 8


def test_engines_answer_by_size(run):
    code, out, _ = run(
        "simulate", "-t", "dgx-h100:1", "--engine", "nccl", "-b", "1K", "-e", "1G"
    )
    assert code == 0
    assert "switch" in out
    assert "LL" in out


def test_calls_on_buffers_of_gpus_are_staged_by_gloo(run):
    words = ["simulate", "--engine", "gloo", "-b", "64M", "--json", "-t"]
    (plain,), (staged,) = (
        json.loads(run(*words, f"dgx-h100:2{option}")[1])["results"]
        for option in ("", ",staged=1")
    )
    copies = 2 * (64 << 20) / 12e9
    assert staged["time"] == pytest.approx(plain["time"] + copies)
    assert staged["protocol"] == "tcp, staged"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("fit none.log", "cannot be read"),
        ("simulate --engine ncl", "nearest: nccl"),
        ("simulate --engine nccl --algorithm ring", "--algorithm: is for schedules"),
        ("simulate --engine nccl --delay 0=1ms", "--delay: is for schedules"),
        ("simulate scatter --engine nccl", "scatter is not modelled"),
    ],
)
def test_wrong_words_are_one_line_with_exit_code_2(run, words, message):
    code, _, err = run(*words.split())
    assert code == 2
    assert message in err
    assert err.count("\n") == 1
