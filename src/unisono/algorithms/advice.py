"""When an algorithm is good and when it is not, in words of several languages.

A file of algorithms says it once, in its constant `ADVICE`, for all its collectives.
"""

from __future__ import annotations

from dataclasses import dataclass

from unisono.errors import unknown

LANGUAGES = ("en", "zh")
"""The languages that every algorithm of the library has words in."""


@dataclass(frozen=True)
class Words:
    """When it is good, when it is not, and what memory it needs; a sentence or two."""

    good: str
    bad: str
    memory: str


@dataclass(frozen=True)
class Advice:
    """The same words in each language."""

    en: Words
    zh: Words

    def words(self, language: str) -> Words:
        """The words in a language; BadArgument if there are none."""
        if language not in LANGUAGES:
            raise unknown("language", language, LANGUAGES)
        found: Words = getattr(self, language)
        return found
