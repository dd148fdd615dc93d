"""Descriptions of calls: short notes for other ranks, full names for the own rank.

A note is written at the beginning of every call, for the error message if ranks differ,
and kept by the flight recorder. It has a fixed size, so long names are cut in it. Full
names are kept here, by the call's fingerprint: records, traces and `explain` describe a
rank's own calls, so they find them.
"""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import NamedTuple

from unisono._native import NOTE_BYTES

LABEL_BYTES = 40
CODEC_BYTES = 24
SHAPE_BYTES = 40
"""The most bytes that these take of a note; the algorithm has the rest."""

MAX_FULL_NAMES = 1 << 14
"""Names that a note cuts are kept in full for this many plans."""

_CUT = ".."
_SHORT = min(LABEL_BYTES, CODEC_BYTES, SHAPE_BYTES)


class CallNames(NamedTuple):
    """The names of a call's options as text; empty where there is none."""

    algorithm: str = ""
    label: str = ""
    codec: str = ""
    shape: str = ""


class Note(NamedTuple):
    """A note as the native core returns it."""

    seq: int
    collective: int
    dtype: int
    op: int
    root: int
    elements: int
    fingerprint: int
    content: int
    algorithm: str
    label: str
    codec: str
    shape: str

    @property
    def names(self) -> CallNames:
        """The names, in full if this process made the call's plan."""
        found = _FULL_NAMES.get(self.fingerprint)
        return found or CallNames(self.algorithm, self.label, self.codec, self.shape)


_FULL_NAMES: OrderedDict[int, CallNames] = OrderedDict()
_LOCK = Lock()


def remember(fingerprint: int, names: CallNames) -> None:
    """Keep the full names of calls with this fingerprint, which a note has cut."""
    with _LOCK:  # ranks may be threads
        _FULL_NAMES[fingerprint] = names
        _FULL_NAMES.move_to_end(fingerprint)
        if len(_FULL_NAMES) > MAX_FULL_NAMES:
            _FULL_NAMES.popitem(last=False)


def named(fingerprint: int) -> CallNames | None:
    """The full names of a call, if they are kept."""
    return _FULL_NAMES.get(fingerprint)


def in_short(names: CallNames) -> list[str]:
    """The texts of a note; long ones are cut.

    A label keeps its end ("step 12, bucket 3"); an algorithm keeps its name at the
    beginning and its parameters or file name at the end.
    """
    whole = "".join(names)
    if whole.isascii() and len(whole) <= _SHORT:
        return list(names)
    label = _end(_encodable(names.label), LABEL_BYTES)
    codec = _beginning(_encodable(names.codec), CODEC_BYTES)
    shape = _beginning(names.shape, SHAPE_BYTES)
    room = NOTE_BYTES - sum(_size(text) for text in (label, codec, shape))
    return [_both_ends(_encodable(names.algorithm), room), label, codec, shape]


def shape_text(shape: tuple[int, ...] | None) -> str:
    """As in "[2, 6]"; empty without a shape."""
    return "" if shape is None else str(list(shape))


def _encodable(text: str) -> str:
    """The text without characters that have no UTF-8, which file names may contain."""
    return text.encode(errors="replace").decode()


def _size(text: str) -> int:
    return len(text.encode())


def _beginning(text: str, most: int) -> str:
    if _size(text) <= most:
        return text
    return text.encode()[: most - len(_CUT)].decode(errors="ignore") + _CUT


def _end(text: str, most: int) -> str:
    if _size(text) <= most:
        return text
    return _CUT + text.encode()[len(_CUT) - most :].decode(errors="ignore")


def _both_ends(text: str, most: int) -> str:
    if _size(text) <= most:
        return text
    first = most // 3
    return _beginning(text, first) + _end(text, most - first).removeprefix(_CUT)
