"""The verbs together: every module here that defines a function of its own name.

A module may list functions in BELOW: nested verbs, as in `simulate train`.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys

from cyclopts import App, CycloptsError

import unisono
from unisono.cli._help import PARAMETER, with_whole_paragraphs
from unisono.errors import BadArgument

_NOT_VERBS = ("app", "output")


def make_app(verb: str = "") -> App:
    """The application with all its verbs, or quickly with `verb` alone if it is one."""
    app = _app("unisono", "Collective algorithms as data: verified, drawn, costed.")
    package = sys.modules[__package__]
    names = [module.name for module in pkgutil.iter_modules(package.__path__)]
    verbs = [name for name in names if name not in _NOT_VERBS and name[0] != "_"]
    for name in [verb] if verb in verbs else verbs:
        module = importlib.import_module(f"{__package__}.{name}")
        below = getattr(module, "BELOW", ())
        if not below:
            app.command(with_whole_paragraphs(getattr(module, name)))
            continue
        inner = _app(name)
        inner.default(with_whole_paragraphs(getattr(module, name)))
        for function in below:
            inner.command(with_whole_paragraphs(function))
        app.command(inner)
    return app


def _app(name: str, about: str | None = None) -> App:
    return App(
        name=name,
        version=unisono.__version__,
        help_format="plaintext",
        exit_on_error=False,
        print_error=False,
        suppress_keyboard_interrupt=False,
        result_action="return_value",
        default_parameter=PARAMETER,
        help=about,
    )


def run(arguments: list[str]) -> int:
    """Parse and carry out one command; its exit code."""
    app = make_app(arguments[0] if arguments else "")
    try:
        result = app(arguments)
    except CycloptsError as wrong:
        verb = [a for a in arguments[:1] if a in app]
        where = " ".join(["unisono", *verb])
        raise BadArgument(f"{wrong} (see {where} --help)") from wrong
    return result if isinstance(result, int) else 0
