"""The kernel in CUDA C++ compiles to machine code for every format, without a GPU. tests/gpu runs it on one."""

import ctypes

import pytest

from ktqueue.operators import native
from ktqueue.operators.gpu.kernels import expert_matrices, panel_layout
from ktqueue.operators.gpu.kernels.cuda_kernel import machine_code
from ktqueue.operators.gpu.kernels.expert_matrices import SOURCE, ProductFacts
from ktqueue.operators.gpu.kernels.expert_tiles import TILES, MatrixTile
from ktqueue.operators.native import SILU

from .panel_pools import GATES

ARCHITECTURES = "80", "90"
QUANTS = [quant for quant in native.QUANTS if quant not in panel_layout.FLOAT_PRODUCTS]


@pytest.mark.compiled
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_format_compiles(architecture: str, compiler: ctypes.CDLL) -> None:
    """Rows end in a short superblock, and in a whole one."""
    tiles = TILES.matrix_tiles(4, 1)
    assert tiles
    for quant in QUANTS:
        both = ProductFacts(quant, 8, 384, 96, SILU)
        one = ProductFacts(quant, 8, 256, 512, None, has_bias=True, is_weighted=True)
        for facts, tile in ((both, tiles.gate_up), (one, tiles.down)):
            options = expert_matrices.options(expert_matrices.constants(facts, tile))
            code = machine_code(SOURCE, options, architecture, compiler)
            assert expert_matrices.NAME.encode() in code


@pytest.mark.compiled
def test_every_gate_and_tile_compiles(compiler: ctypes.CDLL) -> None:
    for pairs in (4, 16):
        tiles = TILES.matrix_tiles(pairs, 1)
        assert tiles
        for gate in GATES:
            facts = ProductFacts("Q4_K", 128, 2048, 768, gate, True, gate.weighted_input)
            options = expert_matrices.options(expert_matrices.constants(facts, tiles.gate_up))
            assert machine_code(SOURCE, options, "90", compiler)


def test_tiles_are_smaller_where_shared_memory_is_short() -> None:
    tile, memory = MatrixTile(32, warps=12), 227 << 10
    assert expert_matrices.fitting_tile("Q4_K", 128, 2048, tile, memory) == tile
    assert expert_matrices.fitting_tile("Q4_K", 128, 4096, tile, memory) == tile._replace(pairs=24, warps=10)
    assert expert_matrices.fitting_tile("Q4_K", 128, 7168, tile, memory) == tile._replace(pairs=16, warps=8)
    assert expert_matrices.fitting_tile("Q4_K", 128, 2048, tile, 48 << 10) is None
