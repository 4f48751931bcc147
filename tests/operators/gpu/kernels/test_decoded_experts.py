"""Decoded experts: each launch (interpreted) against its twin, and both ways against products with packed experts."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ktqueue.operators import native
from ktqueue.operators.gpu.kernels import decoded_experts
from ktqueue.operators.gpu.kernels import expert_products as products
from ktqueue.operators.gpu.kernels.expert_pairs import ExpertPairs
from ktqueue.operators.gpu.kernels.panel_layout import ExpertRecord
from ktqueue.operators.native import GateFacts
from ktqueue.operators.packed import Bytes

from ..interpreted import by_kernel, by_twin, compiled_for_h200
from .panel_pools import FLOATS, GATES, Pool, make_pool, route, small

BOUND = 2e-6
"""Relative error of float32 sums in another order."""
BFLOAT16_BOUND = 2e-2


def activations(tokens: int, hidden: int) -> torch.Tensor:
    return torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(tokens))


def memory_for(pool: Pool, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Memory that is NaN wherever nothing was decoded."""
    weights = decoded_experts.decoded_weights(pool.record, len(pool.offsets))
    return torch.full((weights,), torch.nan, dtype=dtype)


def assert_experts(
    pool: Pool,
    ids: torch.Tensor,
    x: torch.Tensor,
    weights: torch.Tensor,
    gate: GateFacts = native.SILU,
    offsets: torch.Tensor | None = None,
    bound: float = BOUND,
) -> None:
    """Kernels and twins give the weighted sum of the products with packed experts."""
    pairs = pool.pairs(ids, offsets)
    expected = products.experts(pairs, pairs.offsets, x.float(), weights, gate).sum(1, keepdim=True)
    for run in (by_twin, by_kernel):
        found = run(decoded_experts.experts, pairs, pairs.offsets, x, weights, gate, memory_for(pool, x.dtype))
        assert found.dtype == torch.float32
        assert (found - expected).abs().max() <= bound * expected.abs().max()


@pytest.mark.parametrize("quant", native.QUANTS)
def test_every_format_is_decoded_exactly(quant: str, random_weights: Callable[..., Bytes]) -> None:
    """Superblocks are not whole, rows do not fill a program, and an expert without pairs is left out."""
    quants, hidden, intermediate = small(quant)
    pool = make_pool(random_weights, quants, 3, hidden, intermediate)
    pairs = pool.pairs(torch.tensor([[2], [0]]))
    rows = decoded_experts.sort_rows(pairs)
    for formats in (quants[:2], quants[2:])[: 1 + (quant in ("Q4_0", *FLOATS))]:  # down has Q4_0 in the others
        twin, kernel = (
            run(decoded_experts.decode, pairs, rows, memory_for(pool), formats) for run in (by_twin, by_kernel)
        )
        assert torch.equal(twin[[0, 2]], kernel[[0, 2]])
        assert twin[1].isnan().all() and kernel[1].isnan().all()
        half = decoded_experts.decode(pairs, rows, memory_for(pool, torch.bfloat16), formats)
        assert torch.equal(twin[[0, 2]].bfloat16(), half[[0, 2]])


@pytest.mark.parametrize("quants", ["Q8_0", ("Q4_K", "Q6_K", "Q4_0"), "F16"])
def test_experts_equal_products_with_packed_ones(
    quants: str | tuple[str, str, str], random_weights: Callable[..., Bytes]
) -> None:
    pool = make_pool(random_weights, quants, 3, 256, 64)
    x, (ids, weights) = activations(5, 256), route(5, 3, 2)
    assert_experts(pool, ids, x, weights)
    assert_experts(pool, ids, x.bfloat16(), weights, bound=BFLOAT16_BOUND)


@pytest.mark.parametrize("gate", GATES, ids=str)
def test_each_activation_equals_products_with_packed_experts(
    gate: GateFacts, random_weights: Callable[..., Bytes]
) -> None:
    pool = make_pool(random_weights, ("MXFP4", "MXFP4", "Q4_0"), 3, 32, 32, biased=True)
    x, (ids, weights) = activations(7, 32), route(7, 3, 2)
    assert_experts(pool, ids, x, weights, gate)


def test_skipped_pairs_add_nothing(random_weights: Callable[..., Bytes]) -> None:
    """An expert is on the CPU, one has no pairs, some pairs have no expert, and a token has none at all. The weights of
    skipped pairs are NaN."""
    pool = make_pool(random_weights, "Q8_0", 6, 64, 32, biased=True)
    x, (ids, weights) = activations(12, 64), route(12, 5, 3)
    offsets = pool.offsets.clone()
    offsets[1] = -1
    ids[ids == 2] = -1
    ids[4] = -1
    weights[(ids < 0) | (ids == 1)] = torch.nan
    assert_experts(pool, ids, x, weights.nan_to_num(), offsets=offsets)
    pairs = pool.pairs(ids, offsets)
    for run in (by_twin, by_kernel):
        found = run(decoded_experts.experts, pairs, offsets, x, weights, native.SILU, memory_for(pool))
        assert found.isfinite().all() and found[4].eq(0).all()


def test_matrices_may_be_apart(random_weights: Callable[..., Bytes]) -> None:
    """Streamed experts have all gate and up matrices before all down matrices."""
    pool = make_pool(random_weights, "Q4_0", 4, 64, 32)
    start, size = pool.record.down_start, pool.record.bytes
    records = pool.bytes.view(4, size)
    apart = torch.cat([records[:, :start].flatten(), records[:, start:].flatten()])
    every = torch.arange(4)
    gate_up, down = every * start, 4 * start + every * (size - start) - start
    x, (ids, weights) = activations(5, 64), route(5, 4, 2)
    pairs = pool.pairs(ids, gate_up)._replace(pool=apart)
    expected = products.experts(pool.pairs(ids), pool.offsets, x, weights, native.SILU).sum(1, keepdim=True)
    for run in (by_twin, by_kernel):
        found = run(decoded_experts.experts, pairs, down, x, weights, native.SILU, memory_for(pool))
        assert (found - expected).abs().max() <= BOUND * expected.abs().max()


@pytest.mark.parametrize("rows_at_once", [32, 64])
def test_programs_may_decode_more_rows(rows_at_once: int, random_weights: Callable[..., Bytes]) -> None:
    pool = make_pool(random_weights, ("Q4_K", "Q6_K", "Q4_0"), 2, 512, 96)
    pairs = pool.pairs(torch.tensor([[0], [1]]))
    rows = decoded_experts.sort_rows(pairs)
    for formats in (("Q4_K", "Q6_K"), ("Q4_0",)):
        expected = decoded_experts.decode(pairs, rows, memory_for(pool), formats)
        found = by_kernel(decoded_experts.decode, pairs, rows, memory_for(pool), formats, rows_at_once=rows_at_once)
        assert torch.equal(found, expected)


def test_rows_are_sorted_by_expert() -> None:
    record = ExpertRecord("Q8_0", "Q8_0", "Q8_0", 32, 32)
    ids, offsets = torch.tensor([[3, 0], [1, 3], [-1, 2], [0, 3]]), torch.tensor([0, 64, -1, 128, 192])
    pairs = ExpertPairs(torch.empty(0, dtype=torch.uint8), offsets, ids, record)
    rows = decoded_experts.sort_rows(pairs)
    assert rows.pairs.tolist() == [1, 6, 2, 0, 3, 7, 4, 5]
    assert rows.experts.tolist() == [0, 0, 1, 3, 3, 3, 5, 5]
    assert rows.ends.tolist() == [2, 3, 3, 6, 6]
    assert rows.places[rows.pairs].tolist() == list(range(8))


def test_the_product_of_torch_means_what_ours_does() -> None:
    """Groups may be empty, and rows behind the last are ignored."""
    assert decoded_experts._GROUPED is not None
    x, matrices = activations(11, 32).bfloat16(), activations(4 * 16, 32).bfloat16().view(4, 16, 32)
    ends = torch.tensor([3, 3, 8, 9], dtype=torch.int32)
    ours = decoded_experts.grouped_product(x, matrices, ends)
    theirs = decoded_experts._GROUPED(x, matrices.transpose(1, 2), offs=ends)
    torch.testing.assert_close(ours[:9], theirs[:9], rtol=1e-2, atol=1e-2)


def test_memory_that_does_not_fit_is_refused(random_weights: Callable[..., Bytes]) -> None:
    pool = make_pool(random_weights, "Q8_0", 2, 64, 32)
    x, (ids, weights) = activations(3, 64), route(3, 2, 1)
    for memory in (memory_for(pool)[1:], memory_for(pool, torch.bfloat16)):
        with pytest.raises(ValueError, match="decoded experts does not take"):
            decoded_experts.experts(pool.pairs(ids), pool.offsets, x, weights, native.SILU, memory)


def test_rows_must_be_aligned() -> None:
    cpu = torch.device("cpu")
    assert decoded_experts.can_be_grouped(ExpertRecord("F16", "F16", "F16", 48, 40), torch.float32, cpu)
    assert not decoded_experts.can_be_grouped(ExpertRecord("F16", "F16", "F16", 45, 40), torch.float32, cpu)
    assert not decoded_experts.can_be_grouped(ExpertRecord("F16", "F16", "F16", 48, 33), torch.float32, cpu)


@pytest.mark.compiled
def test_the_kernels_compile_for_an_h200(tmp_path: Path) -> None:
    once = ["_decode_experts", "_join_rows", "_decode_experts", "_add_slots"]
    assert compiled_for_h200("decoded experts", tmp_path) == 2 * once
