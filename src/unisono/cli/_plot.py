"""Plots in files, by matplotlib: for the commands that draw, and the benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from unisono.errors import BadArgument, MissingExtra
from unisono.results import write_or_keep
from unisono.units import format_bytes

_FORMATS = (".png", ".svg", ".pdf", ".jpg", ".jpeg", ".webp", ".eps", ".ps", ".tif")


def pyplot(option: str) -> Any:
    """`matplotlib.pyplot` without a display; MissingExtra for `option` without it."""
    try:
        matplotlib = import_module("matplotlib")
    except ModuleNotFoundError as missing:
        raise MissingExtra("viz", option) from missing
    matplotlib.use("Agg")
    return import_module("matplotlib.pyplot")


def refuse_unknown_format(path: Path | None) -> None:
    """Refuse a file whose suffix is no format of pictures, before work begins."""
    if path is not None and path.suffix.lower() not in _FORMATS:
        raise BadArgument(
            f"{path}: the suffix is the format of the picture; expected one of "
            + ", ".join(_FORMATS)
        )


def style(axes: Any, *, sizes: Sequence[int] = (), **settings: Any) -> None:
    """Labels, scales and title as `settings` (of `axes.set`), a grid and a legend.

    With `sizes` the x axis shows bytes in powers of two, some of these as ticks.
    """
    axes.set(**settings)
    if sizes:
        axes.set_xscale("log", base=2)
        shown = sizes[:: max(1, len(sizes) // 8)]
        axes.set_xticks(shown, [format_bytes(size) for size in shown])
        axes.tick_params(axis="x", labelrotation=45, labelsize=8)
    axes.title.set_size(9)
    axes.grid(visible=True, alpha=0.3)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=8)


def save(figure: Any, path: Path) -> None:
    """Write the figure to a file whose suffix is the format, and close it."""
    figure.tight_layout()
    try:
        write_or_keep(path, lambda file: figure.savefig(file, dpi=150))
    except ValueError as why:
        if isinstance(why, BadArgument):
            raise
        raise BadArgument(f"{path}: cannot be written: {why}") from why
    finally:
        import_module("matplotlib.pyplot").close(figure)
