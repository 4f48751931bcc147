"""The options that all operators share: which CPU kernels, and in what type activations are multiplied."""

from collections.abc import Mapping
from typing import Any, TypedDict, get_args

from ktqueue.operators.native import ActivationType


class KernelOptions(TypedDict):
    """`isa`: one of native.ISAS, or empty for the best that the CPU has."""

    activations: ActivationType
    isa: str


def kernel_options(operator: str, options: Mapping[str, Any], *others: str) -> KernelOptions:
    """A rule's options for `operator`, checked. Raises ValueError naming the option that is unknown or wrong.

    `others`: names of options that the operator has taken out already.
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
    return KernelOptions(activations=chosen["activations"], isa=chosen["isa"])
