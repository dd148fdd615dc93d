"""When an algorithm is good, when it is not, and what memory it needs, in sentences.

The words are those of the algorithm's file, in one of several languages; how much
memory it is for so many ranks is counted from the schedule.
"""

from __future__ import annotations

from collections.abc import Iterator
from unicodedata import east_asian_width

from unisono.algorithms.advice import Advice, Words
from unisono.algorithms.library import advice_on
from unisono.schedule.schedule import Schedule

_HEADS = {"en": Words("good", "bad", "memory"), "zh": Words("适合", "不适合", "内存")}
_AMOUNT = {
    "en": " At n = {n}: at most {amount:.4g} of a buffer on a rank.",
    "zh": "n = {n} 时：每个 rank 最多 {amount:.4g} 个缓冲区。",
}
_INDENT = 7


def advice(schedule: Schedule, language: str = "en") -> list[tuple[str, str]]:
    """Pairs of a word and a sentence; none for an algorithm without advice."""
    known = advice_on(schedule.collective, schedule.name)
    sentences = []
    for name, one in known:
        rows = sentences_of(one, language)
        sentences += [
            (head, f"{name}: {text}" if len(known) > 1 else text) for head, text in rows
        ]
    if known and (amount := schedule.cost().memory):
        head, text = sentences.pop()
        more = _AMOUNT[language].format(n=schedule.n, amount=amount)
        sentences.append((head, text + more))
    return sentences


def sentences_of(one: Advice, language: str) -> list[tuple[str, str]]:
    """The words of one algorithm, each with its head."""
    words = one.words(language)
    head = _HEADS[language]
    return [
        (head.good, words.good),
        (head.bad, words.bad),
        (head.memory, words.memory),
    ]


def wrapped(head: str, text: str, width: int) -> Iterator[str]:
    """A sentence in lines of so many columns, its head in front of the first.

    Chinese signs are two columns wide, and a line may end after each.
    """
    line = head + " " * (_INDENT - _columns(head))
    for piece in _pieces(text):
        if _columns(line + piece.rstrip()) > width:
            yield line.rstrip()
            line = " " * _INDENT
        line += piece
    yield line.rstrip()


def _pieces(text: str) -> Iterator[str]:
    """Where a line may end: after a space, and between signs that are wide.

    Punctuation stays with what is before it.
    """
    piece = ""
    for sign in text:
        breaks = piece.endswith(" ") or (
            _is_wide(piece[-1:]) and sign not in "，。；：、）"
        )
        if piece and breaks:
            yield piece
            piece = ""
        piece += sign
    yield piece


def _is_wide(sign: str) -> bool:
    return bool(sign) and east_asian_width(sign) in "WF"


def _columns(text: str) -> int:
    return sum(2 if _is_wide(sign) else 1 for sign in text)
