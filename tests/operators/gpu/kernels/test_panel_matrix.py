"""Matrices in packed panels: the twins against GGUF's decoding, the Triton kernels (interpreted) against the same."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ktqueue.operators.gpu.kernels import panel_matrix
from ktqueue.operators.gpu.kernels.panel_matrix import PanelMatrix, multiply_few
from ktqueue.operators.packed import PackedMatrix

from ..interpreted import by_kernel, by_twin, compiled_for_h200
from .matrices import BLOCKS, activations, columns_of, make_panels

BOUND = 3e-6
"""Of float32 sums in another order."""


def assert_close(got: torch.Tensor, expected: torch.Tensor, bound: float = BOUND) -> None:
    assert (got.float() - expected).abs().max() <= bound * expected.abs().max()


@pytest.mark.parametrize("quant", BLOCKS)
def test_rows_are_decoded_as_gguf_has_them(quant, random_weights):
    """From any row on, or those of some ids, by kernel and twin, bit for bit."""
    panels, weights = make_panels(random_weights, quant, 37, columns_of(quant))
    ids = torch.tensor([36, 0, 17, 17, 31, 15, 16, 1, 2, 3, 4, 5, 6, 7, 8, 9, 33])
    for first, count in ((0, 37), (5, 20)):
        for run in (by_twin, by_kernel):
            out = torch.full((count, panels.columns), torch.nan)
            run(panels.decode, out, first=first)
            assert torch.equal(out, weights[first : first + count])
    for run in (by_twin, by_kernel):
        out = torch.full((len(ids), panels.columns), torch.nan, dtype=torch.bfloat16)
        run(panels.decode, out, ids=ids)
        assert torch.equal(out, weights[ids].bfloat16())


@pytest.mark.parametrize("quant", BLOCKS)
def test_few_rows(quant, random_weights):
    """Weights are not rounded; slabs that the tile has and the matrix has not."""
    panels, weights = make_panels(random_weights, quant, 21, columns_of(quant))
    x = activations(1, panels.columns, torch.bfloat16)
    for run in (by_twin, by_kernel):
        out = torch.full((1, 21), torch.nan)
        run(multiply_few, [panels], x, None, out)
        assert_close(out, x.float() @ weights.T)


def test_more_columns_than_a_tile_has(random_weights, monkeypatch):
    """And more tokens, of float16."""
    monkeypatch.setattr(panel_matrix, "_FEWEST_SLABS", 8)
    monkeypatch.setattr(panel_matrix, "_MOST_SLABS", 8)
    panels, weights = make_panels(random_weights, "Q4_0", 16, 288)
    x, out = activations(3, 288, torch.float16), torch.full((3, 16), torch.nan)
    by_kernel(multiply_few, [panels], x, None, out)
    assert_close(out, x.float() @ weights.T)


@pytest.mark.parametrize("quants", [("Q4_K", "Q6_K"), ("Q8_0", "MXFP4")])
def test_two_formats_in_one_product(quants, random_weights):
    """Both with rows that do not fill a panel; rows of x and of the product are strided."""
    two = [
        make_panels(random_weights, quant, rows, 256, seed=rows) for quant, rows in zip(quants, (40, 7), strict=True)
    ]
    x, bias = activations(2, 264, torch.bfloat16)[:, :256], activations(1, 47, torch.bfloat16)[0]
    expected = x.float() @ torch.cat([weights for _, weights in two]).T
    for added in (None, bias):
        wide = torch.full((2, 50), 7.0)
        by_kernel(multiply_few, [panels for panels, _ in two], x, added, wide[:, 2:49])
        assert_close(wide[:, 2:49], expected if added is None else expected + added.float())
        assert wide[:, :2].eq(7).all() and wide[:, 49:].eq(7).all()


class Watched:
    """The kernel of few rows: where each row of x that it reads begins."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self.rows: list[int] = []

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(packed: torch.Tensor, other: torch.Tensor, x: torch.Tensor, *rest: Any, **sizes: Any) -> None:
            self.rows = [row.data_ptr() for row in x]
            self._kernel[grid](packed, other, x, *rest, **sizes)

        return launch


@pytest.mark.parametrize(
    ("tokens", "wide", "start", "copied"),
    [
        (2, 40, 0, False),
        (2, 40, 4, False),
        (2, 40, 1, True),  # each row begins in the middle of a word
        (2, 40, 2, True),
        (2, 33, 0, True),  # the second does
        (1, 33, 0, False),
        (1, 32, 1, True),  # contiguous, and in the middle of a word
        (2, 64, None, True),  # every second column
    ],
)
def test_rows_are_read_in_whole_words(tokens, wide, start, copied, random_weights, monkeypatch):
    """A GPU faults where eight bytes do not begin at a multiple of eight; the interpreter does not mind."""
    watched = Watched(panel_matrix._few_rows_kernel)
    monkeypatch.setattr(panel_matrix, "_few_rows_kernel", watched)
    panels, weights = make_panels(random_weights, "Q8_0", 16, 32)
    memory = activations(1, tokens * wide + 8, torch.bfloat16)[0]
    x = memory.as_strided((tokens, 32), (wide, 2 if start is None else 1), start or 0)
    out = torch.full((tokens, 16), torch.nan)
    by_kernel(multiply_few, [panels], x, None, out)
    assert_close(out, x.float() @ weights.T)
    assert all(address % 8 == 0 for address in watched.rows)
    assert (watched.rows != [row.data_ptr() for row in x]) == copied


def test_rows_that_are_not_finite_poison_themselves(random_weights):
    panels, weights = make_panels(random_weights, "Q4_K", 16, 256)
    x = activations(2, 256, torch.bfloat16)
    x[1, 77] = torch.nan
    out = torch.empty(2, 16)
    by_kernel(multiply_few, [panels], x, None, out)
    assert out[1].isnan().all()
    assert_close(out[:1], x[:1].float() @ weights.T)


def test_weights_that_are_not_finite_are_refused(random_weights):
    data = random_weights("Q8_0", 3 * 64)
    data[4 * 34 : 4 * 34 + 2] = 0xFF
    with pytest.raises(ValueError, match="row 2"):
        PanelMatrix.pack(PackedMatrix("Q8_0", 3, 64, data), "cpu")


def test_an_h200_takes_them(tmp_path):
    assert compiled_for_h200("matrices", tmp_path) == ["_few_rows_kernel"] * 3 + ["_decode_kernel"] * 2
