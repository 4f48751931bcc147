"""Matrices in packed panels: twins and Triton kernels (interpreted) against the decoding of GGUF."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ktqueue.operators.gpu.kernels.norm import RmsNorm, add_rms_norm
from ktqueue.operators.gpu.kernels.panel_matrix import PanelMatrix, in_words, multiply_few
from ktqueue.operators.packed import Bytes, PackedMatrix

from ..interpreted import by_kernel, by_twin, compiled_for_h200
from .matrices import BLOCKS, activations, columns_of, make_panels

BOUND = 3e-6
"""Relative error of float32 sums in another order."""


def assert_close(got: torch.Tensor, expected: torch.Tensor, bound: float = BOUND) -> None:
    assert (got.float() - expected).abs().max() <= bound * expected.abs().max()


@pytest.mark.parametrize("quant", BLOCKS)
def test_rows_are_decoded_as_gguf_has_them(quant: str, random_weights: Callable[..., Bytes]) -> None:
    """Kernel and twin decode the same bits, from any row on or for the rows of some ids."""
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
def test_products_of_few_rows_equal_the_decoded_weights(quant: str, random_weights: Callable[..., Bytes]) -> None:
    """Weights are not rounded. The tile has more slabs than the matrix."""
    panels, weights = make_panels(random_weights, quant, 21, columns_of(quant))
    x = activations(1, panels.columns, torch.bfloat16)
    for run in (by_twin, by_kernel):
        out = torch.full((1, 21), torch.nan)
        run(multiply_few, [panels], x, None, out)
        assert_close(out, x.float() @ weights.T)


@pytest.mark.parametrize(("quant", "tokens", "columns"), [("Q4_0", 3, 4128), ("Q6_K", 1, 8448), ("Q4_K", 1, 13_312)])
def test_a_matrix_may_have_more_columns_than_a_tile(
    quant: str, tokens: int, columns: int, random_weights: Callable[..., Bytes]
) -> None:
    """Matrices of 2, 3 and 4 tiles. With one token, two tiles are requested at once. Rows are normed, or not."""
    panels, weights = make_panels(random_weights, quant, 16, columns)
    x, norm = activations(tokens, columns, torch.float16), RmsNorm(torch.rand(columns), 1e-5)
    out, normed = torch.full((2, tokens, 16), torch.nan)
    by_kernel(multiply_few, [panels], x, None, out)
    assert_close(out, x.float() @ weights.T)
    by_kernel(multiply_few, [panels], x, None, normed, norm=norm)
    assert_close(normed, add_rms_norm(x, *norm).float() @ weights.T, 1e-3)


@pytest.mark.parametrize("quants", [("Q4_K", "Q6_K"), ("Q8_0", "MXFP4")])
def test_one_product_may_have_two_formats(quants: tuple[str, str], random_weights: Callable[..., Bytes]) -> None:
    """Rows of both formats do not fill a panel. Rows of x and of the product are strided."""
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


def test_a_product_may_be_added_to_what_is_there(random_weights: Callable[..., Bytes]) -> None:
    """It is rounded before, as a product of its own would be."""
    two = [make_panels(random_weights, quant, rows, 256, seed=rows)[0] for quant, rows in (("Q4_K", 40), ("Q6_K", 7))]
    x, before = activations(2, 256, torch.bfloat16), activations(2, 47, torch.bfloat16)
    for run in (by_twin, by_kernel):
        product, found = torch.empty(2, 47, dtype=torch.bfloat16), before.clone()
        run(multiply_few, two, x, None, product)
        run(multiply_few, two, x, None, found, adds=True)
        assert torch.equal(found, (before.float() + product.float()).bfloat16())


def test_rows_may_be_normed_by_the_product(random_weights: Callable[..., Bytes]) -> None:
    two = [make_panels(random_weights, quant, rows, 288, seed=rows)[0] for quant, rows in (("Q8_0", 40), ("Q4_0", 7))]
    x, factors = activations(2, 288, torch.bfloat16), torch.rand(288)
    for norm in (RmsNorm(factors, 1e-5), RmsNorm(factors.bfloat16(), 1e-5)):
        for run in (by_twin, by_kernel):
            expected, found = torch.empty(2, 2, 47)
            run(multiply_few, two, add_rms_norm(x, *norm), None, expected)
            run(multiply_few, two, x, None, found, norm=norm)
            assert_close(found, expected, 1e-3)


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
def test_rows_are_read_in_whole_words(tokens: int, wide: int, start: int | None, copied: bool) -> None:
    """A GPU faults on eight bytes that do not begin at a multiple of eight; the interpreter does not."""
    memory = activations(1, tokens * wide + 8, torch.bfloat16)[0]
    x = memory.as_strided((tokens, 32), (wide, 2 if start is None else 1), start or 0)
    words = in_words(x)
    assert torch.equal(words, x) and words.stride(1) == 1
    assert all(row.data_ptr() % 8 == 0 for row in words)
    assert (words.data_ptr() != x.data_ptr()) == copied


def test_rows_that_are_not_finite_poison_themselves(random_weights: Callable[..., Bytes]) -> None:
    panels, weights = make_panels(random_weights, "Q4_K", 16, 256)
    x = activations(2, 256, torch.bfloat16)
    x[1, 77] = torch.nan
    out = torch.empty(2, 16)
    by_kernel(multiply_few, [panels], x, None, out)
    assert out[1].isnan().all()
    assert_close(out[:1], x[:1].float() @ weights.T)


def test_weights_that_are_not_finite_are_refused(random_weights: Callable[..., Bytes]) -> None:
    data = random_weights("Q8_0", 3 * 64)
    data[4 * 34 : 4 * 34 + 2] = 0xFF
    with pytest.raises(ValueError, match="row 2"):
        PanelMatrix.pack(PackedMatrix("Q8_0", 3, 64, data), "cpu")


@pytest.mark.compiled
def test_the_kernels_compile_for_an_h200(tmp_path: Path) -> None:
    assert compiled_for_h200("matrices", tmp_path) == ["_few_rows_kernel"] * 15 + ["_decode_kernel"] * 4
