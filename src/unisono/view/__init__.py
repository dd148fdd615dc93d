"""Schedules as pictures: as text, as SVG, and as an animated page.

advice      when an algorithm is good and when not, in words
facts       the sentences under every picture
frames      the contents of all slots after each step
named       schedules by their names
captions    what a step does, in one sentence
groups      steps that do the same, put together
text, svg   still pictures; `svg_parts` and `svg_groups` have parts of the latter
layout      the positions of a topology's nodes
story       a schedule with all that a page shows of it, as plain data
assets      the page's code, from the modules in web/
html        the page, in one file
explanation what `explain` returns: text, and more in a notebook
widget      the page as a widget (an extra)
server      a server of pages, on loopback unless another address is named
studio      the page with choices; `studio_answers` answers what it asks
top_page    the page of a job that runs

Importing this package lets schedules draw themselves, in `print` and in notebooks.
"""

from unisono.schedule.schedule import VIEWS
from unisono.view.svg import to_svg
from unisono.view.text import explain, picture

VIEWS.update(text=picture, svg=to_svg)

__all__ = ["explain", "picture", "to_svg"]
