"""Operator: a module that replaces a module of the model. This file also has the rule options that operators share."""

from collections.abc import Mapping
from typing import Any, ClassVar, Self, TypedDict, get_args

from torch import nn

from ktqueue.operators.native import ActivationType, isas
from ktqueue.operators.packed import ModuleWeights


class Operator(nn.Module):
    """Replaces a module of the model and everything below it, and is called like that module.

    Its life: `from_module` (on modules without weights, perhaps more than once), `device` is set, `load` once, then one
    call per step, `close` once at the end. Calls do not overlap, but may come from different threads.
    """

    device: str = "cpu"
    """Where the weights go: "cpu", "cuda" or "cuda:1"."""
    any_device: ClassVar[bool] = False
    """Whether it may be on another device than the model. It then returns results on the device of its arguments."""
    capturable: ClassVar[bool] = False
    """Whether a step can be captured in a CUDA graph: the host does not wait for the device, and shapes alone decide
    what is launched. One operator without it turns captured steps off."""

    @classmethod
    def from_module(cls, module: nn.Module, **options: Any) -> Self:
        """Build from the module to replace, which is on the meta device, and the rule's options.

        Raises ValueError if it does not fit.
        """
        raise NotImplementedError

    def load(self, weights: ModuleWeights) -> None:
        """Load every weight that the module had. Raises ValueError if one does not fit."""
        raise NotImplementedError

    def device_bytes(self) -> dict[str, int]:
        """Bytes of weights held, by device ("cpu", "cuda:0")."""
        raise NotImplementedError

    def close(self) -> None:
        """Release what the operator holds outside tensors, such as threads and files. No call follows."""


class KernelOptions(TypedDict):
    """The CPU kernels of an operator. isa: one of native.ISAS, or empty for the best that the CPU has."""

    activations: ActivationType
    isa: str


def kernel_options(operator: str, options: Mapping[str, Any], *others: str) -> KernelOptions:
    """Check a rule's options for `operator`. Raises ValueError that names an unknown or wrong option.

    others: names of options that the operator has already removed from `options`, for the message.
    """
    chosen: dict[str, Any] = {"activations": "int8", "isa": "", **options}
    for name, value in chosen.items():
        if name not in KernelOptions.__annotations__:
            known = ", ".join((*KernelOptions.__annotations__, *others))
            raise ValueError(f"{operator} knows no option {name!r}; it has: {known}")
        if not isinstance(value, str):
            raise ValueError(f"{operator}: {name} must be a text, got {value!r}")
    if chosen["activations"] not in get_args(ActivationType):
        raise ValueError(f"{operator}: activations must be int8 or float32, got {chosen['activations']!r}")
    if chosen["isa"] not in ("", *isas()):
        raise ValueError(f"{operator}: isa must be one that this CPU has, {', '.join(isas())}, got {chosen['isa']!r}")
    return KernelOptions(activations=chosen["activations"], isa=chosen["isa"])
