"""The page as a widget of Jupyter, VS Code and marimo, by anywidget.

    from unisono.view.widget import Explainer

    Explainer("all_reduce", "ring", 5, topology="switch:5")

One module of the page's own code, joined as for the page; nothing to install on the
side of the notebook. anywidget is an extra: `pip install 'unisono[notebook]'`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from unisono.errors import MissingExtra
from unisono.schedule.schedule import Schedule
from unisono.simulate import CodecModel
from unisono.topology import Topology
from unisono.view.assets import script, text
from unisono.view.story import SIZE, one_or_two, tell

try:
    import anywidget
    import traitlets
except ModuleNotFoundError as missing:
    raise MissingExtra("notebook", "the widget") from missing


class Explainer(anywidget.AnyWidget):
    """A schedule to be played in a notebook; with `beside`, two under one clock."""

    _esm = f"{script('widget')}\nexport default $widget;\n"
    _css = text("style.css")
    stories = traitlets.Unicode("[]").tag(sync=True)

    def __init__(
        self,
        what: Schedule | str,
        algorithm: str = "ring",
        n: int = 4,
        *,
        root: int = 0,
        beside: Schedule | str | None = None,
        topology: Topology | str = "",
        nbytes: int | str = SIZE,
        codec: CodecModel | None = None,
        **options: Any,
    ) -> None:
        """Tell the stories; options are the widget's own, the others of `to_html`."""
        shown = one_or_two(what, algorithm, n, root, beside, topology)
        stories = [tell(s, topology, nbytes, codec=codec) for s in shown]
        super().__init__(stories=msgspec.json.encode(stories).decode(), **options)
