"""Operator: a module put into the model in place of one of its own; and the registry of their short names."""

from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar

from torch import nn

Weights = TypeVar("Weights")


class Operator(nn.Module, Generic[Weights]):
    """Takes the place of a module of the model and is called as that module was.

    Made from the module it replaces (which may be on the meta device), then given its weights once.
    """

    @classmethod
    def from_module(cls, module: nn.Module, **options: Any) -> Self:
        """Build from the module to be replaced and the rule's options. Raises ValueError if it cannot stand in."""
        raise NotImplementedError

    def load(self, weights: Weights) -> None:
        """Take the weights. Raises ValueError if they do not fit."""
        raise NotImplementedError

    def device_bytes(self) -> dict[str, int]:
        """Bytes of weights held, by device ("cpu", "cuda:0")."""
        raise NotImplementedError


registry: dict[str, type[Operator[Any]]] = {}
"""Operators by the short name that rules use. Filled when their modules are imported, then only read."""

Kind = TypeVar("Kind", bound=type[Operator[Any]])


def register(name: str) -> Callable[[Kind], Kind]:
    """Class decorator that enters an operator under `name`. Raises ValueError if the name is taken."""

    def enter(operator: Kind) -> Kind:
        if name in registry:
            raise ValueError(f"operator {name!r} is registered twice")
        registry[name] = operator
        return operator

    return enter
