"""`unisono config`, and what `unisono run` takes from the file it writes."""

import json
import os
import tomllib
from dataclasses import fields, replace

import pytest

from unisono.cli import _saved
from unisono.cli import run as run_verb
from unisono.cli._run_options import RunOptions

SCRIPT = """
import os
print(os.environ["UNISONO_WORLD_SIZE"], os.environ.get("COLOUR"))
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty folder to be in, and no settings of the caller's."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("UNISONO_")]:
        monkeypatch.delenv(name)
    return tmp_path


@pytest.fixture
def shown(run):
    """What `unisono config` shows, as plain data."""

    def call(*words):
        code, out, err = run("config", "--json", *words)
        assert (code, err) == (0, "")
        return json.loads(out)

    return call


def saved(folder, text):
    file = folder / "unisono.toml"
    file.write_text(text)
    return file


# Saving


def test_saved_options_are_what_was_typed(run, folder):
    words = ["-np", "4", "--hosts", "a,b:3", "--bind-to=core", "--log-dir", "my logs"]
    words += ["--tag-output", "--timestamps", "--max-restarts", "2", "--grace", "2.5"]
    words += ["-x", 'QUOTES="é\\', "--env", "TAB=\t\x7f"]
    code, out, err = run("config", "save", *words)
    assert (code, err) == (0, "")
    assert "wrote unisono.toml" in out
    assert tomllib.loads((folder / "unisono.toml").read_text())["run"] == {
        "np": 4,
        "hosts": "a,b:3",
        "bind-to": "core",
        "log-dir": "my logs",
        "tag-output": True,
        "timestamps": True,
        "max-restarts": 2,
        "grace": 2.5,
        "env": ['QUOTES="é\\', "TAB=\t\x7f"],
    }


TOGETHER = [
    "-n 3 --only 0 --log-dir logs --grace 1e1 --timeout-s 20 --max-restarts 1 "
    "--bind-to numa --hosts a,b --ssh ssh --python /p --chdir /tmp --address a:29400 "
    "--env A=1 --env B= --records seen --tag-output --timestamps",
    "-np 2 --hostfile hosts",
    "--nnodes 2 --master-addr a --master-port 29501",
]
"""All options but --node-rank, those that may be given together on one line."""


def test_every_option_comes_back_as_it_was_saved(run, folder):
    (folder / "hosts").write_text("a slots=2\n")
    tried = set()
    for line in TOGETHER:
        code, _, err = run("config", "save", "--replace", *line.split())
        assert (code, err) == (0, "")
        alone, again = _saved.SavedOptions(read=False), _saved.SavedOptions()
        typed = run_verb.parse(line.split(), alone)["options"]
        assert run_verb.parse([], again)["options"] == replace(
            typed, grace="10.0" if "1e1" in line else typed.grace
        )
        mine = {name for name, origin in alone.origins.items() if origin == "option"}
        assert mine == {n for n, origin in again.origins.items() if origin == "file"}
        tried |= mine
    assert tried | {"node_rank"} == {field.name for field in fields(RunOptions)}


def test_nothing_is_written_unless_asked(run, folder):
    assert run("config")[0] == 0
    assert run("config", "-n", "2")[0] == 0
    assert run("run", "-n", "1", "no_such_script.py")[0] == 2
    assert list(folder.iterdir()) == []


def test_saved_file_is_replaced_only_if_asked(run, folder):
    file = saved(folder, "# mine\n[run]\nranks = 2\n")
    code, _, err = run("config", "save", "-n", "3")
    assert code == 2
    assert "is there already" in err
    assert file.read_text().startswith("# mine")
    code, out, _ = run("config", "save", "-n", "3", "--replace", "--json")
    assert json.loads(out) == {"file": "unisono.toml", "run": {"ranks": 3}}
    assert tomllib.loads(file.read_text()) == {"run": {"ranks": 3}}


def test_other_files_are_saved_and_read_by_name(run, shown, folder):
    saved(folder, "[run]\nranks = 2\n")
    _, out, _ = run("config", "save", "--config", "big.toml", "-n", "7")
    assert "unisono run --config big.toml" in out
    assert shown()["options"]["ranks"] == {"value": 2, "from": "file"}
    for spelling in ("--config", "--config_file"):
        found = shown(spelling, "big.toml")
        assert found["file"] == "big.toml"
        assert found["options"]["ranks"] == {"value": 7, "from": "file"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing to save: give options of unisono run"),
        (["-n", "zero"], "-n zero: expected one number of ranks"),
        (["-n", "2", "-np", "4"], "-n and -np: give one of them"),
        (["--bind-to", "cor"], "unknown binding 'cor'; nearest: core"),
        (["--address", "nowhere"], "--address nowhere: expected host:port"),
        (["--hostfile", "none"], "none"),
        (["-n", "2", "train.py"], "train.py: not an option of unisono run"),
        (["-m", "train"], "train: not an option of unisono run"),
        (["--node-rank", "1", "--nnodes", "2"], "differs from host to host"),
        (["--env", "UNISONO_SECRET=x"], "UNISONO_SECRET: a secret is not saved"),
        (["-n", "2", "--config", "no/where.toml"], "there is no folder no"),
        (["--rank", "2"], "--rank"),
    ],
)
def test_wrong_options_are_not_saved(run, folder, words, message):
    words = [*words, "--master-addr", "a"] if "--nnodes" in words else words
    code, out, err = run("config", "save", *words)
    assert (code, out) == (2, "")
    assert message in err
    assert list(folder.iterdir()) == []


# Which value holds


def test_option_then_environment_then_file_then_default(shown, folder, monkeypatch):
    assert shown()["options"]["timeout-s"] == {"value": None, "from": "default"}
    saved(folder, '[run]\ntimeout-s = 20\nenv = ["UNISONO_FABRIC=tcp"]\n')
    found = shown()
    assert found["options"]["timeout-s"] == {"value": 20, "from": "file"}
    assert found["settings"] == {
        "UNISONO_FABRIC": {"value": "tcp", "from": "file"},
        "UNISONO_MONITOR": {"value": "1", "from": "default"},
        "UNISONO_TIMEOUT_S": {"value": "20.0", "from": "file"},
    }
    monkeypatch.setenv("UNISONO_TIMEOUT_S", "30")
    monkeypatch.setenv("UNISONO_FABRIC", "shm")
    monkeypatch.setenv("UNISONO_SECRET", "hidden")
    found = shown()
    assert found["options"]["timeout-s"] == {"value": 30, "from": "environment"}
    assert found["unused"] == {"timeout-s": "20"}
    assert found["settings"] == {
        "UNISONO_FABRIC": {"value": "shm", "from": "environment"},
        "UNISONO_MONITOR": {"value": "1", "from": "default"},
        "UNISONO_SECRET": {"value": "(is set)", "from": "environment"},
        "UNISONO_TIMEOUT_S": {"value": "30", "from": "environment"},
    }
    found = shown("--timeout-s", "40", "--env", "UNISONO_FABRIC=inproc")
    assert found["options"]["timeout-s"] == {"value": 40, "from": "option"}
    assert found["settings"]["UNISONO_FABRIC"] == {"value": "inproc", "from": "option"}
    assert found["settings"]["UNISONO_TIMEOUT_S"]["from"] == "option"


def test_variables_of_the_file_are_added_to_those_typed(shown, folder):
    saved(folder, '[run]\nenv = ["A=1", "B=2"]\n')
    found = shown("-x", "B=3", "-x", "C=4")["options"]["env"]
    assert found == {"value": ["B=3", "C=4", "A=1"], "from": "option"}


@pytest.mark.parametrize(
    ("file", "words", "taken", "unused"),
    [
        ("np = 8", ["-n", "2"], {"ranks": 2}, {"np"}),
        ("ranks = 8", ["-np", "2"], {"np": 2}, {"ranks"}),
        ('hosts = "a,b"', ["--hostfile", "h"], {"hostfile": "h"}, {"hosts"}),
        (
            'hosts = "a,b"\nssh = "s"',
            ["--nnodes", "2", "--master-addr", "a"],
            {"nnodes": 2},
            {"hosts", "ssh"},
        ),
        ('ssh = "s"', [], {}, {"ssh"}),
        ('ssh = "s"', ["--hosts", "a"], {"ssh": "s"}, set()),
        ("tag-output = true", ["--tag-output=false"], {}, {"tag-output"}),
    ],
)
def test_typed_option_overrules_what_excludes_it(
    shown, folder, file, words, taken, unused
):
    (folder / "h").write_text("a\n")
    saved(folder, f"[run]\n{file}\n")
    found = shown(*words)
    assert set(found["unused"]) == unused
    for key in unused - {"tag-output"}:
        assert found["options"][key] == {"value": None, "from": "default"}
    for key, value in taken.items():
        assert found["options"][key]["value"] == value


def test_table_is_for_people(run, folder):
    saved(folder, '[run]\nranks = 3\ntag-output = true\nssh = "ssh -v"\n')
    code, out, _ = run("config", "--grace", "9")
    assert code == 0
    rows = [line.split() for line in out.splitlines()]
    assert ["file:", "unisono.toml"] in rows
    assert ["--ranks", "3", "file"] in rows
    assert ["--tag-output", "yes", "file"] in rows
    assert ["--grace", "9", "option"] in rows
    assert ["--bind-to", "none", "default"] in rows
    assert ["UNISONO_MONITOR", "1", "default"] in rows
    assert "overruled or not applicable here: --ssh ssh -v" in out


# What `run` does with it


def test_run_takes_options_from_the_file_and_says_so(capfdbinary, folder):
    from unisono.cli import main

    (folder / "script.py").write_text(SCRIPT)
    saved(folder, '[run]\nranks = 2\ntag-output = true\nenv = ["COLOUR=a secret"]\n')
    assert main(["run", "script.py"]) == 0
    out, err = capfdbinary.readouterr()
    assert sorted(out.decode().splitlines()) == [
        f"[{rank}]<stdout> 2 a secret" for rank in range(2)
    ]
    line = "unisono: options from unisono.toml: --ranks 2 --tag-output --env COLOUR\n"
    assert err.decode() == line
    assert main(["run", "--no-config", "-n1", "script.py"]) == 0
    assert capfdbinary.readouterr() == (b"[0] 1 None\n", b"")


def test_typed_options_are_not_taken_from_the_file(run, folder):
    saved(folder, "[run]\nranks = 2\n")
    _, _, err = run("run", "-n", "1", "none.py")
    assert err.splitlines()[0] == "unisono: options from unisono.toml: none"
    _, _, err = run("run", "--no-config", "-n", "1", "none.py")
    assert err.splitlines() == [
        "unisono: none.py: no such file, and no such program either"
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ranks = 4", ":1: ranks: expected below a line [run]"),
        ("\n[rum]", ":2: unknown table 'rum'; nearest: run"),
        ("run = 3", ":1: expected a table, [run]"),
        ('[run]\nhots = "a"', ":2: unknown option 'hots'; nearest: hosts, "),
        ("[run]\nn = 4", ":2: n: spelled ranks in this file"),
        ("[run]\n\ntag_output = true", ":3: tag_output: spelled tag-output"),
        ("[run]\nnproc_per_node = 2", ":2: nproc_per_node: spelled ranks"),
        ("[run]\nnode-rank = 1", ":2: node-rank: not for a file"),
        ('[run]\nrdzv-backend = "c"', ":2: --rdzv-backend: not an option"),
        ('[run]\ntag-output = "yes"', ':2: tag-output = "yes": expected true or false'),
        ("[run]\nranks = [1]", ":2: ranks = [1]: expected a number"),
        ("[run]\nranks = true", ":2: ranks = true: expected a number"),
        ('[run]\ngrace = "long"', ':2: grace = "long": expected a number'),
        ("[run]\nmax-restarts = 1.5", ":2: max-restarts = 1.5: expected a whole"),
        ("[run]\nhosts = 3", ":2: hosts = 3: expected a string"),
        ('[run]\nenv = "A=1"', ':2: env = "A=1": expected a list of strings'),
        ("[run]\nenv = [1]", ":2: env = [1]: expected a list of strings"),
        ('[run]\nenv = ["UNISONO_SECRET=1"]', ":2: UNISONO_SECRET: a secret is not"),
        ("[run", ": not a TOML file: Expected ']'"),
        ("[run]\nranks = 1979-05-27", ":2: ranks = "),
    ],
)
def test_wrong_file_is_named_with_its_line(run, folder, text, message):
    saved(folder, text + "\n")
    code, out, err = run("run", "-n", "1", "none.py")
    assert (code, out) == (2, "")
    assert f"unisono: unisono.toml{message}" in err
    assert err.count("\n") == 1


def test_file_that_cannot_be_read_is_named(run, folder):
    file = folder / "unisono.toml"
    file.mkdir()
    assert "unisono.toml: cannot be read: Is a dir" in run("run", "none.py")[2]
    file.rmdir()
    os.mkfifo(file)
    assert "unisono.toml: this is no file; --no-config" in run("run", "none.py")[2]
    file.unlink()
    file.symlink_to("nowhere")
    assert "unisono.toml: cannot be read: No such file" in run("run", "none.py")[2]
    file.unlink()
    file.write_bytes(b"\xff")
    assert "unisono.toml: cannot be read: not UTF-8" in run("run", "none.py")[2]
    _, _, err = run("run", "--config", "none.toml", "none.py")
    assert "none.toml: cannot be read: No such file" in err
    _, _, err = run("run", "--config", "none.toml", "--no-config", "none.py")
    assert "--config and --no-config: give one of them" in err


def test_file_that_others_can_write_must_be_named(run, shown, folder, monkeypatch):
    file = saved(folder, "[run]\nranks = 2\n")
    file.chmod(0o666)
    _, _, err = run("run", "none.py")
    assert "everybody can write to it (mode 666)" in err
    assert "--config unisono.toml" in err
    assert shown("--config", "unisono.toml")["options"]["ranks"]["value"] == 2
    file.chmod(0o644)
    os.chown(file, 12345, -1) if os.geteuid() == 0 else monkeypatch.setattr(
        "os.geteuid", lambda: 12345
    )
    _, _, err = run("run", "none.py")
    assert "it belongs to user" in err
