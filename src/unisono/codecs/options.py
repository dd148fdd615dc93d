"""How a scheme is written: its name, and after a colon its options.

    topk:0.01                   the first option may be given without its name
    topk:k=1000,momentum=0.9    several are separated by commas

The schemes of this table use a whole tensor, or several steps, to choose what is sent:
they do not encode block by block, and have their own code paths.
"""

from __future__ import annotations

from dataclasses import Field, fields
from typing import Any

from unisono.codecs.powersgd import PowerSGD
from unisono.codecs.randomk import RandomK
from unisono.codecs.topk import TopK
from unisono.errors import BadArgument, unknown

Scheme = TopK | RandomK | PowerSGD
SCHEMES: dict[str, type[Scheme]] = {
    "topk": TopK,
    "randomk": RandomK,
    "powersgd": PowerSGD,
}


def is_scheme(spec: object) -> bool:
    """Whether it is one of these, or names one."""
    if isinstance(spec, str):
        return spec.partition(":")[0] in SCHEMES
    return isinstance(spec, Scheme)


def scheme(spec: str | Scheme) -> Scheme:
    """The scheme of this name; BadArgument lists the options."""
    if isinstance(spec, Scheme):
        return spec
    if not isinstance(spec, str):
        raise BadArgument(
            f"codec: a {type(spec).__name__}: expected a name such as 'topk:0.01'"
        )
    name, _, text = spec.partition(":")
    if name not in SCHEMES:
        raise unknown("codec", name, SCHEMES)
    kind = SCHEMES[name]
    known = {field.name: field for field in fields(kind)}
    options: dict[str, Any] = {}
    for place, part in enumerate(text.split(",") if text else ()):
        key, named, value = part.partition("=")
        if not named and place == 0:
            key, value = next(iter(known)), part
        if key not in known:
            raise unknown(f"option of {name}", key, known)
        options[key] = _number(spec, key, value, known[key])
    return kind(**options)


def _number(spec: str, key: str, value: str, field: Field[Any]) -> float | int:
    whole = "float" not in str(field.type)
    try:
        return int(value) if whole else float(value)
    except ValueError as wrong:
        kind = "a whole number" if whole else "a number"
        raise BadArgument(f"{spec}: {key} = {value!r}: expected {kind}") from wrong
