"""Compares what an expert layer computes with float64 arithmetic on the decoded weights.

Bounds: with float32 activations the error is that of float32 sums. With int8 activations the kernels agree with the
twin, which rounds the same way, except for a few activations between gate and down that are on the edge between two
steps. If an expert has enough rows for AMX tiles, weights and activations are rounded to bf16 instead.
"""

from typing import Any

import torch
from kernel_types import Exact

from ktqueue.operators import native, reference
from ktqueue.operators.packed import ExpertWeights

BOUND = 1e-5
TWIN_BOUND = 2e-3
WORD_BOUNDS = {"Q4_K": 1e-2}  # its scales are 16-bit integers; a fifth of the error from rounding activations
TILE_BOUND = 0.02
PLAIN = ("F32", "F16", "BF16")

Known = dict[tuple[str, int, int, bool], torch.Tensor]
"""What the twin computes by format, tokens, columns and rounding, where these decide on all inputs."""


def tiled(packed: ExpertWeights, isa: str, ids: torch.Tensor) -> bool:
    """Return whether an expert has enough rows for tiles in one of its matrices."""
    matrices = (packed.gate, packed.up, packed.down)
    rows = [native.tile_rows(matrix.quant, isa or native.isa()) for matrix in matrices]
    return any(0 < least <= ids.flatten().bincount().max() for least in rows)


def assert_close(
    got: torch.Tensor,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    packed: ExpertWeights,
    exact: Exact,
    isa: str = "",
    activations: str = "int8",
    known: Known | None = None,
    **options: Any,
) -> None:
    """Compare `got` with the twin of a layer with those options. `known`: what the twin has computed before."""
    tiles = activations == "int8" and tiled(packed, isa, ids)
    rounded = activations == "int8" and not tiles and packed.gate.quant not in (*PLAIN, "FP8")
    if rounded:
        options["rounded"] = reference.quantize_activations
    case = packed.gate.quant, *x.shape, rounded
    expected = known.get(case) if known is not None else None
    if expected is None:
        expected = reference.experts(x.double(), ids, weights.double(), packed, exact, **options)
        if known is not None:
            known[case] = expected
    if tiles:
        assert (got - expected).norm() <= TILE_BOUND * expected.norm()
    elif rounded:
        assert (got - expected).norm() <= WORD_BOUNDS.get(packed.gate.quant, TWIN_BOUND) * expected.norm()
    else:
        assert (got - expected).abs().max() <= BOUND * expected.abs().max()
