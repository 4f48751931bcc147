"""Named ranges around parts of a step, for profilers of a GPU such as Nsight Systems.

Methods are wrapped in place, so that nothing is called or checked where nobody asked for names. A captured step shows
its layers while it is captured; when it is replayed, only the launch has a range.
"""

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

NamedRange = Callable[[str], AbstractContextManager[Any]]
"""named_range(name) makes a context manager that opens a range and closes it."""


def nvtx_range(name: str) -> AbstractContextManager[Any]:
    """A range of NVTX, which costs a fraction of a microsecond while no profiler runs."""
    found: AbstractContextManager[Any] = torch.cuda.nvtx.range(name)
    return found


def name_methods(target: object, names: Mapping[str, str], named_range: NamedRange) -> None:
    """Call the methods of this object inside ranges. `names`: of the ranges, by method."""
    for method, name in names.items():
        setattr(target, method, _inside(getattr(target, method), name, named_range))


def name_layers(model: nn.Module, named_range: NamedRange) -> None:
    """Call the model's layers and their children inside ranges with the names of the modules.

    An operator with a method `name_layers` does this itself.
    """
    if callable(own := getattr(model, "name_layers", None)):
        own(named_range)
        return
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList):
            for number, layer in enumerate(module):
                for part, child in (("", layer), *((f".{part}", child) for part, child in layer.named_children())):
                    name_methods(child, {"forward": f"{name}.{number}{part}"}, named_range)
            return  # the first list is that of the layers; others, as of experts, are inside


def _inside(function: Callable[..., Any], name: str, named_range: NamedRange) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*arguments: Any, **named: Any) -> Any:
        with named_range(name):
            return function(*arguments, **named)

    return run
