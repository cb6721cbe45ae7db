"""SHA-256 digests of the files that users supply: data, and modules with their imports from the same folder."""

import ast
import hashlib
import sys
from collections.abc import Iterator
from functools import lru_cache
from importlib.machinery import (
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    ModuleSpec,
    SourceFileLoader,
)
from pathlib import Path

from fedrema.base.user_code import installed_folders, working_folder_importable

Digests = dict[str, str]
"""Digests by file name, or by path relative to the folder from which a module is imported."""
Stamp = tuple[str, int, int, int, int]
"""Path, inode, size, modification and change time; a file with the same stamp is not read again."""

_LOADERS = ((ExtensionFileLoader, EXTENSION_SUFFIXES), (SourceFileLoader, SOURCE_SUFFIXES))
_cache: dict[tuple[str, str], tuple[list[Stamp], Digests]] = {}
"""Results by module and working directory."""
_at_import: dict[str, tuple[ModuleSpec, Digests]] = {}
"""Digests of imported modules at the time of the import: later changes of their files do not affect this process."""


def file_digest(file: Path) -> str:
    """Return the digest of a file's content."""
    return _digest(_stamp(file))


def module_digests(name: str) -> Digests:
    """Return digests of a module's source and of everything it imports, directly or indirectly, from its own folder.

    Imports are found by parsing the source, so nothing is executed; imports with computed names are not found. The
    result is empty if the module does not exist; importing it raises the error.
    """
    spec = getattr(sys.modules.get(name), "__spec__", None)
    if spec is not None and name in _at_import and _at_import[name][0] is spec:
        return _at_import[name][1]
    key = (name, str(Path.cwd()))
    known = _cache.get(key)
    if known is None or not _unchanged(known[0]):
        with working_folder_importable():
            files = dict(sorted(_sources(name)))
        known = [_stamp(file) for file in files.values()], {path: file_digest(file) for path, file in files.items()}
        _cache[key] = known
    if spec is not None:
        _at_import[name] = spec, known[1]
    return known[1]


def _stamp(file: Path) -> Stamp:
    found = file.stat()
    return str(file), found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _unchanged(stamps: list[Stamp]) -> bool:
    try:
        return bool(stamps) and all(_stamp(Path(stamp[0])) == stamp for stamp in stamps)
    except OSError:
        return False


@lru_cache(maxsize=4096)
def _digest(stamp: Stamp) -> str:
    with Path(stamp[0]).open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sources(name: str) -> Iterator[tuple[str, Path]]:
    """Yield the files of a module and of its imports, with their paths relative to the folder it is imported from."""
    top = name.partition(".")[0]
    first = _location(_spec(top))
    if first is None or top == "fedrema":
        return
    home = first.parent
    inside = first if _is_installed(home) else home  # the folder of an installed module holds all installed packages
    pending, seen = [name], set()
    while pending:
        module = pending.pop()
        parts = module.split(".")
        for length in range(1, len(parts) + 1):  # importing a.b executes a/__init__.py too
            one = ".".join(parts[:length])
            spec = _spec(one)
            location = _location(spec)
            if spec is None or location is None or not location.is_relative_to(inside) or parts[0] == "fedrema":
                break
            if inside == home and _is_installed(location):  # a virtual environment inside the folder
                break
            if one in seen:
                continue
            seen.add(one)
            if spec.has_location and spec.origin is not None:
                file = Path(spec.origin)
                yield file.relative_to(home).as_posix(), file
                if file.suffix == ".py":
                    package = one if spec.submodule_search_locations is not None else one.rpartition(".")[0]
                    pending += _imports(_stamp(file), package)


def _spec(name: str) -> ModuleSpec | None:
    """Find a module without importing it or its parent packages."""
    loaded = getattr(sys.modules.get(name), "__spec__", None)
    if isinstance(loaded, ModuleSpec):
        return loaded
    parent = name.rpartition(".")[0]
    if parent:
        outer = _spec(parent)
        within = (outer.submodule_search_locations if outer else None) or []
        # importlib.util.find_spec would import the parent.
        specs = (FileFinder(folder, *_LOADERS).find_spec(name) for folder in within)
    else:
        specs = (finder.find_spec(name, None) for finder in sys.meta_path if hasattr(finder, "find_spec"))
    return next((spec for spec in specs if spec is not None), None)


def _location(spec: ModuleSpec | None) -> Path | None:
    """Return the file of a module, or the folder of a package."""
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    return Path(spec.origin) if spec.has_location and spec.origin else None


@lru_cache(maxsize=1024)
def _imports(source: Stamp, package: str) -> tuple[str, ...]:
    """Return the names of all modules that a file may import."""
    try:
        tree = ast.parse(Path(source[0]).read_bytes())
    except (SyntaxError, ValueError):  # importing it raises the error
        return ()
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return tuple(dict.fromkeys(name for name in names if name))


def _is_installed(path: Path) -> bool:
    return any(path.is_relative_to(folder) for folder in installed_folders())
