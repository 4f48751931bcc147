"""Without a GPU: the kernel that multiplies panels on tensor cores compiles, and its tiles fit."""

import ctypes
from pathlib import Path

import pytest
import torch

from ktqueue.operators.gpu.kernels import cuda_kernel, panel_clusters, panel_tensor_cores
from ktqueue.operators.gpu.kernels.cuda_kernel import CudaKernel, machine_code
from ktqueue.operators.gpu.kernels.operation import compiled_side_by_side
from ktqueue.operators.gpu.kernels.panel_tensor_cores import (
    MOST_TOKENS,
    ProductFacts,
    Tile,
    constants,
    fitting,
    shared_bytes,
    tile_of,
)

from .matrices import BLOCKS, columns_of

SHAPES = [(columns, panels) for columns in (96, 512, 2048, 4096, 11008) for panels in (1, 128, 320, 9496)]


def compiled(facts: ProductFacts, architecture: str, compiler: ctypes.CDLL) -> bytes:
    options = [f"-D{name}={value}" for name, value in constants(facts).items()]
    source = panel_tensor_cores.SOURCE if isinstance(facts.tile, Tile) else panel_clusters.SOURCE
    return machine_code(source, options, architecture, compiler)


@pytest.mark.parametrize(
    ("program", "processor"), [(227 << 10, 228 << 10), (163 << 10, 164 << 10), (99 << 10, 100 << 10)]
)
def test_every_tile_fits(program: int, processor: int) -> None:
    """Into shared memory of an H200, an A100 and an RTX 4090. Each warp has something to do."""
    for columns, panels in SHAPES:
        for token_tiles in (1, 2, MOST_TOKENS // 8):
            wanted = tile_of(columns, panels, token_tiles)
            for quants in (("Q4_K",), ("Q8_0", "Q4_K")):
                facts = ProductFacts(quants, (16 * panels, 16)[: len(quants)], columns, token_tiles, wanted)
                tile = fitting(facts, program, processor).tile
                assert isinstance(tile, Tile)
                needed = shared_bytes(facts._replace(tile=tile))
                assert needed <= program
                assert tile.programs * (needed + 1024) <= processor
                assert tile.stages >= 2
                assert 1 <= tile.warps <= -(-columns // 256)
                if quants == ("Q4_K",) and program == 227 << 10:
                    assert tile == wanted


def test_tiles_of_clusters_fit() -> None:
    """Each superblock of each panel has a warp, which has one or two. The most shared memory that a tile takes fits."""
    for columns in range(32, 6000, 32):
        blocks = -(-columns // 256)
        for panels in (1, 2, 17, 128, 132, 133):
            for tokens in (4, 5, 16, 17):
                tile = panel_clusters.tile_of(blocks, panels, tokens)
                assert (tile is not None) == (8 <= blocks <= 16 and panels <= 132 and 5 <= tokens <= 16)
                if tile is None:
                    continue
                own = -(-blocks // tile.programs)
                assert tile.early <= -(-own * tile.group // tile.warps) <= 2
                assert tile.grid(panels) % tile.programs == 0
                assert panels <= tile.grid(panels) // tile.programs * tile.group < panels + tile.group
                for quants in ((quant, "Q8_0") for quant in BLOCKS):
                    facts = ProductFacts(quants, (16 * panels, 16), columns, 2, tile, epsilon=1e-6)
                    assert shared_bytes(facts) <= 99 << 10  # of an RTX 5090


def test_cpu_tensors_have_another_way() -> None:
    assert not panel_tensor_cores.fits(torch.zeros(8, 64, dtype=torch.bfloat16))


@pytest.mark.compiled
@pytest.mark.parametrize("quant", BLOCKS)
def test_every_format_compiles(quant: str, compiler: ctypes.CDLL) -> None:
    """Alone, above another one and below it; also where a superblock is not whole."""
    columns = columns_of(quant)
    for quants, rows in (((quant,), (20,)), ((quant, "Q8_0"), (20, 16)), (("Q6_K", quant), (16, 8))):
        facts = ProductFacts(quants, rows, columns, 1, tile_of(columns, 3, 1))
        assert b"multiply_panels" in compiled(facts, "90", compiler)


@pytest.mark.compiled
@pytest.mark.parametrize("architecture", ["80", "90"])
def test_every_kind_of_result_compiles(architecture: str, compiler: ctypes.CDLL) -> None:
    for columns, panels in ((2048, 320), (4096, 128)):
        for token_tiles in (1, 2, 4):
            tile = tile_of(columns, panels, token_tiles)
            facts = ProductFacts(("Q4_K",), (16 * panels,), columns, token_tiles, tile)
            for changed in (
                facts,
                facts._replace(adds=True, has_bias=True),
                facts._replace(is_float=True, epsilon=1e-6),
            ):
                assert b"multiply_panels" in compiled(changed, architecture, compiler)


@pytest.mark.compiled
@pytest.mark.parametrize("quants", [("Q4_K",), ("Q6_K", "Q5_K"), ("Q8_0", "Q4_0")])
def test_clusters_compile(quants: tuple[str, ...], compiler: ctypes.CDLL) -> None:
    """With one or two superblocks for a warp, also where the last is not whole, and all kinds of results."""
    for columns in (2048, 2080 if quants[0] == "Q8_0" else 2816, 4096):
        tile = panel_clusters.tile_of(-(-columns // 256), 128, 16)
        assert tile is not None
        for token_tiles in (1, 2):
            facts = ProductFacts(quants, (1024, 1024)[: len(quants)], columns, token_tiles, tile)
            for changed in (
                facts,
                facts._replace(adds=True, has_bias=True),
                facts._replace(is_float=True, epsilon=1e-6),
            ):
                assert b"multiply_by_clusters" in compiled(changed, "90", compiler)


@pytest.mark.compiled
def test_kernels_are_compiled_side_by_side(
    compiler: ctypes.CDLL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are kept on disk, and nothing runs. What does not compile is told at the next launch."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cuda_kernel, "_nvrtc", lambda: compiler)
    good, bad = tmp_path / "good.cu", tmp_path / "bad.cu"
    good.write_text('extern "C" __global__ void one(int* x) { *x = 1; }')
    bad.write_text("no")
    kernels = [CudaKernel(source, [], "one", 32, 0, "90") for source in (good, bad)]
    with compiled_side_by_side() as missing:
        for kernel in kernels:
            kernel.launch((1, 1), [torch.zeros(1, dtype=torch.int32)])
            kernel.launch((1, 1), [torch.zeros(1, dtype=torch.int32)])
    assert sorted(missing) == ["bad", "good"]
    with compiled_side_by_side() as missing:
        CudaKernel(good, [], "one", 32, 0, "90").launch((1, 1), [torch.zeros(1, dtype=torch.int32)])
    assert missing == []
    assert [path.name for path in tmp_path.glob("cache/*/*.cubin")] == ["good.cubin"]
    with pytest.raises(RuntimeError, match=r"bad\.cu does not compile:\n"):
        kernels[1].launch((1, 1), [torch.zeros(1, dtype=torch.int32)])
