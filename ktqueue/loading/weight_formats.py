"""Storage formats of weights: names, block sizes, bytes per row, also of formats of packages. Knows no file format.

No kernel reads Q5_0, TQ1_0, TQ2_0, Q1_0 and Q2_0. When they are loaded, they are stored in a format that holds them
exactly: the five bits of Q5_0 with their offset of 16 in Q8_0. llama.cpp stores Q5_0 where a row is not a multiple of a
K block, such as attn_k_b of DeepSeek models. TQ1_0 and TQ2_0 are ternary: d * (q - 1) is d * 1 * q - d * 1 in Q2_K,
where -0 is 0. Q1_0 is d or -d and Q2_0 is d * (q - 1), with a d of fewer columns than Q2_K has: both become Q4_0,
d * (q - 8). Layouts: ggml-common.h.
"""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from ktqueue.core.errors import CheckpointError
from ktqueue.loading.installed import FORMATS, describe, entry_names
from ktqueue.loading.storage_format import Bytes, Floats, packaged_format

__all__ = ["Bytes", "Floats"]

_FORMATS: dict[str, tuple[int, list[Any]]] = {
    "Q4_0": (32, [("d", "<f2"), ("q", "u1", 16)]),
    "Q8_0": (32, [("d", "<f2"), ("q", "i1", 32)]),
    "Q2_K": (256, [("scales", "u1", 16), ("q", "u1", 64), ("d", "<f2"), ("dmin", "<f2")]),
    "Q3_K": (256, [("high", "u1", 32), ("q", "u1", 64), ("scales", "u1", 12), ("d", "<f2")]),
    "Q4_K": (256, [("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("q", "u1", 128)]),
    "Q5_K": (256, [("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("high", "u1", 32), ("q", "u1", 128)]),
    "Q6_K": (256, [("q", "u1", 128), ("high", "u1", 64), ("scales", "i1", 16), ("d", "<f2")]),
    "IQ4_NL": (32, [("d", "<f2"), ("q", "u1", 16)]),
    "IQ4_XS": (256, [("d", "<f2"), ("high", "<u2"), ("scales", "u1", 4), ("q", "u1", 128)]),
    "MXFP4": (32, [("e", "u1"), ("q", "u1", 16)]),
    "IQ2_XXS": (256, [("d", "<f2"), ("q", "u1", 64)]),
    "IQ2_XS": (256, [("d", "<f2"), ("q", "u1", 72)]),
    "IQ2_S": (256, [("d", "<f2"), ("q", "u1", 80)]),
    "IQ3_XXS": (256, [("d", "<f2"), ("q", "u1", 96)]),
    "IQ3_S": (256, [("d", "<f2"), ("q", "u1", 108)]),
    "IQ1_S": (256, [("d", "<f2"), ("q", "u1", 48)]),
    "IQ1_M": (256, [("q", "u1", 48), ("words", "<u2", 4)]),
    "NVFP4": (64, [("e", "u1", 4), ("q", "u1", 32)]),
    "Q4_1": (32, [("d", "<f2"), ("m", "<f2"), ("q", "u1", 16)]),
    "Q5_1": (32, [("d", "<f2"), ("m", "<f2"), ("high", "u1", 4), ("q", "u1", 16)]),
    "UINT4": (32, [("d", "<f2"), ("zero", "u1"), ("q", "u1", 16)]),
    "FP8": (128, [("d", "<f4"), ("q", "u1", 128)]),
    "FP4": (64, [("d", "<f4"), ("r", "<f4"), ("e", "u1", 4), ("q", "u1", (4, 8))]),
    "Q5_0": (32, [("d", "<f2"), ("high", "<u4"), ("q", "u1", 16)]),
    "TQ1_0": (256, [("five", "u1", 32), ("also_five", "u1", 16), ("four", "u1", 4), ("d", "<f2")]),
    "TQ2_0": (256, [("q", "u1", 64), ("d", "<f2")]),
    "Q1_0": (128, [("d", "<f2"), ("q", "u1", 16)]),
    "Q2_0": (64, [("d", "<f2"), ("q", "u1", 16)]),
    "Q2_0_128": (128, [("d", "<f2"), ("q", "u1", 32)]),
}
"""The elements of a block and its fields, as ggml (ggml-common.h) or FOLDER_FORMATS define them. Codes are `q`."""
FOLDER_FORMATS = ("UINT4", "FP8", "FP4")
"""Formats of our own for weights of quantised Hugging Face folders that no format of GGUF holds exactly.

UINT4: half d, u8 zero, 16 bytes with the codes in Q4_0's order; d * (code - zero). FP8: float d, 128 numbers in
float8_e4m3fn; d * number. FP4: float d, float r, which are equal in all blocks of a row, then a block of NVFP4, whose
scales are multiplied by d + r and rounded once. So d + r can stand for a division.
"""

REQUANTISED = {
    "Q5_0": "Q8_0", "TQ1_0": "Q2_K", "TQ2_0": "Q2_K", "Q1_0": "Q4_0", "Q2_0": "Q4_0", "Q2_0_128": "Q4_0",
}  # fmt: skip
"""Formats that no kernel reads, and those in which they are loaded."""
LAYOUTS = {quant: np.dtype(fields) for quant, (_, fields) in _FORMATS.items()}
_SIZES = {"F32": (1, 4), "F16": (1, 2), "BF16": (1, 2)} | {
    quant: (elements, LAYOUTS[quant].itemsize) for quant, (elements, _) in _FORMATS.items()
}
BLOCKS = {quant: size for quant, size in _SIZES.items() if quant not in REQUANTISED}
"""Elements and bytes of one block of the formats that kernels read."""
FILE_BLOCKS = {quant: size for quant, size in _SIZES.items() if quant not in FOLDER_FORMATS}
"""All formats that a file may have. Those that are not in BLOCKS are in REQUANTISED.

Q2_0_128 is Q2_0 as PrismML's fork of llama.cpp writes it, with the same number of the type.
"""

RAW = {"U8": 1, "I8": 1, "I32": 4, "I64": 8, "F8_E4M3": 1}
"""Types of tensors that are parts of weights, such as codes and exponents, with the bytes of a number.

The names are those of safetensors.
"""


def row_bytes(quant: str, columns: int) -> int:
    """Return the bytes of one row. Raises ValueError if `columns` is not a multiple of the block."""
    elements, size = (1, RAW[quant]) if quant in RAW else _block(quant)
    if columns % elements:
        raise ValueError(f"a row of {columns} is not a multiple of the {quant} block of {elements}")
    return columns // elements * size


def _block(quant: str) -> tuple[int, int]:
    """Return elements and bytes of a block. Raises KeyError for an unknown format."""
    if found := _SIZES.get(quant):
        return found
    if (packaged := packaged_format(quant)) is None:
        raise KeyError(quant)
    whole = BLOCKS[packaged.stored_as][0]
    if packaged.elements % whole:
        raise CheckpointError(
            f"{describe(FORMATS, quant)}: a block of {packaged.elements} elements is no multiple of the block of "
            f"{packaged.stored_as}, {whole}"
        )
    return packaged.elements, packaged.block_bytes


def is_stored(quant: str) -> bool:
    """Whether a file may have tensors in that format, one of ours or of a package."""
    return quant in FILE_BLOCKS or packaged_format(quant) is not None


def check_packages(quants: Iterable[str]) -> None:
    """Check that no package has a format of ours among `quants`. Raises CheckpointError that names the package."""
    if both := sorted({*quants} & FILE_BLOCKS.keys() & {*entry_names(FORMATS)}):
        raise CheckpointError(f"{describe(FORMATS, both[0])}: ktqueue has a format {both[0]} already")


def tensor_bytes(quant: str, shape: tuple[int, ...]) -> int:
    """Return the bytes of a tensor of `shape`, whose last dimension is a row. Raises ValueError like `row_bytes`."""
    return math.prod(shape[:-1]) * row_bytes(quant, shape[-1])


_POWERS_OF_3 = np.array([[1], [3], [9], [27], [81]], np.uint8)


def loaded_format(quant: str) -> str:
    """Return the format in which weights stored as `quant` are loaded."""
    if quant in BLOCKS:
        return quant
    packaged = None if quant in REQUANTISED else packaged_format(quant)
    return REQUANTISED.get(quant, quant) if packaged is None else packaged.stored_as


def requantise(quant: str, data: Bytes) -> Bytes:
    """Convert whole blocks of format `quant` to `loaded_format(quant)`.

    Returns a copy, or `data` itself if the formats are the same. Raises CheckpointError if a package's code fails.
    """
    if quant in BLOCKS:
        return data
    if quant not in REQUANTISED:
        packaged = packaged_format(quant)
        return data if packaged is None else packaged.stored(data, BLOCKS[packaged.stored_as])
    blocks = data.view(LAYOUTS[quant])
    if REQUANTISED[quant] == "Q2_K":
        ternary = np.empty(len(blocks), LAYOUTS["Q2_K"])
        ternary["scales"] = 0x11
        ternary["q"] = blocks["q"] if quant == "TQ2_0" else _pairs_of_tq1(blocks)
        ternary["d"] = ternary["dmin"] = blocks["d"]
        return ternary.view(np.uint8)
    if REQUANTISED[quant] == "Q4_0":
        return _nibbles_of_few_bits(quant, blocks)
    numbers = np.concatenate([blocks["q"] & 15, blocks["q"] >> 4], axis=1)  # [blocks, 32]
    numbers |= ((blocks["high"][:, None] >> np.arange(32, dtype=np.uint32)) & 1).astype(np.uint8) << 4
    out = np.empty(len(blocks), LAYOUTS["Q8_0"])
    out["d"] = blocks["d"]
    out["q"] = numbers.astype(np.int8) - 16
    return out.view(np.uint8)


def _nibbles_of_few_bits(quant: str, blocks: np.ndarray[Any, np.dtype[np.void]]) -> Bytes:
    """Return Q4_0 blocks of Q1_0 or Q2_0 blocks, whose codes of one or two bits begin with the lowest bits of a byte.

    A bit is -1 or 1 times d, which are 7 and 9 in Q4_0. Two bits are -1, 0, 1 or 2 times d.
    """
    bits = 1 if quant == "Q1_0" else 2
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    codes = (blocks["q"][..., None] >> shifts & np.uint8((1 << bits) - 1)).reshape(-1, 32)
    codes = codes * np.uint8(2) + np.uint8(7) if bits == 1 else codes + np.uint8(7)
    out = np.empty(len(codes), LAYOUTS["Q4_0"])
    out["d"] = np.repeat(blocks["d"], len(codes) // len(blocks))
    out["q"] = codes[:, :16] | codes[:, 16:] << np.uint8(4)
    return out.view(np.uint8)


def _pairs_of_tq1(blocks: np.ndarray[Any, np.dtype[np.void]]) -> Bytes:
    """Return the codes of TQ1_0 blocks as Q2_K has them: [blocks, 64], four in a byte, which are 32 columns apart.

    A byte has five ternary digits, or four, as a fraction of 256. Multiplied by 3^n modulo 256 it begins with digit n.
    """
    parts = [
        (blocks[name][:, None] * _POWERS_OF_3[:digits]).reshape(len(blocks), -1)
        for name, digits in (("five", 5), ("also_five", 5), ("four", 4))
    ]
    codes = np.concatenate(parts, axis=1).astype(np.uint16) * 3 >> 8
    four: Bytes = codes.astype(np.uint8).reshape(-1, 2, 4, 32)
    pairs: Bytes = (
        four[:, :, 0] | four[:, :, 1] << np.uint8(2) | four[:, :, 2] << np.uint8(4) | four[:, :, 3] << np.uint8(6)
    )
    return pairs.reshape(-1, 64)
