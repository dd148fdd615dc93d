"""Finding algorithms by name: in this folder, in installed packages, in files."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import re
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

from unisono.algorithms.advice import Advice
from unisono.algorithms.registry import FROM_FILE, Algorithm, Param, line_in
from unisono.errors import BadArgument, NotOffered, UnisonoError, unknown
from unisono.schedule.collective import COLLECTIVES, Collective, collective
from unisono.schedule.schedule import Schedule
from unisono.schedule.transform import then

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "unisono.algorithms"
_OURS = ("advice", "choices", "registry", "library")
_PAIR = re.compile(r"\+(?=[A-Za-z_])")
_FILE = re.compile(r"(?P<path>.+?\.py)(?::(?P<params>.*))?")


def algorithms_in(module: ModuleType) -> list[Algorithm]:
    """The algorithms that a module itself defines, in the order of its lines."""
    algorithms = [
        a
        for a in vars(module).values()
        if isinstance(a, Algorithm) and a.module == module.__name__
    ]
    return sorted(algorithms, key=lambda a: a.body.__code__.co_firstlineno)


class Library(Mapping[tuple[str, str], Algorithm]):
    """Algorithms by (collective, name)."""

    def __init__(self, algorithms: Iterable[Algorithm]) -> None:
        """Later ones do not replace earlier ones of the same name."""
        self._by_key: dict[tuple[str, str], Algorithm] = {}
        for a in algorithms:
            self._by_key.setdefault((a.collective.name, a.name), a)

    def __getitem__(self, key: tuple[str, str]) -> Algorithm:
        """The algorithm of that collective and name."""
        return self._by_key[key]

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """Keys: collectives in their usual order, names in the alphabet's."""
        order = list(COLLECTIVES)
        return iter(sorted(self._by_key, key=lambda k: (order.index(k[0]), k[1])))

    def __len__(self) -> int:
        """How many there are."""
        return len(self._by_key)

    def find(self, what: Collective, name: str) -> Algorithm:
        """The algorithm `name` for `what`, or BadArgument with the nearest names."""
        if (what.name, name) in self._by_key:
            return self._by_key[what.name, name]
        names = [a for c, a in self._by_key if c == what.name]
        elsewhere = [c for c, a in self if a == name]
        if elsewhere:
            others = f"; {what.name} has {', '.join(sorted(names))}" if names else ""
            raise NotOffered(
                f"{name} has no {what.name}, only {', '.join(elsewhere)}{others}"
            )
        raise NotOffered(str(unknown(f"algorithm for {what.name}", name, names)))


def _ours(what: Collective, name: str) -> Algorithm | None:
    """The algorithm of this folder, from the file of its name alone.

    To look through the whole folder and all that is installed takes a tenth of a
    second, which the first call of a program need not.
    """
    candidates = (a for a in _in_our_file(name) if a.collective is what)
    return next((a for a in candidates if a.name == name), None)


def _in_our_file(name: str) -> list[Algorithm]:
    if not name.isidentifier() or name in _OURS:
        return []
    try:
        return algorithms_in(importlib.import_module(f"{__package__}.{name}"))
    except ModuleNotFoundError:
        return []


def offers(name: str, collective_name: str) -> bool:
    """Whether the algorithm called `name` has that collective."""
    ours = [a.collective.name for a in _in_our_file(name)]
    return collective_name in ours if ours else (collective_name, name) in library()


@cache
def library() -> Library:
    """All algorithms of this folder and of installed packages."""
    from importlib.metadata import (
        entry_points,  # slow to import, and few worlds need it
    )

    package = sys.modules[__package__]
    names = [
        m.name for m in pkgutil.iter_modules(package.__path__) if m.name not in _OURS
    ]
    built_in = [importlib.import_module(f"{__package__}.{name}") for name in names]
    algorithms = [a for module in built_in for a in algorithms_in(module)]
    for entry in entry_points(group=GROUP):
        taken = {(a.collective.name, a.name) for a in algorithms}
        for a in _offered(entry):
            if (a.collective.name, a.name) in taken:
                _left_out(entry, f"{a.name}.{a.collective.name} exists already")
            else:
                algorithms.append(a)
    return Library(algorithms)


def _offered(entry: EntryPoint) -> list[Algorithm]:
    """What an installed package offers; a broken one is reported and passed over."""
    try:
        thing = entry.load()
    except Exception as why:
        _left_out(entry, repr(why))
        return []
    things = vars(thing).values() if isinstance(thing, ModuleType) else [thing]
    algorithms = [a for a in things if isinstance(a, Algorithm)]
    if not algorithms:
        _left_out(entry, "it has no @algorithm")
    return algorithms


def _left_out(entry: EntryPoint, why: str) -> None:
    warnings.warn(f"algorithms of {entry.value} left out: {why}", stacklevel=4)


class Spec(NamedTuple):
    """An algorithm as people name it, and what the files in it held when it was read.

    `files` has, for every path in the name, the module that its content became. So two
    that are equal mean the same steps, even if a file is edited between them.
    """

    name: str
    files: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        """The name."""
        return self.name


def read(algorithm: str) -> Spec:
    """The name with the content that its files have now; BadArgument if not."""
    if ".py" not in algorithm:
        return Spec(algorithm)
    matches = (_FILE.fullmatch(part) for part in _parts(algorithm))
    paths = dict.fromkeys(file["path"] for file in matches if file)
    return Spec(algorithm, tuple((path, _read_file(path)) for path in paths))


_LOADING = threading.RLock()
"""Held while a file is run: until then its module is in sys.modules, and incomplete."""


def _read_file(path: str) -> str:
    """The module of a file's content, loaded unless it was before."""
    file, source = _source(path)
    name = _module_name(file, source)
    with _LOADING:
        if name not in sys.modules:
            _load(path, file, source)
    return name


def load_file(path: str | Path) -> list[Algorithm]:
    """The algorithms defined in a Python file; BadArgument, with the line, if not."""
    with _LOADING:
        return _load(path, *_source(path))


def _source(path: str | Path) -> tuple[Path, bytes]:
    file = Path(path).resolve()
    if not file.is_file():
        raise BadArgument(f"{path}: no such file")
    try:
        return file, file.read_bytes()
    except OSError as why:
        raise BadArgument(f"{path}: {why.strerror}") from why


def _module_name(file: Path, source: bytes) -> str:
    """A name of its own, so that a user's json.py is not the standard library's."""
    identity = b"\0".join([str(file).encode(errors="surrogateescape"), source])
    return FROM_FILE + blake2b(identity, digest_size=16).hexdigest()


def _load(path: str | Path, file: Path, source: bytes) -> list[Algorithm]:
    name = _module_name(file, source)
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None:
        raise BadArgument(f"{path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    before, sys.modules[name] = sys.modules.get(name), module
    try:
        algorithms = _run(path, file, source, module)
    except BaseException:  # what did not load is not there
        del sys.modules[name]
        if before is not None:
            sys.modules[name] = before
        raise
    return algorithms


def _run(
    path: str | Path, file: Path, source: bytes, module: ModuleType
) -> list[Algorithm]:
    """Run a file's content as a module.

    It is compiled here: Python's own cache would take a file for unchanged that has
    been edited within a second.
    """
    sys.path.insert(
        0, str(file.parent)
    )  # as for a script: its helpers are in its folder
    try:
        exec(compile(source, str(file), "exec", dont_inherit=True), vars(module))
    except SyntaxError as why:
        where = f"{file}:{why.lineno}" if why.lineno else str(file)
        raise BadArgument(f"{where}: {why.msg}") from why
    except UnisonoError:
        raise
    except KeyboardInterrupt:
        raise
    except BaseException as why:  # any exception of a file is reported as its error
        where = line_in(str(file), why) or str(file)
        raise BadArgument(f"{where}: {type(why).__name__}: {why}") from why
    finally:
        sys.path.remove(str(file.parent))
    algorithms = algorithms_in(module)
    if not algorithms:
        raise BadArgument(f"{path}: no function in it is decorated with @algorithm")
    return algorithms


def schedule(
    collective_name: str,
    algorithm: str | Spec,
    n: int,
    *,
    root: int = 0,
    **params: Param,
) -> Schedule:
    """The schedule of a collective by an algorithm, for n ranks: pure data.

    The algorithm is a name as `ring`, `tree:radix=4` or `ring+recursive_doubling`, or
    the path of a Python file; parameters can also be given by keyword.
    """
    spec = algorithm if isinstance(algorithm, Spec) else Spec(algorithm)
    for name in (collective_name, spec.name):
        if not isinstance(name, str):
            raise BadArgument(
                f"{name!r}: expected the name of a collective or algorithm"
            )
    what = collective(collective_name)
    return _resolve(what, spec.name, n, root, params, dict(spec.files))


def _parts(spec: str) -> list[str]:
    """The names that a name is joined of."""
    file = _FILE.fullmatch(spec)
    alone = (
        file and Path(file["path"]).exists() and not _PAIR.search(file["params"] or "")
    )
    return [spec] if alone else _PAIR.split(spec)


def _resolve(
    what: Collective,
    spec: str,
    n: int,
    root: int,
    params: Mapping[str, Param],
    files: Mapping[str, str],
) -> Schedule:
    parts = _parts(spec)
    if len(parts) == 2:
        return _pair(what, (parts[0], parts[1]), n, root, params, files)
    if len(parts) > 2:
        raise BadArgument(f"algorithm {spec!r}: at most two can be joined by +")
    found = find(what, spec, files)
    return found[0].rooted_at(root, n, {**found[1], **params})


def find(
    what: Collective, spec: str, files: Mapping[str, str] | None = None
) -> tuple[Algorithm, dict[str, Param]]:
    """The algorithm that a name means, and the parameters given in it.

    `files` are those that have been read before: the module of each path.
    """
    from_file = _FILE.fullmatch(spec)
    if from_file:
        path, module = from_file["path"], (files or {}).get(from_file["path"])
        found = algorithms_in(sys.modules[module]) if module else load_file(path)
        chosen = Library(found).find(what, Path(path).stem)
        return chosen, _parsed_params(chosen, from_file["params"] or "")
    name, _, params = spec.partition(":")
    chosen = _ours(what, name) or library().find(what, name)
    return chosen, _parsed_params(chosen, params)


def _parsed_params(algorithm: Algorithm, text: str) -> dict[str, Param]:
    """Parameters from "radix=4,both": by the type of their defaults."""
    params: dict[str, Param] = {}
    for item in filter(None, text.split(",")):
        key, _, value = item.partition("=")
        default = algorithm.params.get(key, "")
        if isinstance(default, bool) and value.lower() in ("", "true", "false"):
            params[key] = value.lower() != "false"
        elif isinstance(default, int) and re.fullmatch(r"-?[0-9]{1,18}", value):
            params[key] = int(value)
        else:
            params[key] = value
    return params


_HALVES = {
    "all_reduce": ("reduce_scatter", "all_gather"),
    "broadcast": ("scatter", "all_gather"),
    "reduce": ("reduce_scatter", "gather"),
}


def advice_on(what: Collective, spec: str) -> list[tuple[str, Advice]]:
    """The advice of each algorithm that a name is joined of, where there is any."""
    parts, halves = _parts(spec), [what]
    if len(parts) > 1:
        halves = [collective(half) for half in _HALVES.get(what.name, ())]
    found = []
    for half, part in zip(halves, parts, strict=False):
        try:
            chosen, _ = find(half, part)
        except BadArgument:  # not in the library: a file of the user's
            continue
        if chosen.advice is not None:
            found.append((chosen.name, chosen.advice))
    return found


def _pair(
    what: Collective,
    names: tuple[str, str],
    n: int,
    root: int,
    params: Mapping[str, Param],
    files: Mapping[str, str],
) -> Schedule:
    first, second = names
    if params:
        raise BadArgument(
            f"{first}+{second}: write parameters into the name, as in tree:radix=4"
        )
    if what.name not in _HALVES:
        known = ", ".join(_HALVES)
        raise NotOffered(
            f"{what.name} cannot be made of two others; pairs exist for {known}"
        )
    if root and not what.rooted:
        raise BadArgument(f"{what.name} has no root")
    one, two = (collective(half) for half in _HALVES[what.name])
    a, b = (
        _resolve(half, name, n, root if half.rooted else 0, {}, files)
        for half, name in ((one, first), (two, second))
    )
    about = f"{one.name} by {a.name}, then {two.name} by {b.name}."
    return then(a, b).but(name=f"{a.name}+{b.name}", about=about)
