"""A storage format for ktqueue: four bits in two's complement, with a scale for each 32 numbers.

A block is a half d, and 16 bytes with two numbers each, the first one in the lower bits. A weight is d * number.
Folders have the bytes as `codes` [rows, columns / 2], and d as `scales` [rows, columns / 32].
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ktqueue.loading.storage_format import Bytes, Floats, FolderLayout, Shape, StorageFormat

BLOCK = np.dtype([("d", "<f2"), ("codes", "u1", 16)])
Q8_0 = np.dtype([("d", "<f2"), ("q", "i1", 32)])


def numbers(blocks: Any) -> Any:
    """Return the numbers of blocks, [blocks, 32] int8."""
    pairs = np.stack([blocks["codes"] << 4, blocks["codes"] & 0xF0], -1)
    return pairs.reshape(len(blocks), 32).view(np.int8) >> 4


def decode(data: Bytes) -> Floats:
    blocks = data.view(BLOCK)
    values: Floats = blocks["d"].astype(np.float32)[:, None] * numbers(blocks)
    return values.reshape(-1)


def convert(data: Bytes) -> Bytes:
    blocks = data.view(BLOCK)
    out = np.empty(len(blocks), Q8_0)
    out["d"], out["q"] = blocks["d"], numbers(blocks)
    return out.view(np.uint8)


def shape(parts: Mapping[str, Shape]) -> Shape:
    rows, half = parts["codes"]
    return rows, 2 * half


def join(parts: Mapping[str, Any]) -> Bytes:
    out = np.empty(parts["scales"].shape, BLOCK)
    out["d"], out["codes"] = parts["scales"], parts["codes"].reshape(*out.shape, 16)
    return out.view(np.uint8)


FORMAT = StorageFormat(
    name="TWOS4",
    elements=32,
    block_bytes=18,
    decode=decode,
    stored_as="Q8_0",
    convert=convert,
    gguf_type=200,
    folder=FolderLayout(quant_method="twos4", parts=("codes", "scales"), shape=shape, join=join),
)
