"""What `unisono.explain` returns: a string, which notebooks show as a picture.

In a terminal it is a string. In a notebook it is the widget, if anywidget is installed
(`pip install 'unisono[notebook]'`), and else a still picture, with a sentence for every
step.
"""

from __future__ import annotations

from html import escape
from importlib.util import find_spec
from typing import Any

from unisono.schedule.schedule import Schedule
from unisono.view.frames import is_small
from unisono.view.svg import to_svg


class Explanation(str):
    """An explanation; `schedule` is what it explains."""

    schedule: Schedule

    def __new__(cls, text: str, schedule: Schedule) -> Explanation:
        """The text, and where it came from."""
        made = super().__new__(cls, text)
        made.schedule = schedule
        return made

    def __repr__(self) -> str:
        """The text itself: it is what a prompt shows."""
        return str(self)

    def html(self, **options: Any) -> str:
        """The page that plays it; options are those of `view.html.to_html`."""
        from unisono.view.html import to_html

        return to_html(self.schedule, **options)

    def widget(self, **options: Any) -> Any:
        """The widget that plays it; MissingExtra where there is no anywidget."""
        from unisono.view.widget import Explainer

        return Explainer(self.schedule, **options)

    def _repr_html_(self) -> str:
        """The picture, and what each step does; nothing in it moves or loads."""
        parts = [f'<div class="unisono-static">{to_svg(self.schedule)}']
        if is_small(self.schedule):
            from unisono.view.story import tell

            story = tell(self.schedule)
            lines = [story.opening, *(beat.caption for beat in story.beats)]
            items = "".join(f"<li>{escape(line)}</li>" for line in lines)
            parts.append(f'<ol start="0">{items}</ol>')
        return "".join([*parts, "</div>"])

    def _repr_mimebundle_(self, **_: Any) -> Any:
        """For Jupyter: the widget where there can be one, and what else there is."""
        still = {"text/plain": str(self), "text/html": self._repr_html_()}
        if find_spec("anywidget") is None or not is_small(self.schedule):
            return still
        made = self.widget()._repr_mimebundle_() or {}
        bundle, about = made if isinstance(made, tuple) else (made, {})
        return still | bundle, about
