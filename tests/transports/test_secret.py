"""The job's secret: where it is found, what is refused, and that it never shows."""

import hashlib
import hmac
import logging
import os
import pickle
import subprocess
import sys

import pytest

from unisono.errors import BadArgument
from unisono.transports import secret as module
from unisono.transports.secret import (
    Secret,
    find_secret,
    keep_secret,
    make_secret,
    open_secret,
)

DIGITS = "0123456789abcdef" * 4


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch):
    monkeypatch.setattr(module, "_KEPT", [])
    module._warn.cache_clear()


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "secret"
    path.write_text(DIGITS + "\n")
    path.chmod(0o600)
    return path


def test_new_secrets_differ():
    assert make_secret() != make_secret()
    assert make_secret() != "a secret"


def test_secret_is_taken_from_the_environment_once_and_kept():
    environ = {"UNISONO_SECRET": DIGITS, "OTHER": "1"}
    found = find_secret(environ)
    assert found.hex() == DIGITS
    assert environ == {"OTHER": "1"}
    assert find_secret(environ) is found


def test_missing_secret_is_none():
    assert find_secret({}) is None
    assert find_secret({"UNISONO_SECRET": ""}) is None


def test_kept_secret_is_found():
    mine = make_secret()
    keep_secret(mine)
    assert find_secret({}) is mine


def test_secret_is_removed_from_the_environment_of_children():
    program = (
        "import os, subprocess, sys\n"
        "from unisono.transports.secret import find_secret\n"
        "print(find_secret().hex())\n"
        "print(os.environ.get('UNISONO_SECRET'))\n"
        "child = 'import os; print(\"UNISONO_SECRET\" in os.environ)'\n"
        "sys.stdout.flush()\n"
        "subprocess.run([sys.executable, '-c', child], check=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"UNISONO_SECRET": DIGITS},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split() == [DIGITS, "None", "False"]


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_secret_is_read_from_a_file(file, mode):
    file.chmod(mode)
    environ = {"UNISONO_SECRET_FILE": str(file)}
    assert find_secret(environ).hex() == DIGITS
    assert environ  # a path is no secret, and children may read it too


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644, 0o620])
def test_secret_file_readable_by_others_is_refused(file, mode):
    file.chmod(mode)
    with pytest.raises(BadArgument, match=f"mode 0{mode:o}.*chmod 600 {file}"):
        find_secret({"UNISONO_SECRET_FILE": str(file)})


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_secret_file_of_another_user_is_refused(file):
    os.chown(file, 65534, -1)
    with pytest.raises(BadArgument, match="belongs to user 65534, this is user 0"):
        find_secret({"UNISONO_SECRET_FILE": str(file)})


def test_missing_or_special_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name, says in [
        ("absent", "No such file"),
        ("pipe", "an ordinary file"),
        (".", "an ordinary file"),
    ]:
        path = str(tmp_path / name)
        with pytest.raises(BadArgument, match=says):
            find_secret({"UNISONO_SECRET_FILE": path})


@pytest.mark.parametrize("kind", ["pipe", "open pipe", "file"])
def test_secret_is_read_from_a_descriptor_and_closed(kind, file):
    tell = -1
    if kind == "file":
        fd = os.open(file, os.O_RDONLY)
        os.lseek(fd, 0, os.SEEK_END)  # as if another rank had read it
    else:
        fd, tell = os.pipe()
        os.write(tell, DIGITS.encode())
        if kind == "pipe":
            os.close(tell)
    environ = {"UNISONO_SECRET_FD": str(fd)}
    assert find_secret(environ).hex() == DIGITS
    assert environ == {}
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)
    if kind == "open pipe":
        os.close(tell)


@pytest.mark.parametrize("number", ["-1", "three", "999999", "1e3"])
def test_invalid_descriptor_is_refused(number):
    with pytest.raises(BadArgument, match="UNISONO_SECRET_FD"):
        find_secret({"UNISONO_SECRET_FD": number})


def test_variable_takes_precedence_over_the_file(file):
    other = "ab" * 32
    environ = {"UNISONO_SECRET": other, "UNISONO_SECRET_FILE": str(file)}
    assert find_secret(environ).hex() == other


@pytest.mark.parametrize(
    "text", ["cafe", DIGITS[:-1], DIGITS + "0", "x" * 64, DIGITS[:-1] + "٣"]
)
def test_invalid_secret_is_refused_and_not_shown(text):
    with pytest.raises(BadArgument, match="openssl rand -hex 32") as caught:
        find_secret({"UNISONO_SECRET": text})
    assert text not in str(caught.value)
    assert caught.value.__cause__ is None


def test_wrong_sizes_of_secrets_and_keys_are_refused():
    for raw in (b"", b"x" * 31, b"x" * 33):
        with pytest.raises(BadArgument, match="expected 32"):
            Secret(raw)
    for size in (0, 33):
        with pytest.raises(BadArgument, match="1 to 32"):
            make_secret().key(b"use", size)


def test_secret_is_in_no_repr_and_not_pickled():
    mine = make_secret()
    for text in (repr(mine), str(mine), f"{mine}", f"{[mine]}"):
        assert mine.hex() not in text
        assert repr(mine._raw) not in text
    with pytest.raises(TypeError, match="not pickled"):
        pickle.dumps(mine)


def test_derived_keys_are_those_of_hkdf():
    mine = Secret(bytes(range(32)))
    extracted = hmac.new(b"unisono", bytes(range(32)), hashlib.sha256).digest()
    info = b"\x00\x03use" + b"bound" + b"\x01"
    expected = hmac.new(extracted, info, hashlib.sha256).digest()
    assert mine.key(b"use", bound_to=b"bound") == expected
    assert mine.key(b"use", 16, bound_to=b"bound") == expected[:16]


def test_derived_keys_of_different_uses_differ():
    mine = make_secret()
    keys = {
        mine.key(b"a"),
        mine.key(b"b"),
        mine.key(b"ab"),
        mine.key(b"a", bound_to=b"b"),
        make_secret().key(b"a"),
    }
    assert len(keys) == 5


def test_open_secret_is_derived_from_the_job_and_warned_about_once(caplog):
    with caplog.at_level(logging.WARNING, "unisono"):
        one, same, other = open_secret("a"), open_secret("a"), open_secret("b")
    assert one == same != other
    assert one.is_open
    assert not one.anywhere
    assert repr(one) == "<open secret>"
    (line,) = caplog.messages
    assert "has no secret" in line
    assert one.hex() not in line
