"""States with dicts in dicts, as those of optimizers, as flat tensors and a text.

    {"model": {"weight": W}, "step": 7}   ->   {"model.weight": W}, and as JSON
                                               the dicts, lists and plain values

A safetensors file has tensors by name and one dict of texts, its metadata, where the
JSON goes. A state of tensors only needs none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from unisono.errors import BadArgument, Corrupted

_PLAIN = bool | int | float | str | None
KEY = "unisono.state"
"""Where the metadata of a file has the JSON."""


def flatten_state(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], str]:
    """The tensors by name, and a text for the rest; it is empty if there is none."""
    if all(isinstance(value, Tensor) for value in state.values()):
        return dict(state), ""
    tensors: dict[str, Tensor] = {}
    return tensors, json.dumps(_flatten(state, "", tensors))


def restore_state(tensors: Mapping[str, Tensor], text: str) -> dict[str, Any]:
    """The inverse of `flatten_state`; Corrupted if the text is none of its own."""
    try:
        state = _restore(json.loads(text), tensors)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Corrupted(f"the state's description is damaged: {error!r}") from error
    if not isinstance(state, dict):
        raise Corrupted("the state's description is damaged: it is no dict")
    return state


def _flatten(value: object, name: str, tensors: dict[str, Tensor]) -> list[Any]:
    """What JSON can hold of a value; its tensors are put into `tensors`."""
    inside = f"{name}." if name else ""
    if isinstance(value, Tensor):
        unique = name
        while unique in tensors:  # {"a": {"b": x}, "a.b": y}
            unique += "'"
        tensors[unique] = value
        return ["tensor", unique]
    if isinstance(value, Mapping):
        for key in value:
            if isinstance(key, bool) or not isinstance(key, str | int):
                raise BadArgument(
                    f"save_checkpoint: {name or 'the state'} has the key {key!r}; "
                    "expected strings and whole numbers"
                )
        items = value.items()
        return ["dict", [[k, _flatten(v, f"{inside}{k}", tensors)] for k, v in items]]
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        each = enumerate(value)
        return [kind, [_flatten(v, f"{inside}{i}", tensors) for i, v in each]]
    if isinstance(value, _PLAIN):
        return ["value", value]
    raise BadArgument(
        f"save_checkpoint: {name} is {type(value).__name__}; expected tensors of "
        "numbers, plain values, and dicts, lists and tuples of these"
    )


def _restore(node: Any, tensors: Mapping[str, Tensor]) -> Any:
    kind, value = node
    if kind == "tensor":
        return tensors[value]
    if kind == "dict":
        return {k: _restore(v, tensors) for k, v in value}
    if kind in ("list", "tuple"):
        items = [_restore(v, tensors) for v in value]
        return items if kind == "list" else tuple(items)
    if kind == "value" and isinstance(value, _PLAIN):
        return value
    raise ValueError(f"unknown entry {kind!r}")
