"""Shared libraries of CUDA's, which may be in many places: where they are looked for.

Nothing of CUDA is needed to build or install unisono, so such a library is opened when
it is first used, from the first place that has one that is new enough.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from ctypes import CDLL, c_int
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from unisono.errors import DeviceError

Places = tuple[tuple[str, Callable[[], Iterator[str]]], ...]
"""Names of places for errors, and the paths that there are; without a folder, a name
that the dynamic loader looks for."""


class Versioned(Protocol):
    """A library that was opened."""

    @property
    def version(self) -> tuple[int, ...]:
        """Its version."""


Library = TypeVar("Library", bound=Versioned)


class Search(NamedTuple, Generic[Library]):
    """What a search has found: the library, or one that is too old; where it was."""

    found: Library | None
    too_old: Library | None
    looked: list[str]


def search(
    places: Places, open_library: Callable[[str], Library], oldest: tuple[int, ...]
) -> Search[Library]:
    """The first that can be opened and is at least as new as `oldest`."""
    looked: list[str] = []
    too_old: Library | None = None
    for place, paths in places:
        nothing = True
        for path in paths():
            try:
                found = open_library(path)
            except OSError as why:
                if "/" in path:
                    looked.append(f"{place}: {why}")
                    nothing = False
                continue
            if found.version >= oldest:
                return Search(found, None, looked)
            looked.append(f"{place}: {found} is too old")
            too_old, nothing = found, False
        if nothing:
            looked.append(f"{place}: nothing")
    return Search(None, too_old, looked)


def find_library(
    variable: str,
    places: Places,
    open_library: Callable[[str], Library],
    oldest: tuple[int, ...],
    *,
    unusable: Callable[[str, OSError], DeviceError],
    too_old: Callable[[Library], DeviceError],
    missing: Callable[[list[str]], DeviceError],
) -> Library:
    """The library that an environment variable names, or the first that places have.

    The errors say what is wrong with the one that is named, or the best that was found.
    """
    if path := os.environ.get(variable, ""):
        try:
            named = open_library(path)
        except OSError as why:
            raise unusable(path, why) from None
        if named.version < oldest:
            raise too_old(named)
        return named
    found, older, looked = search(places, open_library, oldest)
    if found is not None:
        return found
    if older is not None:
        raise too_old(older)
    raise missing([f"{variable}: not set", *looked])


def function_of(
    library: CDLL, name: str, arguments: Sequence[Any]
) -> Callable[..., int]:
    """A function that returns an int; OSError if the library does not have it."""
    try:
        function = getattr(library, name)
    except AttributeError:
        raise OSError(f"{library._name} has no {name}") from None
    function.argtypes, function.restype = arguments, c_int
    return function  # type: ignore[no-any-return]


def loaded(file: re.Pattern[str]) -> Iterator[str]:
    """Libraries of such names that this process has mapped."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return
    paths = dict.fromkeys(line[line.find("/") :] for line in lines if "/" in line)
    yield from newest_first((Path(path) for path in paths), file)


def package_folders(name: str) -> list[Path]:
    """Where a package lies, without importing it; wheels may share one in pieces."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return []
    folders = spec.submodule_search_locations if spec is not None else None
    return [Path(folder) for folder in folders or ()]


def newest_first(paths: Iterable[Path], file: re.Pattern[str]) -> list[str]:
    """Those of such names, whose group `version` is compared."""
    found = [path for path in paths if file.fullmatch(path.name)]
    return [str(p) for p in sorted(found, key=lambda p: numbers(p, file), reverse=True)]


def numbers(path: Path, file: re.Pattern[str]) -> list[int]:
    """The version in a file's name; one without goes last: it is a link."""
    match = file.fullmatch(path.name)
    text = match["version"] if match else path.name
    return [int(number) for number in re.findall(r"\d+", text)]
