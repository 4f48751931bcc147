"""Finds the value of a config because of which transformers cannot make a model from it."""

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ktqueue.core.errors import CheckpointError
from ktqueue.core.short_repr import short_repr

_GROUPS = ("rope_parameters", "rope_scaling", "per_layer_config")


def find_fault(
    values: Mapping[str, Any],
    attempt: Callable[[dict[str, Any]], object],
    limit: str,
    source: str,
    *,
    only_void: bool = False,
) -> CheckpointError | None:
    """Return the error that names the one value without which `attempt` succeeds; None if there is no such value.

    values: of a config file. attempt: makes something from such values, or fails. limit: what the value must be.
    only_void: outside of groups, try no values but those that are null, empty or not above 0, because an attempt takes
    time.
    """
    for path, stated in _stated(values):
        if only_void and len(path) == 1 and stated and not (isinstance(stated, int | float) and stated < 0):
            continue
        rest = copy.deepcopy(dict(values))
        group = rest
        for key in path[:-1]:
            group = group[key]
        del group[path[-1]]
        try:
            attempt(rest)
        except Exception:  # of any kind: another value is at fault
            continue
        name, shown = ".".join(map(str, path)), short_repr(stated)
        return CheckpointError(f"{source}: {name} must be {limit}, got {shown}", param=name, limit=limit, value=shown)
    return None


def _stated(values: Mapping[str, Any], path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield keys and their values; those in groups first, by all keys that lead to them."""
    for key, value in values.items():
        if isinstance(value, dict) and (path or key in _GROUPS):
            yield from _stated(value, (*path, key))
        yield (*path, key), value
