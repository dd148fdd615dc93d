"""Schedules on screen: as text, and as SVG.

Importing this room teaches schedules to draw themselves, in `print` and in notebooks.
"""

from unisono.schedule.schedule import VIEWS
from unisono.view.svg import to_svg
from unisono.view.text import explain, picture

VIEWS.update(text=picture, svg=to_svg)

__all__ = ["explain", "picture", "to_svg"]
