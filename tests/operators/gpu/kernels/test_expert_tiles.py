"""Tiles of products with packed experts: which are used, and that every choice of the benchmark computes the same."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import expert_tiles as benchmark
from ktqueue.operators.gpu.kernels.expert_tiles import TILES
from ktqueue.operators.gpu.kernels.panel_layout import ExpertRecord

from ..interpreted import by_kernel, by_twin, compiled_for_h200

RECORD = ExpertRecord("Q4_0", "Q4_0", "Q8_0", 64, 32)


@pytest.fixture(scope="module")
def layers() -> benchmark.Layers:
    return benchmark.Layers.make(RECORD, 2, 3, "cpu")


@pytest.fixture(scope="module")
def step(layers: benchmark.Layers) -> benchmark.Step:
    """The second layer: one expert has ten pairs, one has five, one has none, and a pair is skipped."""
    step = benchmark.Step.make(layers, 1, 8, 2)
    step.pairs.ids[:] = torch.tensor([[0, 1], [0, 1], [1, 0], [0, 1], [0, 0], [1, -1], [0, 0], [0, 0]])
    return step


# A choice that differs from these in the size of its tiles only is left to the compiler and to the benchmark.
@pytest.mark.parametrize(
    "name",
    [
        "dots 2 of some, 32x32, 8x64",
        "dots 4, 8x32x3, 8x32",
        "dots 4 of some, 8x32x3, 8x32",
        "dots 8 of some, 8x32, 8x32",
        "cores 16x64, scanned",
        "cores 16x64",
        "cores 16x64, permuted",
        "cores 16x128, permuted, 8 warps",
        "cores 64x128, permuted, 3 stages",
        "decoded",
    ],
)
def test_choices_compute_the_same(name: str, step: benchmark.Step, layers: benchmark.Layers) -> None:
    choice = benchmark.CHOICES[name]
    if choice.tiles is not None:  # so few pairs would have programs of their own
        choice = replace(choice, tiles=replace(choice.tiles, own_pairs=0))
    found, twin = (run(step.run, choice, layers.memory) for run in (by_kernel, by_twin))
    assert benchmark.largest_error(found, twin) < (5e-3 if name.startswith("dots") else 1e-2)


def test_a_wrong_pair_is_an_error(step: benchmark.Step) -> None:
    expected = step.expected()
    wrong = expected.clone()
    wrong[7, 1, :4] = 0
    assert benchmark.largest_error(expected, expected) == 0
    assert benchmark.largest_error(wrong, expected) > benchmark.BOUND
    wrong[7, 1, 0] = torch.nan
    assert benchmark.largest_error(wrong, expected) == torch.inf


def test_choices_are_for_some_rows() -> None:
    points = benchmark.applicable((1, 64, 2048))
    assert ("as used", 1) in points and ("as used", 2048) in points
    assert ("decoded", 1) not in points and ("decoded", 2048) in points
    assert {name for name, _ in points} == set(benchmark.CHOICES)


@pytest.mark.parametrize(("pairs", "slabs"), [(8, 32), (11, 32), (12, 16), (32, 16)])
def test_pairs_of_few_rows_have_programs_of_their_own(pairs: int, slabs: int) -> None:
    own, together = (TILES.dot_tiles(pairs, are_sorted=are_sorted) for are_sorted in (False, True))
    assert (own.pairs, own.gate_up.slabs) == (1, slabs)
    assert (together.pairs, together.gate_up.slabs) == (2, 16)


@pytest.mark.parametrize(
    ("pairs", "is_float32", "has_float32", "block"),
    [
        (512, False, False, 16),  # programs find their pairs by themselves
        (1440, False, False, 16),
        (1536, False, False, 32),
        (1536, False, True, 32),
        (4096, False, False, 64),
        (1 << 16, False, False, 128),
        (1 << 16, False, True, 64),
        (1 << 16, True, False, 32),
    ],
)
def test_blocks_on_tensor_cores_grow_with_the_pairs(
    pairs: int, is_float32: bool, has_float32: bool, block: int
) -> None:
    tile = TILES.core_tile(pairs, 128, is_float32=is_float32, has_float32=has_float32)
    assert tile.pairs == block
    assert tile.permuted == (block > 16)
    if is_float32 or has_float32:
        assert tile.stages == 2, "three need more shared memory than many GPUs have"


@pytest.mark.compiled
def test_choices_compile_for_an_h200(tmp_path: Path) -> None:
    dots, cores = ["_prepare_kernel"] + 2 * ["_experts_kernel"], 2 * ["_sort_kernel", "_panels_kernel"]
    assert compiled_for_h200("expert tiles", tmp_path) == dots + 2 * cores
