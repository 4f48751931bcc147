"""The operators that rules can name: those of ktqueue, those of installed packages, and any class by its path.

An installed package gives its operators short names with the entry points `ktqueue.operators`.
"""

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import EntryPoints, entry_points
from typing import Any

from ktqueue.operators.base import Operator
from ktqueue.operators.decoder import CpuDecoder
from ktqueue.operators.experts import CpuExperts
from ktqueue.operators.gpu.decoder import GpuDecoder
from ktqueue.operators.latent_attention import LatentAttention
from ktqueue.operators.linear import CpuLinear

GROUP = "ktqueue.operators"
"""The entry points: a short name = package.module:Class."""

OPERATORS: dict[str, type[Operator]] = {
    operator.__name__: operator for operator in (CpuDecoder, CpuExperts, CpuLinear, GpuDecoder, LatentAttention)
}
"""Operators of ktqueue by the name that rules use: the name of the class."""

_GUIDE = "see docs/guides/operators.md"


def operator_names() -> list[str]:
    """Return the short names that `op` of a rule may have: those of ktqueue and of installed packages."""
    return sorted({*OPERATORS, *(point.name for point in _entries(tuple(sys.path)))})


def operator_class(name: str) -> type[Operator]:
    """Return the operator with that short name or path, `package.module:Class`.

    Raises ValueError that names module, class and what is missing.
    """
    if name in OPERATORS:
        return OPERATORS[name]
    return _custom_class(name)


def check_operator(name: str, options: Mapping[str, Any]) -> None:
    """Check that an operator of a package can be imported, has all methods, and takes the options.

    Raises ValueError that names module, class and what is missing. Operators of ktqueue check options themselves.
    """
    if name in OPERATORS:
        return
    operator = operator_class(name)
    path = _path(operator)
    calls: list[tuple[str, Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]] = [
        ("from_module", operator.from_module, (None,), options),
        ("load", operator.load, (None, None), {}),
        ("device_bytes", operator.device_bytes, (None,), {}),
        ("close", operator.close, (None,), {}),
    ]
    for method, function, arguments, keywords in calls:
        try:
            inspect.signature(function).bind(*arguments, **keywords)
        except TypeError as error:
            given = f" with kwargs {', '.join(keywords)}" if keywords else ""
            raise ValueError(f"{path}.{method} cannot be called{given} as an operator is: {error}; {_GUIDE}") from error


@cache  # a search reads the metadata of every package
def _entries(path: tuple[str, ...]) -> EntryPoints:
    """The entries of the packages on `sys.path`, which is `path`."""
    return entry_points(group=GROUP)


def _path(operator: type) -> str:
    return f"{operator.__module__}:{operator.__qualname__}"


def _path_of_short_name(name: str) -> str:
    """Return the path that an installed package gives a short name. Raises ValueError if none does, or several do."""
    paths = sorted({point.value for point in _entries(tuple(sys.path)).select(name=name)})
    if not paths:
        raise ValueError(f"{name!r} is not a path such as package.module:Class")
    if len(paths) > 1:
        raise ValueError(f"several installed packages have an operator {name}: {', '.join(paths)}; name one by class")
    return paths[0]


@cache
def _custom_class(name: str) -> type[Operator]:
    path = name if ":" in name else _path_of_short_name(name)
    module_name, _, class_name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a module is a program and can fail in any way
        raise ValueError(f"{module_name} cannot be imported: {type(error).__name__}: {error}; {_GUIDE}") from error
    found = getattr(module, class_name, None)
    if not isinstance(found, type):
        raise ValueError(f"{module_name} has no class {class_name!r}; {_GUIDE}")
    if not issubclass(found, Operator):
        raise ValueError(f"{path} is not a subclass of ktqueue.operators.base.Operator; {_GUIDE}")
    if missing := [name for name in ("from_module", "load", "device_bytes", "forward") if _is_inherited(found, name)]:
        raise ValueError(f"{path} lacks {', '.join(missing)}; {_GUIDE}")
    return found


def _is_inherited(found: type[Operator], method: str) -> bool:
    """Whether the class has only the method of Operator, which raises NotImplementedError."""
    return inspect.getattr_static(found, method) is inspect.getattr_static(Operator, method)
