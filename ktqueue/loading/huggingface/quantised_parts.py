"""Checks and values of the parts of a quantised matrix: codes, scales, zero points."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ktqueue.core.errors import CheckpointError
from ktqueue.loading.checkpoint import CheckpointTensor
from ktqueue.loading.huggingface.quantised_blocks import Halves, as_halves
from ktqueue.loading.weight_formats import RAW, Floats
from ktqueue.operators.native import as_array

Parts = Mapping[str, CheckpointTensor]
"""The tensors of a matrix by the last part of their names."""
_INTEGERS = {"U8": "u1", "F8_E4M3": "u1", "I8": "i1", "I32": "<i4", "I64": "<i8"}


def check_names(source: str, module: str, parts: Parts, required: tuple[str, ...], optional: tuple[str, ...]) -> None:
    """Check that `module` has all required parts and no other but optional ones. Raises CheckpointError."""
    if missing := [name for name in required if name not in parts]:
        present = ", ".join(f"{name} {parts[name].quant}" for name in parts)
        raise CheckpointError(f"{source}: {module} has no {' and no '.join(missing)}, but {present}")
    if extra := [name for name in parts if name not in (*required, *optional)]:
        raise CheckpointError(f"{source}: {module}.{extra[0]} is of no known use beside {', '.join(required)}")


def numbers_of(tensor: CheckpointTensor) -> np.ndarray[Any, Any]:
    """Return a tensor in its own shape: floats as float32, float8 as bytes, integers in their own type."""
    if tensor.quant not in RAW:
        return floats_of(tensor)
    return tensor.data.view(_INTEGERS[tensor.quant]).reshape(tensor.shape)


def check_floats(source: str, scale: CheckpointTensor) -> None:
    """Check that scales are floats of 16 or 32 bits. Raises CheckpointError."""
    if scale.quant not in ("F32", "F16", "BF16"):
        raise refusal(source, scale, "in F32, F16 or BF16")


def floats_of(scale: CheckpointTensor) -> Floats:
    """Return a tensor of floats as float32, in its own shape."""
    values: Floats = as_array(scale.decode(torch.float32))
    return values


def halves_of(source: str, scale: CheckpointTensor, values: Floats) -> Halves:
    """Return `values`, those of the tensor `scale`, as halves. Raises CheckpointError if these do not hold them."""
    try:
        return as_halves(values)
    except ValueError as error:
        raise CheckpointError(f"{source}: tensor {scale.name!r}: {error}") from error


def refusal(source: str, tensor: CheckpointTensor, wanted: str, found: str = "") -> CheckpointError:
    """Return an error that says what was expected of a tensor. found: what it is instead of a type and a shape."""
    found = found or f"is {tensor.quant} {list(tensor.shape)}"
    return CheckpointError(f"{source}: tensor {tensor.name!r} {found}, expected {wanted}")
