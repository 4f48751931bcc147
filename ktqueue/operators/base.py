"""Operator: a module put into the model in place of one of its own; and the registry of their short names."""

from collections.abc import Callable
from typing import Any, Self, TypeVar

from torch import nn

from ktqueue.operators.packed import ModuleWeights


class Operator(nn.Module):
    """Takes the place of a module of the model, with all below it, and is called as that module was.

    Made from the module it replaces (which may be on the meta device), then given its weights once. `device`: where it
    is to live, set between the two.
    """

    device: str = "cpu"

    @classmethod
    def from_module(cls, module: nn.Module, **options: Any) -> Self:
        """Build from the module to be replaced and the rule's options. Raises ValueError if it cannot stand in."""
        raise NotImplementedError

    def load(self, weights: ModuleWeights) -> None:
        """Take every weight that the module had. Raises ValueError if they do not fit."""
        raise NotImplementedError

    def device_bytes(self) -> dict[str, int]:
        """Bytes of weights held, by device ("cpu", "cuda:0")."""
        raise NotImplementedError


registry: dict[str, type[Operator]] = {}
"""Operators by the short name that rules use. Filled when their modules are imported, then only read."""

Kind = TypeVar("Kind", bound=type[Operator])


def register(name: str) -> Callable[[Kind], Kind]:
    """Class decorator that enters an operator under `name`. Raises ValueError if the name is taken."""

    def enter(operator: Kind) -> Kind:
        if name in registry:
            raise ValueError(f"operator {name!r} is registered twice")
        registry[name] = operator
        return operator

    return enter
