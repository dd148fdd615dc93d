"""The studio: the page with choices, served to this machine's own browser.

Names are looked up, no file is opened and no code of others is run; `server` says who
is answered.
"""

from __future__ import annotations

from unisono.view import studio_answers
from unisono.view.assets import script, text
from unisono.view.server import Answers, Files, PageServer

_FILES: Files = {
    "/": ("text/html", lambda: text("studio.html")),
    "/studio.js": ("text/javascript", lambda: script("studio")),
    "/style.css": ("text/css", lambda: text("style.css")),
    "/api/strategies": ("application/json", lambda: text("strategies.json")),
    "/api/truth": ("application/json", lambda: text("truth.json")),
}
_ANSWERS: Answers = {
    "/api/choices": studio_answers.choices,
    "/api/stories": studio_answers.stories,
    "/api/curves": studio_answers.curves,
    "/api/links": studio_answers.links,
    "/api/trees": studio_answers.trees,
}


class Studio(PageServer):
    """The server of the studio, on loopback."""

    def __init__(self, port: int = 0, more: Answers | None = None) -> None:
        """Bind to loopback; port 0 is any that is free.

        `more` are answers of packages that this one does not know: those to searches.
        """
        super().__init__("studio", _FILES, {**_ANSWERS, **(more or {})}, port=port)
