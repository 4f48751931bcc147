"""Joins the tensors of each quantised matrix of a Hugging Face folder to one that is converted whenever it is read.

A matrix `x.weight` is stored as (rows and columns are those of the matrix, words have 32 bits, lowest bits first):
- FP8: `x.weight` in float8_e4m3fn, and `x.weight_scale_inv` or `x.weight_scale`: one number, one for each row, or
  one for each block. Despite its name, weight_scale_inv is multiplied (transformers' finegrained_fp8.py).
- int-quantized: the same with signed bytes.
- pack-quantized: `x.weight_packed` [rows, words] of codes along columns, `x.weight_scale` [rows, groups],
  `x.weight_shape`, and if zero points are not all half of the codes, `x.weight_zero_point` [words, groups] along rows.
- NVFP4 of compressed-tensors: `x.weight_packed` [rows, columns / 2] of codes of float4_e2m1, the first in the lower
  half of a byte, `x.weight_scale` [rows, columns / 16] in float8_e4m3fn, divided by the number `x.weight_global_scale`.
- MXFP4 of compressed-tensors: the same codes, and `x.weight_scale` [rows, columns / 32] of bytes e for 2^(e - 127).
  Quark calls the codes `x.weight`.
- NVFP4 of ModelOpt: the codes of NVFP4 as `x.weight`, and `x.weight_scale`, multiplied by the number
  `x.weight_scale_2`.
- GPTQ: `x.qweight` [words, rows] along columns, `x.scales` [groups, rows], `x.qzeros` [groups, words] along rows, less
  one, and `x.g_idx` [columns], the group of each column. (AutoGPTQ's qlinear_cuda.py; gptq_v2 does not subtract one.)
- AWQ: `x.qweight` [columns, words] along rows in an order of its own, `x.scales` and `x.qzeros` as GPTQ's, in the same
  order and less nothing. (AutoAWQ's packing_utils.py.)
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ktqueue.core.errors import CheckpointError
from ktqueue.loading.checkpoint import CheckpointTensor
from ktqueue.loading.huggingface.quantisation import Quantisation
from ktqueue.loading.huggingface.quantised_blocks import (
    FP4_BLOCK,
    FP4_GROUP,
    FP8_BLOCK,
    GROUP,
    awq_nibbles,
    eight_bit_blocks,
    float4_blocks,
    float4_floats,
    float8_blocks,
    float8_values,
    four_bit_blocks,
    in_parts,
    mxfp4_blocks,
    nibbles,
    reciprocal,
    spread,
    transposed,
)
from ktqueue.loading.huggingface.quantised_parts import (
    Parts,
    check_floats,
    check_names,
    floats_of,
    halves_of,
    numbers_of,
    refusal,
)
from ktqueue.loading.installed import FORMATS, describe
from ktqueue.loading.storage_format import StorageFormat
from ktqueue.loading.weight_formats import RAW, Bytes, tensor_bytes

_SCALES = ("weight_scale_inv", "weight_scale")
_PACKED = ("weight_packed", "weight_scale", "weight_shape")
_INTERLEAVED = ("qweight", "qzeros", "scales")
_FLOAT4 = (
    ("weight_packed", "weight_scale", "weight_global_scale"),
    ("weight", "weight_scale", "weight_scale_2"),
)  # fmt: skip
_OF_ACTIVATIONS = (
    *(
        "input_scale",
        "output_scale",
        "activation_scale",
        "input_global_scale",
        "input_zero_point",
        "k_scale",
        "v_scale",
    ),
)
"""Scales of activations and of a cache, which have types of our own here."""
_NAMES = frozenset(
    (*_SCALES, *_PACKED, *_INTERLEAVED, *(name[-1] for name in _FLOAT4), "weight_zero_point", "weight_g_idx", "g_idx")
)


def join_quantised(
    source: str, tensors: Mapping[str, CheckpointTensor], quantisation: Quantisation
) -> dict[str, CheckpointTensor]:
    """Return the tensors by name, with one `weight` for the parts of each quantised matrix.

    source: the beginning of messages. Raises CheckpointError that names the tensor at fault.
    """
    modules: dict[str, dict[str, CheckpointTensor]] = {}
    joined: dict[str, CheckpointTensor] = {}
    packaged = quantisation.packaged
    names = _NAMES if packaged is None or packaged.folder is None else frozenset(packaged.folder.parts)
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        if part in _OF_ACTIVATIONS and part not in names:
            continue
        if tensor.quant in RAW or (part in names and part != "weight"):
            modules.setdefault(module, {})[part] = tensor
        else:
            joined[name] = tensor
    for module, parts in modules.items():
        if (plain := joined.pop(f"{module}.weight", None)) is not None:
            parts["weight"] = plain
        joined[f"{module}.weight"] = _join(source, module, parts, quantisation)
    return joined


def _join(source: str, module: str, parts: Parts, quantisation: Quantisation) -> CheckpointTensor:
    if quantisation.packaged is not None:
        return _from_package(source, module, parts, quantisation.packaged)
    if stacked := next((tensor for tensor in parts.values() if len(tensor.shape) > 2), None):
        raise CheckpointError(
            f"{source}: tensor {stacked.name!r} is {stacked.quant} {list(stacked.shape)}: quantised matrices of "
            "several experts in one tensor are not supported; use a folder with a tensor for each, or a GGUF file"
        )
    if "qweight" in parts and quantisation.method in ("gptq", "awq"):
        check_names(source, module, parts, _INTERLEAVED, ("g_idx",) if quantisation.method == "gptq" else ())
        return (_from_gptq if quantisation.method == "gptq" else _from_awq)(source, module, parts, quantisation)
    for names in _FLOAT4:
        if names[-1] in parts:
            check_names(source, module, parts, names, ())
            return _from_float4(source, module, *(parts[part] for part in names))
    for codes in ("weight_packed", "weight"):
        if codes in parts and parts[codes].quant == "U8":
            check_names(source, module, parts, (codes, "weight_scale"), ())
            return _from_mxfp4(source, module, parts[codes], parts["weight_scale"])
    if "weight_packed" in parts:
        check_names(source, module, parts, _PACKED, ("weight_zero_point", "weight_g_idx"))
        return _from_packed(source, module, parts)
    scale = next((name for name in _SCALES if name in parts), _SCALES[quantisation.method != "fp8"])
    check_names(source, module, parts, ("weight", scale), ())
    return _from_scaled(source, module, parts["weight"], parts[scale], quantisation)


def _from_package(source: str, module: str, parts: Parts, packaged: StorageFormat) -> CheckpointTensor:
    """Join a matrix as a package's FolderLayout says."""
    layout = packaged.folder
    assert layout is not None
    check_names(source, module, parts, layout.parts, ())
    where = f"{source}: {module}, by {describe(FORMATS, packaged.name)}"

    def call(function: Callable[..., Any], values: dict[str, Any]) -> Any:
        try:
            return function(values)
        except Exception as error:  # code of a package can fail in any way
            raise CheckpointError(f"{where}: {type(error).__name__}: {error}") from error

    rows, columns = call(layout.shape, {name: parts[name].shape for name in layout.parts})
    try:
        size = tensor_bytes(packaged.name, (rows, columns))
    except ValueError as error:
        raise CheckpointError(f"{where}: {error}") from error

    def convert() -> Bytes:
        blocks = call(layout.join, {name: numbers_of(parts[name]) for name in layout.parts})
        data: Bytes = np.ascontiguousarray(blocks).view(np.uint8).reshape(-1)
        if data.size != size:
            raise CheckpointError(f"{where}: a matrix {[rows, columns]} has {size} bytes, join returned {data.size}")
        return data

    return CheckpointTensor(f"{module}.weight", packaged.name, (rows, columns), convert)


def _from_scaled(
    source: str, module: str, weight: CheckpointTensor, scale: CheckpointTensor, quantisation: Quantisation
) -> CheckpointTensor:
    if weight.quant not in ("F8_E4M3", "I8") or len(weight.shape) != 2:
        raise refusal(source, weight, "a matrix in F8_E4M3 or I8, since it has scales")
    rows, columns = weight.shape
    block = _scale_block(source, scale, (rows, columns), quantisation.block)
    check_floats(source, scale)
    is_float8 = weight.quant == "F8_E4M3"
    step = FP8_BLOCK if is_float8 else GROUP  # columns of a block of ours
    has_blocks = columns % step == 0 and (block[1] % step == 0 or block[1] >= columns)
    has_blocks &= is_float8 or scale.quant != "F32"  # Q8_0 has scales in float16
    quant = ("FP8" if is_float8 else "Q8_0") if has_blocks else "F32"

    def convert() -> Bytes:
        numbers = weight.data.reshape(rows, columns)
        if is_float8 and ((numbers & 0x7F) == 0x7F).any():
            raise CheckpointError(f"{source}: tensor {weight.name!r} has NaN")
        scales = floats_of(scale).reshape(-(-rows // block[0]), -(-columns // block[1]))
        if not np.isfinite(scales).all():
            raise CheckpointError(f"{source}: tensor {scale.name!r} has numbers that are not finite")
        if not has_blocks:
            values = float8_values(numbers) if is_float8 else numbers.view(np.int8)
            return (values * spread(scales, block, (rows, columns))).reshape(-1).view(np.uint8)
        of_blocks = spread(scales, (block[0], max(1, min(block[1], columns) // step)), (rows, columns // step))
        if is_float8:
            return in_parts(rows, columns, lambda part: float8_blocks(numbers[part], of_blocks[part]))
        return eight_bit_blocks(numbers.view(np.int8), halves_of(source, scale, of_blocks))

    return CheckpointTensor(f"{module}.weight", quant, (rows, columns), convert)


def _scale_block(
    source: str, scale: CheckpointTensor, shape: tuple[int, int], stated: tuple[int, int] | None
) -> tuple[int, int]:
    """Return how many rows and columns share a scale."""
    rows, columns = shape
    if scale.shape in ((1,), (1, 1)):
        return rows, columns
    if scale.shape in ((rows,), (rows, 1)):
        return 1, columns
    if stated and scale.shape == (-(-rows // stated[0]), -(-columns // stated[1])):
        return stated
    if len(scale.shape) == 2 and scale.shape[0] == rows and columns % scale.shape[1] == 0:
        return 1, columns // scale.shape[1]
    blocks = f", or one for each block of {list(stated)}" if stated else ""
    raise refusal(source, scale, f"one number or one for each row of {list(shape)}{blocks}")


def _from_packed(source: str, module: str, parts: Parts) -> CheckpointTensor:
    packed, scale, zero = parts["weight_packed"], parts["weight_scale"], parts.get("weight_zero_point")
    stored = parts["weight_shape"]
    if stored.quant != "I64" or stored.shape != (2,):
        raise refusal(source, stored, "two numbers in I64")
    rows, columns = (int(number) for number in stored.data.view("<i8"))
    check_floats(source, scale)
    groups = _group_count(source, scale, 1, rows, columns)
    bits = next((bits for bits in (4, 8) if packed.shape == (rows, -(-columns * bits // 32))), None)
    if packed.quant != "I32" or bits is None:
        raise refusal(source, packed, f"codes of 4 or 8 bits in I32 of a matrix {[rows, columns]}")
    wanted = (-(-rows * bits // 32), groups)
    if zero is not None and (bits != 4 or zero.quant != "I32" or zero.shape != wanted):
        raise refusal(source, zero, f"zero points of 4 bits in I32 {list(wanted)}")
    order = parts.get("weight_g_idx")

    def convert() -> Bytes:
        _check_order(source, order, columns, groups)
        scales = halves_of(source, scale, floats_of(scale).reshape(rows, groups))
        words = packed.data.reshape(rows, -1)
        if bits == 8:
            return eight_bit_blocks((words ^ 0x80).view(np.int8), scales)
        zeros = None
        if zero is not None:
            by_row = np.ascontiguousarray(zero.data.view("<u4").reshape(wanted).T).view(np.uint8)  # [groups, bytes]
            zeros = nibbles(by_row)[:, :rows].T
        return four_bit_blocks(columns, lambda part: nibbles(words[part]), scales, zeros)

    quant = "Q8_0" if bits == 8 else "Q4_0" if zero is None else "UINT4"
    return CheckpointTensor(f"{module}.weight", quant, (rows, columns), convert)


def _from_float4(
    source: str, module: str, packed: CheckpointTensor, scale: CheckpointTensor, whole: CheckpointTensor
) -> CheckpointTensor:
    """Return a matrix of NVFP4. whole: the scale of the whole matrix."""
    rows, columns = _float4_shape(source, packed, scale, FP4_GROUP, "F8_E4M3")
    if whole.quant != "F32" or whole.shape != (1,):
        raise refusal(source, whole, "one number in F32")
    quant = "FP4" if columns % FP4_BLOCK == 0 else "F32"
    is_divisor = whole.name.endswith("weight_global_scale")

    def convert() -> Bytes:
        scales, number = scale.data.reshape(scale.shape), floats_of(whole)[0]
        if (scales >= 127).any():
            raise CheckpointError(f"{source}: tensor {scale.name!r} has NaN or a number below 0")
        if not 2.0**-60 <= number <= 2.0**60:
            raise refusal(source, whole, "a number from 2^-60 to 2^60", f"is {number}")
        codes = packed.data.reshape(rows, -1)
        if quant == "F32":
            values = float8_values(scales)
            return float4_floats(nibbles(codes), values / number if is_divisor else values * number)
        try:
            factors = reciprocal(float(number)) if is_divisor else (float(number), 0.0)
        except ValueError as error:
            raise CheckpointError(f"{source}: tensor {whole.name!r}: {error}") from error
        return in_parts(rows, columns, lambda part: float4_blocks(nibbles(codes[part]), scales[part], factors))

    return CheckpointTensor(f"{module}.weight", quant, (rows, columns), convert)


def _from_mxfp4(source: str, module: str, packed: CheckpointTensor, scale: CheckpointTensor) -> CheckpointTensor:
    rows, columns = _float4_shape(source, packed, scale, GROUP, "U8")

    def convert() -> Bytes:
        codes, exponents = packed.data.reshape(rows, -1), scale.data.reshape(scale.shape)
        if (exponents == 255).any():  # NaN in OCP Microscaling Formats 1.0
            raise CheckpointError(f"{source}: tensor {scale.name!r} has NaN")
        return in_parts(rows, columns, lambda part: mxfp4_blocks(nibbles(codes[part]), exponents[part]))

    return CheckpointTensor(f"{module}.weight", "MXFP4", (rows, columns), convert)


def _float4_shape(
    source: str, packed: CheckpointTensor, scale: CheckpointTensor, group: int, scale_type: str
) -> tuple[int, int]:
    """Return the rows and columns of codes of float4_e2m1, which have a scale for each group of columns."""
    if packed.quant != "U8" or len(packed.shape) != 2 or packed.shape[1] * 2 % group:
        raise refusal(source, packed, f"codes of 4 bits in U8 of a multiple of {group} columns")
    rows, columns = packed.shape[0], packed.shape[1] * 2
    if scale.quant != scale_type or scale.shape != (rows, columns // group):
        raise refusal(source, scale, f"scales in {scale_type} {[rows, columns // group]}")
    return rows, columns


def _from_gptq(source: str, module: str, parts: Parts, quantisation: Quantisation) -> CheckpointTensor:
    weight, bits = parts["qweight"], quantisation.bits
    if weight.quant != "I32" or len(weight.shape) != 2:
        raise refusal(source, weight, "words in I32 [words, rows]")
    columns, rows = weight.shape[0] * 32 // bits, weight.shape[1]
    groups = _check_groups(source, parts, rows, columns, bits)
    if not quantisation.symmetric and rows * bits % 32:
        raise refusal(source, weight, "a multiple of 8 rows, since words hold the zero points of 8", f"has {rows} rows")

    def convert() -> Bytes:
        _check_order(source, parts.get("g_idx"), columns, groups)
        words = weight.data.view("<u4").reshape(-1, rows).T

        def codes_of(part: slice) -> Bytes:
            codes = np.ascontiguousarray(words[part]).view(np.uint8)  # [rows, bytes]
            return codes if bits == 8 else nibbles(codes)

        scales = halves_of(source, parts["scales"], floats_of(parts["scales"]).reshape(groups, rows).T)
        stored = parts["qzeros"].data.reshape(groups, -1)
        zeros = (stored if bits == 8 else nibbles(stored)) + np.uint8(quantisation.zero_offset)
        if quantisation.symmetric and (zeros != (half := 1 << bits - 1)).any():
            wrong = int(zeros[zeros != half][0])
            raise refusal(source, parts["qzeros"], f"zero points of {half}, since the config says sym", f"has {wrong}")
        if bits == 8:
            return eight_bit_blocks((codes_of(slice(None)) ^ 0x80).view(np.int8), scales)
        return four_bit_blocks(columns, codes_of, scales, None if quantisation.symmetric else zeros.T)

    quant = "Q8_0" if bits == 8 else "Q4_0" if quantisation.symmetric else "UINT4"
    return CheckpointTensor(f"{module}.weight", quant, (rows, columns), convert)


def _from_awq(source: str, module: str, parts: Parts, quantisation: Quantisation) -> CheckpointTensor:
    weight = parts["qweight"]
    if weight.quant != "I32" or len(weight.shape) != 2:
        raise refusal(source, weight, "words in I32 [columns, words]")
    columns, rows = weight.shape[0], weight.shape[1] * 8
    groups = _check_groups(source, parts, rows, columns, quantisation.bits)

    def convert() -> Bytes:
        words = weight.data.reshape(columns, -1)  # a byte has the codes of two rows
        scales = halves_of(source, parts["scales"], floats_of(parts["scales"]).reshape(groups, rows).T)
        zeros = awq_nibbles(parts["qzeros"].data.reshape(groups, -1)).T

        def codes_of(part: slice) -> Bytes:
            return transposed(awq_nibbles(words[:, part.start // 2 : part.stop // 2]))

        return four_bit_blocks(columns, codes_of, scales, zeros)

    return CheckpointTensor(f"{module}.weight", "UINT4", (rows, columns), convert)


def _check_groups(source: str, parts: Parts, rows: int, columns: int, bits: int) -> int:
    """Return the number of groups of scales and zero points of GPTQ and AWQ, [groups, rows] each."""
    scales, zeros = parts["scales"], parts["qzeros"]
    check_floats(source, scales)
    groups = _group_count(source, scales, 0, rows, columns)
    if zeros.quant != "I32" or zeros.shape != (groups, rows * bits // 32):
        raise refusal(source, zeros, f"zero points of {bits} bits in I32 {[groups, rows * bits // 32]}")
    return groups


def _group_count(source: str, scale: CheckpointTensor, axis: int, rows: int, columns: int) -> int:
    """Return the groups of columns that a scale of a matrix of four or eight bits has along `axis`, rows along the
    other."""
    shape = scale.shape if len(scale.shape) == 2 else (0, 0)
    groups = shape[axis]
    if shape[1 - axis] != rows or not groups or columns % groups or columns // groups % GROUP:
        raise refusal(
            source, scale, f"scales of {rows} rows and of groups of a multiple of {GROUP} of {columns} columns"
        )
    return groups


def _check_order(source: str, order: CheckpointTensor | None, columns: int, groups: int) -> None:
    """Refuse columns that are not in the order of their groups."""
    if order is None:
        return
    wanted = np.arange(columns, dtype=np.int32) // (columns // groups)
    if order.quant != "I32" or not np.array_equal(order.data.view("<i4"), wanted):
        raise refusal(
            source,
            order,
            "the groups of columns in their order (columns sorted by activations, desc_act, are not read)",
        )
