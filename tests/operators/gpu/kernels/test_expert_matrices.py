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
    for pairs in (2, 4, 16):
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


def test_programs_of_few_pairs_are_larger_where_few_would_fit() -> None:
    gate_up, down, memory = MatrixTile(8, warps=8, has_runs=False), MatrixTile(8, warps=4), 227 << 10
    found = [
        expert_matrices.filling_tile(quant, experts, columns, tile, memory)
        for quant, experts, columns, tile in (
            ("Q4_K", 128, 2048, gate_up),  # two programs of eight warps
            ("Q4_K", 128, 4096, gate_up),
            ("Q4_K", 256, 7168, gate_up),
            ("Q6_K", 128, 768, down),
            ("Q6_K", 512, 512, down),  # four warps would count the pairs of 512 experts
            ("Q8_0", 64, 1408, down),  # a multiprocessor would hold as many
        )
    ]
    warps = [tile.warps if tile else 0 for tile in found]
    assert warps == [8, 16, 14, 4, 8, 4]
    many = MatrixTile(32, warps=8)
    assert expert_matrices.filling_tile("Q6_K", 128, 768, many, memory) == many
