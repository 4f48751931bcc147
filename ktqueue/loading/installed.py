"""Objects that installed packages offer under entry points. A package is imported when an entry is first used.

Only packages on Python's path are seen, never files of a model folder.
"""

import sys
from collections.abc import Callable, Iterator
from functools import cache
from importlib.metadata import (
    EntryPoint,
    EntryPoints,
    PackageNotFoundError,
    distribution,
    entry_points,
    packages_distributions,
)
from typing import Any, TypeVar

from ktqueue.core.errors import CheckpointError

FAMILIES = "ktqueue.families"
"""A transformers model_type = package.module:NAME of a Family."""
FORMATS = "ktqueue.formats"
"""The name of a storage format = package.module:NAME of a StorageFormat."""

Kind = TypeVar("Kind")


def entry_names(group: str) -> list[str]:
    """Return the names of all entries of a group. Imports nothing."""
    return sorted({point.name for point in _entries(group)})


def package_of(group: str, name: str) -> str | None:
    """Return name and version of the package with that entry, such as `warm-moe 1.0`, or None. Imports nothing."""
    return next((_package(point) for point in _entries(group).select(name=name)), None)


def package_of_module(module: str) -> str | None:
    """Return name and version of the package that installed a module, or None."""
    names = packages_distributions().get(module.partition(".")[0])
    try:
        return f"{names[0]} {distribution(names[0]).version}" if names else None
    except PackageNotFoundError:
        return None


def describe(group: str, name: str) -> str:
    """Return what an error says about an entry: its package, its group, its name and its path."""
    points = _entries(group).select(name=name)
    return "; ".join(sorted(f"package {_package(point)}, {group}: {name} = {point.value}" for point in points))


def load_entry(group: str, name: str, kind: type[Kind]) -> Kind | None:
    """Import and return the object of an entry, or None if there is no such entry.

    Raises CheckpointError that names package and entry, if several packages have it, if it cannot be imported, or if it
    is not of type `kind`.
    """
    points = tuple(_entries(group).select(name=name))
    if not points:
        return None
    if len(points) > 1:
        raise CheckpointError(f"several installed packages offer the same: {describe(group, name)}")
    try:
        found = _import(points[0])
    except Exception as error:  # a module is a program and can fail in any way
        raise CheckpointError(f"{describe(group, name)} cannot be imported: {type(error).__name__}: {error}") from error
    if not isinstance(found, kind):
        wanted = f"{kind.__module__}.{kind.__name__}"
        raise CheckpointError(f"{describe(group, name)} is {type(found).__name__}, not {wanted}")
    return found


def usable_entries(group: str, load: Callable[[str], Kind | None]) -> Iterator[Kind]:
    """Yield what `load` returns for each entry of a group, without those for which it raises CheckpointError.

    A search ends at the one that it looks for. If it goes on to the end, the first error is raised: the broken package
    may have been the one.
    """
    errors: list[CheckpointError] = []
    for name in entry_names(group):
        try:
            found = load(name)
        except CheckpointError as error:
            errors.append(error)
            continue
        if found is not None:
            yield found
    if errors:
        raise errors[0]


def _entries(group: str) -> EntryPoints:
    return _entries_on(group, tuple(sys.path))


@cache  # a search reads the metadata of every package, and a file has thousands of tensors
def _entries_on(group: str, path: tuple[str, ...]) -> EntryPoints:
    return entry_points(group=group)


@cache
def _import(point: EntryPoint) -> Any:
    return point.load()


def _package(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist else "without a name"
