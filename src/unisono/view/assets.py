"""The page's code, as one script and one style.

The source is in `web/`: small modules in plain JavaScript, with types that `tsc`
checks. A self-contained page cannot import, so the modules are joined here: each
becomes a function that is called once, after those that it imports, and returns its
exports. Types are comments for `tsc` and are removed. There is no other build step.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files

_IMPORT = re.compile(r'^import (\{[^}]*\}) from "\./([a-z_]+)\.js";$', re.MULTILINE)
_TYPES = re.compile(r"[ ]*/\*\*.*?\*/\n?", re.DOTALL)
_EXPORT = re.compile(r"^export ((?:async )?(?:function|class|const) (\w+))", re.M)


def text(name: str) -> str:
    """One file of `web/`."""
    return (files("unisono.view") / "web" / name).read_text(encoding="utf-8")


@cache
def script(entry: str) -> str:
    """The module `entry` with all that it imports, in one piece."""
    parts: dict[str, str] = {}
    _join(entry, parts)
    return "\n".join(parts.values())


def _join(module: str, parts: dict[str, str]) -> None:
    source = _TYPES.sub("", text(f"{module}.js"))
    for _, needed in _IMPORT.findall(source):
        if needed not in parts:
            _join(needed, parts)
    given = ", ".join(name for _, name in _EXPORT.findall(source))
    body = _EXPORT.sub(r"\1", _IMPORT.sub(r"const \1 = $\2;", source)).strip()
    whole = f"{body}\nreturn {{ {given} }};"
    parts[module] = f"const ${module} = (() => {{\n{whole}\n}})();"


def digest(content: str) -> str:
    """How a content security policy names an inline script or style."""
    raw = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(raw).decode()}'"
