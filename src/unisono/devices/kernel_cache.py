"""Compiled kernels on disk, in the user's cache folder: a start compiles nothing twice.

A file is written under another name and renamed, so a reader sees all of it or nothing.
Its owner and mode are checked before it is read (`user_cache.py`), and a digest tells
whether it is whole. Processes that need the same kernel at once wait for the first of
them. Where a file cannot be kept or trusted, the kernel is compiled: the cache saves
time, and nothing depends on it. UNISONO_CACHE=0 turns it off.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from unisono.errors import BadArgument, UsageError
from unisono.user_cache import UserCache, alone, opened

VARIABLE = "UNISONO_CACHE"
CACHE = UserCache("kernels", "a compiled kernel")
_LOG = logging.getLogger("unisono")
_MARK = b"unisono kernel 1\n"
_DIGEST = 32  # bytes
_PATIENCE_S = 60.0  # for another process that compiles the same kernel


def is_on() -> bool:
    """Whether kernels are kept: not with UNISONO_CACHE=0."""
    value = os.environ.get(VARIABLE, "") or "1"
    if value not in ("0", "1"):
        raise BadArgument(f"{VARIABLE}={value}: expected 0 or 1")
    return value == "1"


def fetch(key: str, make: Callable[[], bytes]) -> bytes:
    """The kernel of that key: from its file, or made and kept there."""
    if not is_on():
        return make()
    try:
        target = CACHE.folder() / f"{key}.cubin"
        CACHE.make_folders(target.parent)
    except (UsageError, OSError) as why:
        _LOG.warning("compiled kernels are not kept: %s", why)
        return make()
    return _read(target) or _make(target, make)


def _make(target: Path, make: Callable[[], bytes]) -> bytes:
    with ExitStack() as stack:
        with suppress(OSError):  # a folder that can be read only
            stack.enter_context(alone(target.with_suffix(".lock"), _PATIENCE_S))
        found = _read(target)  # another process was faster
        if found is not None:
            return found
        image = make()
        try:
            _write(target, image)
        except OSError as why:
            _LOG.warning("a compiled kernel is not kept: %s", why)
        return image


def _read(target: Path) -> bytes | None:
    try:
        with os.fdopen(opened(target), "rb") as file:
            content = file.read()
    except FileNotFoundError:
        return None
    except (UsageError, OSError) as why:
        _LOG.warning("a kernel is compiled anew: %s", why)
        return None
    head, image = content[: len(_MARK) + _DIGEST], content[len(_MARK) + _DIGEST :]
    if head != _head(target, image):
        _LOG.warning("a kernel is compiled anew: %s is damaged", target)
        return None
    return image


def _write(target: Path, image: bytes) -> None:
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=".new-")  # mode 600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(_head(target, image) + image)
        os.replace(name, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def _head(target: Path, image: bytes) -> bytes:
    """The digest covers the name, which tells what the kernel was compiled from."""
    return _MARK + hashlib.sha256(target.name.encode() + b"\0" + image).digest()
