"""How the help of every verb shows its text and its options.

Paragraphs are as wide as the terminal, not as the source; there is no default where
that is nothing.
"""

from __future__ import annotations

import inspect
import re
from typing import TypeVar

from cyclopts import App, Parameter

Documented = TypeVar("Documented")


def with_whole_paragraphs(documented: Documented) -> Documented:
    """A function or a class, with a docstring that has a line for each paragraph.

    An application of its own, as that of `run`, has none.
    """
    if not isinstance(documented, App):
        documented.__doc__ = whole_paragraphs(inspect.getdoc(documented) or "")
    return documented


def whole_paragraphs(text: str) -> str:
    """A docstring in NumPy's style, the lines of each paragraph joined.

    Lines belong together if they are indented alike, and are no names of parameters.
    """
    about, line, parameters = text.partition("\nParameters\n----------\n")
    about = re.sub(r"(?<=\S)\n(?=\S)", " ", about)
    meanings = re.compile(r"(?:^ +\S.*\n)+", re.MULTILINE)
    return about + line + meanings.sub(_one_line, parameters + "\n")


def _one_line(paragraph: re.Match[str]) -> str:
    return "    " + " ".join(paragraph[0].split()) + "\n"


def _default(value: object) -> object:
    return value if value or (value == 0 and value is not False) else None


PARAMETER = Parameter(negative="", show_default=_default)
