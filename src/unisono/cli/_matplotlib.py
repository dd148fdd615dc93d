"""Pictures in files, for the verbs that draw some."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from unisono.errors import BadArgument, MissingExtra


def pyplot(option: str) -> Any:
    """What draws without a window; MissingExtra for `option` if it is not there."""
    try:
        matplotlib = import_module("matplotlib")
    except ModuleNotFoundError as missing:
        raise MissingExtra("viz", option) from missing
    matplotlib.use("Agg")
    return import_module("matplotlib.pyplot")


def save(figure: Any, path: Path) -> None:
    """Write it to a file whose name says the format, and let go of it."""
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as why:
        raise BadArgument(f"{path}: cannot be written: {why}") from why
    finally:
        import_module("matplotlib.pyplot").close(figure)
