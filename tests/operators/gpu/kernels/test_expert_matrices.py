"""The kernel in CUDA C++ compiles to machine code for every format, without a GPU. tests/gpu runs it on one."""

import ctypes
import sys
from pathlib import Path

import pytest

from ktqueue.operators import native
from ktqueue.operators.gpu.kernels import expert_matrices, panel_layout
from ktqueue.operators.gpu.kernels.expert_matrices import MatrixFacts
from ktqueue.operators.gpu.kernels.expert_tiles import TILES, MatrixTile
from ktqueue.operators.native import SILU

from .panel_pools import GATES

ARCHITECTURES = "sm_80", "sm_90"
QUANTS = [quant for quant in native.QUANTS if quant not in panel_layout.FLOAT_PRODUCTS]


@pytest.fixture(scope="module")
def compiler() -> ctypes.CDLL:
    """NVRTC, from where `make compiled` puts it."""
    (folder,) = Path(sys.prefix, "nvrtc").glob("nvidia/*/lib")
    (parts,), (library,) = folder.glob("libnvrtc-builtins.so.*"), folder.glob("libnvrtc.so.*")
    ctypes.CDLL(str(parts), mode=ctypes.RTLD_GLOBAL)  # the other one does not look beside itself in every release
    return ctypes.CDLL(str(library))


def machine_code(compiler: ctypes.CDLL, constants: dict[str, str | int], architecture: str) -> bytes:
    """Compile as torch does. Fails with what the compiler says."""
    options = [f"--gpu-architecture={architecture}", *expert_matrices.options(constants)]
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    source = expert_matrices.SOURCE.read_bytes()
    assert not compiler.nvrtcCreateProgram(ctypes.byref(program), source, b"expert_matrices.cu", 0, None, None)
    words = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    failed = compiler.nvrtcCompileProgram(program, len(options), words)
    compiler.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    compiler.nvrtcGetProgramLog(program, log)
    assert not failed, log.value.decode()
    compiler.nvrtcGetCUBINSize(program, ctypes.byref(size))
    code = ctypes.create_string_buffer(size.value)
    compiler.nvrtcGetCUBIN(program, code)
    compiler.nvrtcDestroyProgram(ctypes.byref(program))
    return code.raw


@pytest.mark.compiled
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_format_compiles(architecture: str, compiler: ctypes.CDLL) -> None:
    """Rows end in a short superblock, and in a whole one."""
    tiles = TILES.matrix_tiles(4, 1)
    assert tiles
    for quant in QUANTS:
        both = MatrixFacts(quant, 8, 384, 96, SILU, tiles.gate_up)
        one = MatrixFacts(quant, 8, 256, 512, None, tiles.down, has_bias=True, is_weighted=True)
        for facts in (both, one):
            code = machine_code(compiler, expert_matrices.constants(facts), architecture)
            assert expert_matrices.NAME.encode() in code


@pytest.mark.compiled
def test_every_gate_and_tile_compiles(compiler: ctypes.CDLL) -> None:
    for pairs in (4, 16):
        tiles = TILES.matrix_tiles(pairs, 1)
        assert tiles
        for gate in GATES:
            facts = MatrixFacts("Q4_K", 128, 2048, 768, gate, tiles.gate_up, True, gate.weighted_input)
            assert machine_code(compiler, expert_matrices.constants(facts), "sm_90")


def test_tiles_are_smaller_where_shared_memory_is_short() -> None:
    tile, memory = MatrixTile(32, warps=12), 227 << 10
    assert expert_matrices.fitting_tile("Q4_K", 128, 2048, tile, memory) == tile
    assert expert_matrices.fitting_tile("Q4_K", 128, 4096, tile, memory) == tile._replace(pairs=24, warps=10)
    assert expert_matrices.fitting_tile("Q4_K", 128, 7168, tile, memory) == tile._replace(pairs=16, warps=8)
    assert expert_matrices.fitting_tile("Q4_K", 128, 2048, tile, 48 << 10) is None
