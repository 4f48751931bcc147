"""The instructions of PTX that kernels name, on arrays of numpy, for kernels that Triton's interpreter runs."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

Array = Any  # of 32 bits


def _bytes_of(words: Array, kind: Any) -> Array:
    """[..., 4]: the bytes of each word, the lowest first."""
    return np.ascontiguousarray(words).view(kind).reshape(*words.shape, 4)


def _dot_of(kind: Any) -> Callable[[Array, Array, Array], Array]:
    def dot(codes: Array, x: Array, total: Array) -> Array:
        products = np.multiply(_bytes_of(codes, kind), _bytes_of(x, np.int8), dtype=np.int32)
        return products.sum(-1, dtype=np.int32) + total

    return dot


def _permute(low: Array, high: Array, selector: Array) -> Array:
    """Without the modes of a nibble above 7."""
    assert not (selector & 0x8888).any()
    both = np.concatenate([_bytes_of(low, np.uint8), _bytes_of(high, np.uint8)], -1)
    index = selector[..., None] >> np.arange(0, 16, 4) & 7
    return np.take_along_axis(both, index, -1).view(np.int32)[..., 0]


INSTRUCTIONS: dict[str, Callable[..., Array]] = {
    "dp4a.s32.s32 $0, $1, $2, $3;": _dot_of(np.int8),
    "dp4a.u32.s32 $0, $1, $2, $3;": _dot_of(np.uint8),
    "prmt.b32 $0, $1, $2, $3;": _permute,
    "lop3.b32 $0, $1, $2, $3, 0xEA;": lambda word, mask, bits: word & mask | bits,
    "mov.b32 $0, $1;": lambda x: x.copy(),
}


def run_instructions(patched: pytest.MonkeyPatch, interpreter: Any, language: Any) -> None:
    """Let the interpreter run them. It broadcasts the operands, of which no type is changed."""
    core, semantic = language.core, interpreter.interpreter_semantic

    def elementwise(
        asm: Any, constraints: Any, args: Any, dtype: Any, is_pure: Any, pack: Any, _semantic: Any = None
    ) -> Any:
        operands = [semantic.to_tensor(operand) for operand in args]
        result = INSTRUCTIONS[asm](*np.broadcast_arrays(*(operand.handle.data for operand in operands)))
        is_block = any(operand.type.is_block() for operand in operands)
        kind = core.block_type(dtype, result.shape) if is_block else dtype
        return core.tensor(interpreter.TensorHandle(result, dtype), kind)

    for module in (language, core):
        patched.setattr(module, "inline_asm_elementwise", core.builtin(elementwise))
