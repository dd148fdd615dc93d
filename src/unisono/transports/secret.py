"""The job's secret: 32 random bytes by which ranks of one job know each other.

The launcher of the job makes it and passes it to every rank, in one of three ways:

    UNISONO_SECRET_FD     a descriptor that the rank inherits; read once, then closed
    UNISONO_SECRET        64 hexadecimal digits; removed from the environment when read
    UNISONO_SECRET_FILE   a file that only this user may read (0600 or 0400)

They are asked in this order. What was found is kept in this process, so that it can be
asked for again, and handed to children on purpose (`hex`); it is in no environment that
they would inherit by accident. It never travels: keys are derived from it
(HKDF-SHA256), one for each use, and only proofs made with those are sent. It is not in
a log, a repr, an error message or a pickle.

Without a secret there is the *open* one, which is derived from the job's name: it
distinguishes jobs, but does not exclude a process that knows or guesses the name.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import secrets
import stat
from collections.abc import MutableMapping
from functools import cache
from typing import NoReturn

from unisono.errors import BadArgument

SECRET = "UNISONO_SECRET"
SECRET_FILE = "UNISONO_SECRET_FILE"
SECRET_FD = "UNISONO_SECRET_FD"
SIZE = 32

_LOG = logging.getLogger("unisono")
_LONGEST = 256  # bytes looked at in a file or pipe
_SALT = b"unisono"
_KEPT: list[Secret] = []
"""What this process has found: the variable is gone by the time of a second init."""


class Secret:
    """What only the ranks of a job hold; keys are derived from it.

    `is_open` says that it is derived from the job's name and thus protects nothing;
    `anywhere` that the user wants it so even where other hosts can connect.
    """

    __slots__ = ("_prk", "_raw", "anywhere", "is_open")

    def __init__(
        self, raw: bytes, *, is_open: bool = False, anywhere: bool = False
    ) -> None:
        """Take 32 bytes; `make_secret` and `find_secret` give them."""
        if len(raw) != SIZE:
            raise BadArgument(f"a secret of {len(raw)} bytes: expected {SIZE}")
        self._raw = bytes(raw)
        self._prk = hmac.digest(_SALT, self._raw, "sha256")
        self.is_open = is_open
        self.anywhere = anywhere

    def key(self, use: bytes, size: int = 32, *, bound_to: bytes = b"") -> bytes:
        """The key for one use, at most 32 bytes; another for everything it is bound to.

        HKDF: extracted once, when the secret was taken, and expanded here.
        """
        if not 0 < size <= 32:
            raise BadArgument(f"a key of {size} bytes: expected 1 to 32")
        # The length stands before, so that no two pairs make the same text.
        info = len(use).to_bytes(2, "big") + use + bound_to + b"\x01"
        return hmac.digest(self._prk, info, "sha256")[:size]

    def hex(self) -> str:
        """The secret itself, for a child or a file: never for a log or command line."""
        return self._raw.hex()

    def __eq__(self, other: object) -> bool:
        """Whether both are the same, in a time that does not tell how nearly."""
        if not isinstance(other, Secret):
            return NotImplemented
        return hmac.compare_digest(self._raw, other._raw)

    def __hash__(self) -> int:
        """By identity of the bytes, without showing them."""
        return hash(self.key(b"hash"))

    def __repr__(self) -> str:
        """Nothing that could be used."""
        return "<open secret>" if self.is_open else "<secret>"

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled: to pass it on, use `hex`."""
        raise TypeError("a secret is not pickled; pass on secret.hex() explicitly")


def make_secret() -> Secret:
    """A new secret, for a new job."""
    return Secret(secrets.token_bytes(SIZE))


def open_secret(job: str, *, anywhere: bool = False) -> Secret:
    """The secret of a job that was given none; a warning is logged, once.

    It is good for loopback addresses; for others only if `anywhere`, which is what
    `init(insecure=True)` means.
    """
    _warn(
        "any process that reaches its ports" if anywhere else "every user of this host"
    )
    raw = hashlib.sha256(b"unisono: no secret\0" + job.encode()).digest()
    return Secret(raw, is_open=True, anywhere=anywhere)


@cache
def _warn(who: str) -> None:
    _LOG.warning(
        "this job has no secret: %s can join it; give all ranks one, by %s or %s",
        who,
        SECRET,
        SECRET_FILE,
    )


def find_secret(environ: MutableMapping[str, str] = os.environ) -> Secret | None:
    """The secret this process was given, or None; asked again, the same."""
    found = _asked(environ)
    if found is not None:
        _KEPT[:] = [found]
    return _KEPT[0] if _KEPT else None


def keep_secret(secret: Secret) -> None:
    """Have `find_secret` give this one: for a process that was handed it otherwise."""
    _KEPT[:] = [secret]


def _asked(environ: MutableMapping[str, str]) -> Secret | None:
    number = environ.pop(SECRET_FD, "")
    text = environ.pop(SECRET, "")
    path = environ.get(SECRET_FILE, "")
    if number:
        return _parsed(SECRET_FD, _from_descriptor(number))
    if text:
        return _parsed(SECRET, text)
    if path:
        return _parsed(f"{SECRET_FILE}={path}", _from_file(path))
    return None


def _parsed(where: str, text: str) -> Secret:
    # What was found is not shown, though it be wrong: it may be nearly right.
    if not re.fullmatch(r"\s*[0-9a-fA-F]{64}\s*", text, re.ASCII):
        raise BadArgument(
            f"{where}: this is no secret; expected 64 hexadecimal digits, as "
            "`openssl rand -hex 32` makes them"
        )
    return Secret(bytes.fromhex(text.strip()))


def _from_file(path: str) -> str:
    where = f"{SECRET_FILE}={path}"
    try:
        # A pipe in its place must not hold us up.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as why:
        cause = getattr(why, "strerror", None) or why
        raise BadArgument(f"{where}: cannot be read: {cause}") from None
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise BadArgument(f"{where}: expected an ordinary file")
        if found.st_uid != os.geteuid():
            raise BadArgument(
                f"{where}: it belongs to user {found.st_uid}, this is user "
                f"{os.geteuid()}: make one of your own, `(umask 077; openssl rand "
                f"-hex 32 > ...)`"
            )
        if found.st_mode & 0o077:
            raise BadArgument(
                f"{where}: others may use it (mode {stat.S_IMODE(found.st_mode):04o}): "
                f"chmod 600 {path}"
            )
        return os.read(fd, _LONGEST).decode("ascii", "replace")
    finally:
        os.close(fd)


def _from_descriptor(number: str) -> str:
    where = f"{SECRET_FD}={number!r}"
    if not re.fullmatch(r"[0-9]{1,6}", number, re.ASCII):
        raise BadArgument(f"{where}: expected the number of an open descriptor")
    fd = int(number)
    try:
        try:
            # From its beginning: ranks that inherit one file share its position.
            raw = os.pread(fd, _LONGEST, 0)
        except OSError:
            raw = _to_the_end(fd)
        os.close(fd)
    except OSError as why:
        raise BadArgument(f"{where}: cannot be read: {why.strerror}") from None
    return raw.decode("ascii", "replace")


def _to_the_end(fd: int) -> bytes:
    """What a pipe holds; its writer need not have closed it once the digits are in."""
    raw = b""
    while len(raw.strip()) < 2 * SIZE and len(raw) < _LONGEST:
        more = os.read(fd, _LONGEST - len(raw))
        if not more:
            break
        raw += more
    return raw
