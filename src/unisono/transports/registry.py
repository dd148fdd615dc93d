"""Which transports there are, by name.

    get("tcp").connect(options)

Those of this package are found by name. A package that brings another one announces it
by an entry point of the group `unisono.transports`, whose name is the transport's and
whose value is a `Transport` or a class of one:

    [project.entry-points."unisono.transports"]
    mine = "my_package.transport:MyTransport"

A program may also call `register`. A name is taken once.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from unisono.errors import BadArgument, MissingLibrary
from unisono.transports.interface import Transport

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint, EntryPoints

GROUP = "unisono.transports"
FABRIC = "UNISONO_FABRIC"
"""Names the transport of a world, in place of the one that is chosen by default."""

_OURS = {
    "shm": "unisono.transports.shm:SharedMemory",
    "tcp": "unisono.transports.tcp:Tcp",
    "threads": "unisono.transports.threads:Threads",
    "ucx": "unisono.transports.ucx:Ucx",
}
_REGISTERED: dict[str, Transport] = {}


def register(transport: Transport) -> None:
    """Make a transport known by its name; BadArgument if the name is taken."""
    if transport.name in names():
        raise BadArgument(
            f"a transport called {transport.name!r} is registered already; give this "
            "one another name"
        )
    _REGISTERED[transport.name] = transport


def unregister(name: str) -> None:
    """Forget a transport that `register` was given."""
    _REGISTERED.pop(name, None)


def names() -> list[str]:
    """All that `get` would find, those of other packages included."""
    return sorted({*_OURS, *_REGISTERED, *_installed()})


def get(name: str) -> Transport:
    """The transport of this name.

    BadArgument names those that there are; MissingLibrary says what this one lacks on
    this machine.
    """
    found = _REGISTERED.get(name)
    if found is None:
        found = _loaded(name)
    if why := found.unavailable():
        raise MissingLibrary(f"the transport {name!r} cannot be used here: {why}")
    return found


def _loaded(name: str) -> Transport:
    if name in _OURS:
        module, _, attribute = _OURS[name].partition(":")
        found = getattr(import_module(module), attribute)
    elif name in (installed := _installed()):
        found = installed[name].load()
    else:
        raise BadArgument(f"unknown transport {name!r}; there are {', '.join(names())}")
    if isinstance(found, type):
        found = found()
    if not isinstance(found, Transport) or found.name != name:
        raise BadArgument(
            f"the entry point {name!r} of the group {GROUP} is {found!r}: expected a "
            f"Transport whose name is {name!r}"
        )
    return found


def entry_points(group: str) -> EntryPoints:
    """What installed packages declare; imported here, as few worlds need it."""
    from importlib import metadata

    return metadata.entry_points(group=group)


def _installed() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}
