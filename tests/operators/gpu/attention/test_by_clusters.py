"""The kernel of one launch compiles to machine code without a GPU. tests/gpu/test_clusters.py runs it on one."""

import ctypes
from typing import Any

import pytest
import torch

from ktqueue.operators.gpu.attention import by_clusters
from ktqueue.operators.gpu.attention.by_clusters import NAME, SOURCE, ClusterFacts, Tile, constants, tile_of
from ktqueue.operators.gpu.kernels.cuda_kernel import machine_code

SHARED_BYTES = 227 << 10
"""Of a program on Hopper."""


@pytest.mark.compiled
@pytest.mark.parametrize(
    "further",
    [
        {},
        {"projected": True, "norm": torch.bfloat16, "epsilon": 1e-6},
        {"projected": True, "norm": torch.float32, "epsilon": 1e-6, "heads": 48},
        {"projected": True, "dtype": torch.float16, "chunk": 8192},
        {"window": 128, "cap": 50.0, "has_sinks": True, "heads": 4},
    ],
)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_it_compiles(head_dim: int, further: dict[str, Any], compiler: ctypes.CDLL) -> None:
    facts = ClusterFacts(32, 4, head_dim, 16, torch.bfloat16, Tile(8, 8), 0.1)._replace(**further)
    for tile in {tile_of(rows, 4, head_dim) for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256)}:
        now = facts._replace(tile=tile)
        options = [f"-D{name}={value}" for name, value in constants(now).items()]
        assert NAME.encode() in machine_code(SOURCE, options, "90", compiler)
        assert by_clusters.shared_bytes(now) < SHARED_BYTES // 2


def test_all_programs_of_few_rows_run_at_once() -> None:
    """An H200 has 132 processors, with room for one program of eight warps each."""
    for rows in range(1, 33):
        tile = tile_of(rows, 4, 128)
        assert tile.programs & (tile.programs - 1) == 0
        assert 64 <= 4 * rows * tile.programs * tile.clusters <= 128, rows
    assert [tile_of(rows, 4, 128) for rows in (64, 256, 1024)] == [Tile(1, 4), Tile(2, 2), Tile(2, 2)]
