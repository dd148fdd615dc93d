"""Hooks of mkdocs: pictures that move, whole options, a site that fetches nothing.

Pages show a schedule as an image of class `schedule`. `make_pages` draws it, and beside
it writes a page that plays the same schedule; here the one is put in place of the
other, with the image's text as its title. Where there is none the image stays.

Browsers break lines behind hyphens, also behind those that an option begins with. So
options in the text are marked, and `site.css` keeps them whole.

A page that would load a script, a style, a font or a picture from elsewhere ends the
build: the site is read offline, and tells nobody who reads it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_IMAGE = re.compile(r"<img\b[^>]*>")
_FIELD = re.compile(r'\b(alt|class|src)="([^"]*)"')
_CODE = re.compile(r"<pre\b.*?</pre>|<code>[^<]*</code>", re.DOTALL)
_OPTION = re.compile(r"(?<![\w-])--?[A-Za-z][\w-]*")
_FETCHED = re.compile(
    r"""<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)=["']?(?:https?:)?//[^>]*>"""
)


def on_page_content(html: str, *, page: Any, **_: Any) -> str:
    """Called by mkdocs with every page, as it will be read."""
    folder = Path(page.file.abs_src_path).parent

    def live(found: re.Match[str]) -> str:
        fields = dict(_FIELD.findall(found[0]))
        if "schedule" not in fields.get("class", "").split():
            return found[0]
        moving = str(Path(fields["src"]).with_suffix(".html"))
        if not (folder / moving).is_file():
            return found[0]
        return (
            f'<iframe class="schedule" src="{moving}" title="{fields["alt"]}" '
            f'loading="lazy"></iframe><p class="still"><a href="{fields["src"]}">'
            "as a still picture</a></p>"
        )

    return _CODE.sub(_with_whole_options, _IMAGE.sub(live, html))


def _with_whole_options(found: re.Match[str]) -> str:
    if found[0].startswith("<pre"):
        return found[0]  # lines there are as they were written
    return _OPTION.sub(r'<span class="option">\g<0></span>', found[0])


def on_post_page(output: str, *, page: Any, **_: Any) -> str:
    """Called by mkdocs with every page, as it is written."""
    found = _FETCHED.search(output)
    if found:
        raise SystemExit(f"docs: {page.file.src_uri} would fetch {found[0]}")
    return output
