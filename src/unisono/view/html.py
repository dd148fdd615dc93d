"""A self-contained page: play, pause and scrub a schedule, in four views.

Everything is in the one file (under 500 KiB up to 16 ranks), nothing is loaded, and a
content security policy with the digests of its own script and style lets nothing else
run. `story` makes its data; the modules in `web/` draw it.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import msgspec

from unisono.schedule.schedule import Schedule
from unisono.simulate import CodecModel
from unisono.topology import Topology
from unisono.view.assets import digest, script, text
from unisono.view.story import SIZE, Story, one_or_two, tell


def to_html(
    what: Schedule | str,
    algorithm: str = "ring",
    n: int = 4,
    *,
    root: int = 0,
    beside: Schedule | str | None = None,
    topology: Topology | str = "",
    nbytes: int | str = SIZE,
    codec: CodecModel | None = None,
) -> str:
    """The page of a schedule; with `beside`, of two under one clock.

    It is given as such, or by names, as to `explain`; `beside` may be the name of
    another algorithm for the same call. Times are simulated for `nbytes` a rank on
    `topology` (a link from every rank to every other, if none is given). Raises
    ScheduleError if a schedule is wrong.
    """
    shown = one_or_two(what, algorithm, n, root, beside, topology)
    return page([tell(s, topology, nbytes, codec=codec) for s in shown])


def page(stories: Sequence[Story]) -> str:
    """The HTML text of a page with these stories."""
    style, code = text("style.css"), script("start")
    title = " beside ".join(story.title for story in stories)
    policy = (
        f"default-src 'none'; script-src {digest(code)}; style-src {digest(style)}; "
        "base-uri 'none'; form-action 'none'"
    )
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>",
            f"<style>{style}</style>",
            "</head>",
            '<body class="unisono-page">',
            '<main class="unisono" id="unisono">',
            f"<h1>{escape(title)}</h1>",
            *(_embedded(story) for story in stories),
            "</main>",
            f'<script type="application/json" id="stories">{_json(stories)}</script>',
            f'<script type="module">{code}</script>',
            "</body>",
            "</html>\n",
        ]
    )


def _embedded(story: Story) -> str:
    """The story in words, which is all that is left where scripts do not run."""
    lines = [story.opening, *(beat.caption for beat in story.beats)]
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<ol start="0">{items}</ol>'


def _json(stories: Sequence[Story]) -> str:
    """JSON that cannot end the element it lies in."""
    return msgspec.json.encode(list(stories)).decode().replace("<", "\\u003c")
