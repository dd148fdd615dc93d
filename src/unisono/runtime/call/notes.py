"""What is told of a call: to other ranks in a note, to its own rank in full.

A note is written at the beginning of every call, for the error message if ranks differ,
and kept by the flight recorder. It has a fixed size, so long names are shortened in it.
What a name is in full is remembered here, by the call's fingerprint: records, traces
and `explain` of a rank tell of its own calls alone, and so they have it.
"""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import NamedTuple

from unisono._native import NOTE_BYTES

LABEL_BYTES = 40
CODEC_BYTES = 24
SHAPE_BYTES = 40
"""The most that these take of a note; the algorithm has the rest."""

REMEMBERED = 1 << 14
"""Of so many plans the names are known in full; of older ones as in their notes."""

_CUT = ".."
_ALL_FITS = min(LABEL_BYTES, CODEC_BYTES, SHAPE_BYTES)


class Names(NamedTuple):
    """What a call is named by, each as text; empty where there is none."""

    algorithm: str = ""
    label: str = ""
    codec: str = ""
    shape: str = ""


class Note(NamedTuple):
    """A note as the native core tells it."""

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
    def names(self) -> Names:
        """The names in it, in full if this process made the call's plan."""
        found = _REMEMBERED.get(self.fingerprint)
        return found or Names(self.algorithm, self.label, self.codec, self.shape)


_REMEMBERED: OrderedDict[int, Names] = OrderedDict()
_LOCK = Lock()


def remember(fingerprint: int, names: Names) -> None:
    """Know the names of calls with this fingerprint in full."""
    with _LOCK:  # ranks may be threads
        _REMEMBERED[fingerprint] = names
        _REMEMBERED.move_to_end(fingerprint)
        if len(_REMEMBERED) > REMEMBERED:
            _REMEMBERED.popitem(last=False)


def named(fingerprint: int) -> Names | None:
    """The names of a call in full, if they are remembered."""
    return _REMEMBERED.get(fingerprint)


def in_short(names: Names) -> list[str]:
    """The texts of a note. What is too long is cut, where it says least.

    Labels count at their end ("step 12, bucket 3"); an algorithm begins with what it
    is and ends with its parameters, or with the name of its file.
    """
    whole = "".join(names)
    if whole.isascii() and len(whole) <= _ALL_FITS:
        return list(names)
    label = _end(_sound(names.label), LABEL_BYTES)
    codec = _beginning(_sound(names.codec), CODEC_BYTES)
    shape = _beginning(names.shape, SHAPE_BYTES)
    room = NOTE_BYTES - sum(_size(text) for text in (label, codec, shape))
    return [_both_ends(_sound(names.algorithm), room), label, codec, shape]


def shape_text(shape: tuple[int, ...] | None) -> str:
    """As in "[2, 6]"; empty if the caller told none."""
    return "" if shape is None else str(list(shape))


def _sound(text: str) -> str:
    """The same without what has no UTF-8, as names of files may have."""
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
