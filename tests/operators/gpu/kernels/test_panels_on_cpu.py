"""Kernels that multiply packed panels, run on the CPU: they give what decoded weights give."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ktqueue.operators.gpu.kernels import panel_clusters, panel_layout, panel_tensor_cores
from ktqueue.operators.gpu.kernels.panel_clusters import ClusterTile
from ktqueue.operators.gpu.kernels.panel_matrix import PanelMatrix
from ktqueue.operators.gpu.kernels.panel_tensor_cores import ProductFacts, constants, tile_of
from ktqueue.operators.packed import Bytes

from ..on_cpu.emulated import EmulatedKernel
from .matrices import activations, make_panels

EPSILON = 1e-5
pytestmark = pytest.mark.compiled


def multiply(
    parts: list[PanelMatrix],
    x: torch.Tensor,
    bias: torch.Tensor | None,
    norm: torch.Tensor | None,
    by_clusters: bool,
    folder: Path,
) -> torch.Tensor:
    """As multiply_some, by one of both kernels."""
    tokens, columns = x.shape
    rows = tuple(part.rows for part in parts)
    panels = sum(map(panel_layout.panel_count, rows))
    tile = panel_clusters.tile_of(-(-columns // 256), panels, tokens) if by_clusters else tile_of(columns, panels, 2)
    assert tile is not None
    facts = ProductFacts(
        tuple(part.quant for part in parts), rows, columns, 1 if tokens <= 8 else 2, tile,
        has_bias=bias is not None, is_float=True, epsilon=None if norm is None else EPSILON,
    )  # fmt: skip
    out = torch.full((tokens, sum(rows) + 1), torch.nan)
    of = panel_clusters if by_clusters else panel_tensor_cores
    grid, together = (tile.grid(panels), tile.programs) if isinstance(tile, ClusterTile) else (min(panels, 3), 1)
    arguments: list[torch.Tensor | int] = [
        parts[0].panels, parts[-1].panels, x, x if norm is None else norm, x if bias is None else bias, out, tokens,
        x.stride(0), out.stride(0),
    ]  # fmt: skip
    kernel = EmulatedKernel(of.SOURCE, constants(facts), of.NAME, folder)
    kernel.launch((grid, 1), arguments, threads=32 * tile.warps, together=together)
    assert out[:, -1].isnan().all()
    return out[:, :-1]


@pytest.mark.parametrize("by_clusters", [True, False])
@pytest.mark.parametrize(
    ("quants", "rows", "columns", "tokens", "normed"),
    [
        (("Q4_K",), (40,), 2048, 16, False),
        (("Q4_K", "Q6_K"), (40, 24), 4096, 9, True),
        (("Q8_0", "Q4_1"), (16, 90), 2080, 5, False),
        (("MXFP4",), (100,), 2816, 8, True),
        (("Q6_K",), (100,), 2048, 16, False),
        (("Q4_0",), (60,), 2080, 12, False),
    ],
)
def test_products(
    quants: tuple[str, ...],
    rows: tuple[int, ...],
    columns: int,
    tokens: int,
    normed: bool,
    by_clusters: bool,
    random_weights: Callable[..., Bytes],
    tmp_path: Path,
) -> None:
    made = [make_panels(random_weights, *of, columns) for of in zip(quants, rows, strict=True)]
    weights = torch.cat([decoded for _, decoded in made]).double()
    x = activations(tokens, columns + 32, torch.bfloat16)[:, 32:]
    bias = activations(1, sum(rows), torch.bfloat16)[0] if len(rows) > 1 else None
    norm = activations(1, columns, torch.bfloat16)[0].abs() if normed else None
    out = multiply([panels for panels, _ in made], x, bias, norm, by_clusters, tmp_path)
    left = x.double()
    if norm is not None:
        left = (left * norm.double()).bfloat16() * torch.rsqrt(left.square().mean(-1, keepdim=True) + EPSILON)
    added = 0.0 if bias is None else bias.double()
    exact, rounded = (left @ of.T + added for of in (weights, weights.float().bfloat16().double()))
    # Only these kernels have formats of small codes, whose weights are not rounded: see superblock.cuh.
    is_exact = not by_clusters and quants[-1] in ("Q4_0", "Q6_K") and len(quants) == 1
    error = (out - (exact if is_exact else rounded)).norm() / exact.norm()
    assert error <= (1e-6 if is_exact else 5e-4 if len(quants) == 1 else 1.2e-3)
