"""Signs that a terminal's encoding lacks, in plain letters."""

from __future__ import annotations

import codecs

_PLAIN = {
    **dict.fromkeys("·•", "."),
    **dict.fromkeys("→▶►", ">"),
    **dict.fromkeys("←◀", "<"),
    **dict.fromkeys("─━═–—−", "-"),
    **dict.fromkeys("│┃║", "|"),
    **dict.fromkeys("┌┐└┘├┤┬┴┼╭╮╯╰┏┓┗┛┡┩╇", "+"),
    **dict.fromkeys("█▉▊▋▌▍▎▏▇▆▅▄▃▂▁", "#"),
    "×": "x",
    "µ": "u",
    "±": "+-",
    "²": "^2",
    "≤": "<=",
    "≥": ">=",
    "…": "...",
    "α": "alpha",
    "β": "beta",
}
NAME = "unisono-plain"
"""The name of this way to treat errors, for `reconfigure`."""


def _plain(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    signs = error.object[error.start : error.end]
    return "".join(_PLAIN.get(sign, "?") for sign in signs), error.end


codecs.register_error(NAME, _plain)
