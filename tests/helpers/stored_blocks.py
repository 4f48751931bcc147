"""Blocks of every format that kernels read: their sizes and values as others define them, mostly the gguf package."""

from typing import Any

import gguf
import numpy as np
import torch

_OWN = {"UINT4": (32, 19), "FP8": (128, 132), "FP4": (64, 44)}

Values = np.ndarray[Any, np.dtype[np.float32]]


def block_size(quant: str) -> tuple[int, int]:
    """Return the weights and the bytes of a block."""
    if quant in _OWN:
        return _OWN[quant]
    elements, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[quant]]
    return elements, size


def values_of(quant: str, data: np.ndarray[Any, np.dtype[np.uint8]]) -> Values:
    """Return the weights of whole blocks, flat: those of gguf's formats by gguf, of float8 by torch."""
    values: Values
    if quant == "UINT4":
        blocks = data.reshape(-1, 19)
        codes = np.concatenate([blocks[:, 3:] & 15, blocks[:, 3:] >> 4], 1).astype(np.int32) - blocks[:, 2:3]
        values = (blocks[:, :2].copy().view("<f2") * codes.astype(np.float32)).astype(np.float32)
    elif quant == "FP8":
        blocks = data.reshape(-1, 132)
        numbers = torch.from_numpy(blocks[:, 4:].copy()).view(torch.float8_e4m3fn).float().numpy()
        values = blocks[:, :4].copy().view("<f4") * numbers
    elif quant == "FP4":  # the blocks of NVFP4 with scales of 1, and the other scales in float64, rounded once
        blocks = data.reshape(-1, 44)
        d, r = blocks[:, :8].copy().view("<f4").astype(np.float64).T[..., None]
        scales = torch.from_numpy(blocks[:, 8:12] & 127).view(torch.float8_e4m3fn).double().numpy()
        ones = np.concatenate([np.full((len(blocks), 4), 0x38, np.uint8), blocks[:, 12:]], 1)
        codes = gguf.dequantize(ones.reshape(-1), gguf.GGMLQuantizationType.NVFP4).reshape(-1, 4, 16)
        values = (scales * (d + r)).astype(np.float32)[..., None] * codes
    else:
        values = gguf.dequantize(data, gguf.GGMLQuantizationType[quant])
    return values.reshape(-1)
