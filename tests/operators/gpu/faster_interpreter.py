"""Triton's interpreter in 40% of its time, most of which went into descriptions of types and shapes."""

import functools
from typing import Any

import numpy as np
import pytest


def speed_up(patched: pytest.MonkeyPatch, interpreter: Any, language: Any) -> None:
    """Make each description of a type once. The operations of numpy and their operands stay the same."""
    core, chosen = language.core, interpreter.interpreter_semantic
    semantic = type(chosen)
    pointer, numpy_type = np.dtype(np.uint64), functools.cache(interpreter._get_np_dtype)
    make_block, equal, broadcast = core.block_type.__init__, core.dtype.__eq__, semantic.broadcast_impl_value
    scalar_sizes = core.constexpr(1), core.tuple([])
    checked = core.builtin(len).__code__
    expand, handle_of = semantic.expand_dims, interpreter.TensorHandle
    check_operands, unwrap = semantic.binary_op_type_checking_impl, core._unwrap_if_constexpr
    plain = {core.tensor, int, float, bool, str, type(None)}
    blocks_of_numbers: dict[Any, Any] = {}

    def type_in_numpy(kind: Any) -> Any:
        """Without a table that is made for each call."""
        scalar = kind.scalar
        return pointer if isinstance(scalar, core.pointer_type) else numpy_type(scalar)

    @functools.cache
    def block_facts(sizes: tuple[Any, ...]) -> tuple[Any, int, tuple[Any, Any], tuple[int, ...]]:
        """The checked shape of a block, its number of elements, both as a tensor has them, and the shape in numpy."""
        block = core.block_type.__new__(core.block_type)
        make_block(block, core.void, [*sizes])
        constants = core.tuple([core.constexpr(size) for size in block.shape])
        numbers = tuple(core._unwrap_if_constexpr(size) for size in block.shape)
        return block.shape, block.numel, (core.constexpr(block.numel), constants), numbers

    @functools.cache
    def block_name(sizes: tuple[Any, ...], element: str) -> str:
        return f"<{block_facts(sizes)[0]}, {element}>"

    def make_block_once(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = (*shape,)
        self.element_ty = element_ty
        self.shape, self.numel, self.tensor_sizes, self.sizes = block_facts(sizes)
        self.name = block_name(sizes, element_ty.name)

    def make_tensor(self: Any, handle: Any, kind: Any) -> None:
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.numel, self.shape = kind.tensor_sizes if kind.is_block() else scalar_sizes

    @functools.cache
    def common_sizes(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...] | None:
        try:
            return np.broadcast_shapes(left, right)
        except ValueError:
            return None

    def spread(operand: Any, sizes: tuple[int, ...]) -> Any:
        kind, data = operand.type, operand.handle.data
        if kind.is_block() and kind.sizes == sizes:
            return operand
        spread_data = np.broadcast_to(data, sizes) if kind.is_block() else np.full(sizes, data, data.dtype)
        return core.tensor(handle_of(spread_data, kind.scalar), core.block_type(kind.scalar, sizes))

    def broadcast_at_once(self: Any, left: Any, right: Any) -> Any:
        """Triton compares a list with a tuple here, and so broadcasts tensors to the shape that they have."""
        if not left.type.is_block() and not right.type.is_block():
            return left, right
        sizes = common_sizes(*(one.type.sizes if one.type.is_block() else () for one in (left, right)))
        return broadcast(self, left, right) if sizes is None else (spread(left, sizes), spread(right, sizes))

    def expand_at_once(self: Any, operand: Any, axis: int) -> Any:
        if not operand.type.is_block():
            return expand(self, operand, axis)
        data, kind = np.expand_dims(operand.handle.data, axis), operand.type.scalar
        return core.tensor(handle_of(data, kind), core.block_type(kind, data.shape))

    def equal_operands(self: Any, left: Any, right: Any, *pointers: bool, **checks: Any) -> Any:
        """Operands of one type and shape stay what they are. A number is made a block once for each type and shape."""
        tensors = isinstance(left, core.tensor), isinstance(right, core.tensor)
        if all(tensors) and left.dtype is right.dtype and not left.dtype.is_ptr() and not checks.get("div_or_mod"):
            alike = getattr(left.type, "shape", None) is getattr(right.type, "shape", None)
            return (left, right) if alike else broadcast_at_once(self, left, right)
        number, block = (right, left) if tensors[0] else (left, right)
        if tensors[0] == tensors[1] or type(number) not in (int, float):
            return check_operands(self, left, right, *pointers, **checks)
        case = type(number), number, tensors, block.type.name, *pointers, *checks.items()
        if case not in blocks_of_numbers:
            both = check_operands(self, left, right, *pointers, **checks)
            if both[tensors[1]] is not block:
                return both
            blocks_of_numbers[case] = both[tensors[0]]
            blocks_of_numbers[case].handle.data.flags.writeable = False
        made = blocks_of_numbers[case]
        return (block, made) if tensors[0] else (made, block)

    def unwrap_at_once(value: Any) -> Any:
        kind = type(value)
        if kind in plain:
            return value
        return value.value if kind is core.constexpr else unwrap(value)

    def make_handle(self: Any, data: Any, dtype: Any) -> None:
        """Without a check of the size that numpy's operation gave each number."""
        self.data, self.dtype, self.attr = data, dtype, {}

    def add_builtin(target: Any, name: str, member: Any, _: Any, scope: Any) -> None:
        """Without a filter of all arguments for each call, and a check that there is a `_semantic`."""
        function = member.__wrapped__ if member.__code__ is checked else member

        def call(*arguments: Any, _semantic: Any = None, **named: Any) -> Any:
            return function(*arguments, _semantic=chosen, **named)

        scope.set_attr(target, name, call)

    patched.setattr(interpreter, "_get_np_dtype", type_in_numpy)
    patched.setattr(interpreter, "_patch_attr", add_builtin)
    patched.setattr(handle_of, "__init__", make_handle)
    patched.setattr(core, "_unwrap_if_constexpr", unwrap_at_once)
    patched.setattr(core.block_type, "__init__", make_block_once)
    patched.setattr(core.tensor, "__init__", make_tensor)
    patched.setattr(core.dtype, "__eq__", lambda self, other: self is other or equal(self, other))
    patched.setattr(semantic, "broadcast_impl_value", broadcast_at_once)
    patched.setattr(semantic, "expand_dims", expand_at_once)
    patched.setattr(semantic, "binary_op_type_checking_impl", equal_operands)
