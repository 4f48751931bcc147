"""Storage types that no kernel reads but that another type holds exactly: they are written anew as they are taken.

llama.cpp stores Q5_0 where a row is no multiple of a K block, as the down experts of DeepSeek-V2-Lite in Q4_K_M files.
Its five bits with an offset of 16 are a Q8_0 block of the same scale. Layouts: ggml-common.h.
"""

from dataclasses import replace

import numpy as np

from ktqueue.loading.weight_formats import Bytes
from ktqueue.operators.packed import ExpertWeights, PackedExperts, PackedMatrix

WIDENED = {"Q5_0": "Q8_0"}
_Q5_0 = np.dtype([("d", "<u2"), ("high", "<u4"), ("low", "u1", 16)])
_Q8_0 = np.dtype([("d", "<u2"), ("q", "i1", 32)])


def kept_as(quant: str) -> str:
    """The type in which weights of type `quant` are handed out."""
    return WIDENED.get(quant, quant)


def widen(quant: str, data: Bytes) -> Bytes:
    """Whole blocks of type `quant` as blocks of kept_as(quant): a copy, or `data` itself where they are the same."""
    if quant not in WIDENED:
        return data
    blocks = data.view(_Q5_0)
    low = np.concatenate([blocks["low"] & 15, blocks["low"] >> 4], axis=1)  # [blocks, 32]
    high = (blocks["high"][:, None] >> np.arange(32, dtype=np.uint32)) & 1
    out = np.empty(len(blocks), _Q8_0)
    out["d"] = blocks["d"]
    out["q"] = low.astype(np.int8) + (high << 4).astype(np.int8) - 16
    return out.view(np.uint8)


def widen_matrix(matrix: PackedMatrix) -> PackedMatrix:
    """A matrix in the type that it is handed out in."""
    return replace(matrix, quant=kept_as(matrix.quant), data=widen(matrix.quant, matrix.data))


def widen_experts(weights: ExpertWeights) -> ExpertWeights:
    """The experts of a layer in the types that they are handed out in."""

    def stack(one: PackedExperts) -> PackedExperts:
        if one.quant not in WIDENED:
            return one
        return replace(one, quant=kept_as(one.quant), data=[widen(one.quant, data) for data in one.data])

    return ExpertWeights(stack(weights.gate), stack(weights.up), stack(weights.down))
