"""Packed matrices times rows: every format, instruction set and size, against float64 mathematics."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kernel_types import Exact, RandomWeights

from ktqueue.loading.weight_formats import BLOCKS
from ktqueue.operators import native, reference

PLAIN = ("F32", "F16", "BF16")
TILE_BOUND = 0.002  # with AMX tiles: weights and activations in bf16
BOUND = 1e-6  # of float32 sums, relative to the sum of the products' magnitudes
# For scales that are 16-bit integers. The error is largest if minimums give all weights one sign, which happens in
# random bytes but in no model.
WORD_BOUNDS = {"Q4_K": 1e-4}


def multiply(linear: native.Linear, x: torch.Tensor, rows: int) -> torch.Tensor:
    out = torch.full((len(x), rows), torch.nan)
    linear.forward(x.numpy(), out.numpy())
    return out


def normal(tokens: int, columns: int) -> torch.Tensor:
    return torch.randn(tokens, columns, generator=torch.Generator().manual_seed(tokens))


def sizes(quant: str) -> list[tuple[int, int]]:
    """Return (rows, columns): whole panels, one row, a partial panel, a partial superblock, a partial slab."""
    block = max(32, BLOCKS[quant][0])
    return [(48, 512), (1, block), (33, 512 + block), *([(17, 45), (5, 1)] if quant in PLAIN else [])]


@pytest.mark.parametrize("kept", ["int8", "float32"])
@pytest.mark.parametrize("quant", native.QUANTS)
def test_products_equal_the_twin(
    quant: str, kept: native.ActivationType, isa: str, random_weights: RandomWeights, exact: Exact, two_threads: None
) -> None:
    for rows, columns in sizes(quant):
        data = random_weights(quant, rows * columns)
        linear = native.Linear(quant, rows, columns, data, activations=kept, isa=isa)
        decoded = exact(quant, data, rows * columns).view(rows, columns)
        for tokens in (1, 2, 3, 4, 7, 8, 16, 33, 128):
            x = normal(tokens, columns)
            seen = x.double()
            if kept == "int8" and quant not in (*PLAIN, "FP8"):
                seen = reference.quantize_activations(seen)
            expected = seen @ decoded.T
            got = multiply(linear, x, rows)
            if kept == "int8" and 0 < native.tile_rows(quant, isa) <= tokens:
                expected, bound = x.double() @ decoded.T, TILE_BOUND
            else:
                bound = WORD_BOUNDS.get(quant, BOUND) if kept == "int8" else BOUND
            assert (got - expected).norm() <= bound * (seen.abs() @ decoded.T.abs()).norm(), (rows, columns, tokens)


@pytest.mark.parametrize(("d", "dmin"), [(1, 0), (0, 1), (1, 1), (1, 8), (-1, 8), (2**-24, 2**-24), (0, 0)])
@pytest.mark.parametrize("codes", [0x00, 0xFF, 0x0F])
def test_q4_k_does_not_overflow(codes: int, d: float, dmin: float, isa: str, exact: Exact) -> None:
    """Scales and minimums of 63, equal activations and codes 0 or 15 give the largest possible words."""
    blocks = np.full((32 * 2, 144), codes, dtype=np.uint8)
    blocks[:, 0:4] = np.array([d, dmin], dtype="<f2").view(np.uint8)
    blocks[:, 4:16] = 0xFF
    x = torch.tensor([1.0, -1.0, 0.5])[:, None].expand(3, 512).repeat(5, 1).contiguous()  # for few rows and for many
    weights = exact("Q4_K", blocks.reshape(-1), 32 * 512).view(32, 512)
    for tokens in (3, 15):
        got = multiply(native.Linear("Q4_K", 32, 512, blocks.reshape(-1), isa=isa), x[:tokens], 32)
        largest = 512 * 63 * (15 * abs(d) + abs(dmin))
        assert (got - x[:tokens].double() @ weights.T).abs().max() <= 1e-4 * largest


@pytest.mark.parametrize("quant", native.QUANTS)
def test_int8_stays_close_to_float(quant: str, random_weights: RandomWeights, exact: Exact) -> None:
    """The error is about half a percent for normal activations with a scale per 32 of them (measured: 0.53 %)."""
    data, x = random_weights(quant, 64 * 512), normal(8, 512)
    expected = x.double() @ exact(quant, data, 64 * 512).view(64, 512).T
    got = multiply(native.Linear(quant, 64, 512, data), x, 64)
    assert (got - expected).norm() <= 0.008 * expected.norm()


@pytest.mark.parametrize("kept", ["int8", "float32"])
@pytest.mark.parametrize("quant", native.QUANTS)
def test_instruction_sets_and_batches_agree(
    quant: str, kept: native.ActivationType, random_weights: RandomWeights
) -> None:
    """Without tiles, bits are the same on every instruction set, alone and in a batch, with any number of threads."""
    data, x = random_weights(quant, 40 * 512), normal(45, 512)
    native.set_threads(1)
    isas = [isa for isa in native.isas() if kept == "float32" or not 0 < native.tile_rows(quant, isa) <= 45]
    first = multiply(native.Linear(quant, 40, 512, data, activations=kept, isa=isas[0]), x, 40)
    for threads in (1, 2, 3):
        native.set_threads(threads, torch_threads=1)
        for isa in isas:
            linear = native.Linear(quant, 40, 512, data, activations=kept, isa=isa)
            assert torch.equal(multiply(linear, x, 40), first), isa
            assert torch.equal(multiply(linear, x[4:5], 40), first[4:5]), isa
    native.set_threads(1)


@pytest.mark.parametrize("quant", native.QUANTS)
def test_batch_invariant_kernels_give_a_row_the_same_bits_in_every_batch(
    quant: str, isa: str, random_weights: RandomWeights, batch_invariant: None
) -> None:
    """This holds with AMX too, which would otherwise use tiles for many rows."""
    data, x = random_weights(quant, 40 * 512), normal(130, 512)
    linear = native.Linear(quant, 40, 512, data, isa=isa)
    together = multiply(linear, x, 40)
    alone = torch.cat([multiply(linear, x[row : row + 1], 40) for row in range(0, 130, 13)])
    few = multiply(linear, x[:7], 40)
    assert torch.equal(alone, together[::13])
    assert torch.equal(few, together[:7])


@pytest.mark.parametrize("kept", ["int8", "float32"])
def test_the_bias_is_added(kept: native.ActivationType, isa: str, random_weights: RandomWeights, exact: Exact) -> None:
    bias = np.random.default_rng(1).normal(size=21).astype(np.float32)
    data, x = random_weights("Q8_0", 21 * 64), normal(3, 64)
    without = multiply(native.Linear("Q8_0", 21, 64, data, activations=kept, isa=isa), x, 21)
    got = multiply(native.Linear("Q8_0", 21, 64, data, bias=bias, activations=kept, isa=isa), x, 21)
    assert torch.equal(got, without + torch.from_numpy(bias))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_numbers_stay_in_their_row(bad: float, isa: str, random_weights: RandomWeights) -> None:
    data, x = random_weights("Q4_K", 32 * 256), normal(6, 256)
    linear = native.Linear("Q4_K", 32, 256, data, isa=isa)
    clean = multiply(linear, x, 32)
    x[2, 200] = bad
    dirty = multiply(linear, x, 32)
    assert dirty[2].isnan().all()
    assert torch.equal(dirty[[0, 1, 3, 4, 5]], clean[[0, 1, 3, 4, 5]])


@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-38, 1e-31, 1e-20, 1e20, 1e30])
def test_activations_may_have_any_size(size: float, isa: str, random_weights: RandomWeights, exact: Exact) -> None:
    data, x = random_weights("Q8_0", 32 * 64), normal(2, 64) * size
    expected = x.double() @ exact("Q8_0", data, 32 * 64).view(32, 64).T
    got = multiply(native.Linear("Q8_0", 32, 64, data, isa=isa), x, 32)
    assert float((got - expected).abs().max()) <= max(0.02 * float(expected.abs().max()), 1e-28)


def test_packed_size_stays_near_the_file(random_weights: RandomWeights) -> None:
    """An index of a grid becomes the codes of its weights: two bits each in IQ1, three in IQ2, four in IQ3."""
    largest = {"IQ1_S": 2.5, "IQ1_M": 2.5} | dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ2_S"), 3.375)
    largest |= dict.fromkeys(("IQ3_XXS", "IQ3_S"), 4.375) | {"NVFP4": 4.75}
    for quant in native.QUANTS:
        data = random_weights(quant, 64 * 512)
        most = largest[quant] / 8 * 64 * 512 if quant in largest else 1.1 * data.nbytes
        assert native.Linear(quant, 64, 512, data).bytes <= most, quant


def anonymous_bytes() -> int:
    """Return the resident memory of this process that is not mapped from files."""
    found = re.search(r"^RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    assert found
    return 1024 * int(found[1])


def test_a_little_more_than_a_huge_page_does_not_take_two(random_weights: RandomWeights) -> None:
    data = random_weights("Q8_0", 2048 * 1024)
    before = anonymous_bytes()
    linears = [native.Linear("Q8_0", 2048, 1024, data) for _ in range(16)]  # 2.125 MiB each
    assert anonymous_bytes() - before <= 1.1 * sum(linear.bytes for linear in linears)


def test_sizes_that_overflow_are_refused() -> None:
    nothing = np.empty(0, np.uint8)
    for rows, columns in [(2**62, 4), (1, 2**62), (2**32, 2**30)]:
        with pytest.raises(ValueError, match="too large"):
            native.Linear("F32", rows, columns, nothing)


def test_matrices_and_rows_that_do_not_fit_are_refused(random_weights: RandomWeights) -> None:
    data = random_weights("Q4_0", 32 * 64)
    linear = native.Linear("Q4_0", 32, 64, data)
    x, out = np.zeros((2, 64), np.float32), np.zeros((2, 32), np.float32)
    unknown: Any = "int4"
    refused: list[tuple[Callable[[], Any], str]] = [
        (lambda: native.Linear("Q4_0", 31, 64, data), r"data must have shape \[1116\], got \[1152\]"),
        (lambda: native.Linear("Q4_0", 32, 60, data), "positive multiple of 32 weights for Q4_0, got 60"),
        (
            lambda: native.Linear("Q4_0", 32, 64, data, bias=out[0, :3].copy()),
            r"bias must have shape \[32\], got \[3\]",
        ),
        (lambda: native.Linear("Q4_0", 32, 64, data, activations=unknown), "activations must be int8 or float32"),
        (lambda: native.Linear("Q4_0", 32, 64, data, isa="neon"), "isa must be one of scalar, .*, got 'neon'"),
        (lambda: linear.forward(x[:, :32].copy(), out), r"x must have shape \[any, 64\], got \[2, 32\]"),
        (lambda: linear.forward(x, out[:1]), r"out must have shape \[2, 32\], got \[1, 32\]"),
    ]
    for call, message in refused:
        with pytest.raises(ValueError, match=message):
            call()
