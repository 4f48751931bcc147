"""Experts by the integer dot product: the kernels (interpreted) against products of the same rounded rows."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ktqueue.operators import native
from ktqueue.operators.gpu.kernels import expert_int8, panel_layout
from ktqueue.operators.gpu.kernels import expert_products as products
from ktqueue.operators.gpu.kernels.expert_int8 import Int8Rows
from ktqueue.operators.gpu.kernels.expert_pairs import ExpertPairs
from ktqueue.operators.gpu.kernels.expert_tiles import TILES
from ktqueue.operators.gpu.kernels.norm import add_rms_norm
from ktqueue.operators.native import GateFacts
from ktqueue.operators.packed import Bytes

from ..interpreted import by_kernel, by_twin, compiled_for_h200
from .matrices import columns_of
from .panel_pools import GATES, Pool, make_pool, route

BLOCKS = [quant for quant in native.QUANTS if quant not in panel_layout.FLOAT_PRODUCTS]
BOUND = 3e-6
"""Relative error of float32 sums in another order."""


def activations(tokens: int, hidden: int) -> torch.Tensor:
    return torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(tokens))


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert (got - expected).abs().max() <= BOUND * expected.abs().max()


def assert_experts(
    pool: Pool,
    offsets: torch.Tensor,
    ids: torch.Tensor,
    x: torch.Tensor,
    weights: torch.Tensor,
    gate: GateFacts = native.SILU,
    own_pairs: int = TILES.own_pairs,
) -> None:
    """Each launch computes what plain torch does of the same inputs; rows of skipped pairs are zero."""
    step, record = pool.pairs(ids, offsets), pool.record
    rows, lists = by_kernel(expert_int8.prepare, step, x, own_pairs=own_pairs)
    expected = Int8Rows.quantise(x)
    assert torch.equal(rows.codes, expected.codes)
    assert torch.equal(rows.sums, expected.sums)
    torch.testing.assert_close(rows.scales, expected.scales, rtol=1e-6, atol=0)
    of_input, of_output = (weights, None) if gate.weighted_input else (None, weights)
    mid = by_kernel(expert_int8.gate_up, step, lists, rows, gate, of_input)
    computed = ((ids >= 0) & (offsets[ids.clamp(min=0)] >= 0)).flatten()
    exact = torch.zeros(*ids.shape, record.intermediate)
    products.gate_up_twin(step, rows.floats(), gate, exact, of_input)
    exact = exact.view(-1, record.intermediate)
    wanted = Int8Rows.quantise(exact)
    if computed.any():
        torch.testing.assert_close(
            mid.scales[computed], wanted.scales[computed], rtol=1e-4, atol=1e-6 * float(exact.max())
        )
        assert (mid.codes.int() - wanted.codes.int())[computed].abs().max() <= 1
        # Only numbers halfway between two codes may differ by one.
        assert (mid.codes != wanted.codes)[computed].float().mean() < 1e-2
        again = mid.codes[computed].int().view(len(mid.sums[computed]), -1, 2, 16).sum(3, dtype=torch.int32)
        assert torch.equal(mid.sums[computed], again[:, :, 0] + 65536 * again[:, :, 1])
    got = by_kernel(expert_int8.down, step, lists, mid, of_output)
    partials = torch.empty(*ids.shape, record.hidden)
    products.down_twin(step, mid.floats().nan_to_num(), of_output, partials)
    assert_close(got, partials)
    assert got.flatten(0, 1)[~computed].eq(0).all()


@pytest.mark.parametrize("quant", BLOCKS)
def test_kernels_equal_products_of_rounded_rows(quant: str, random_weights: Callable[..., Bytes]) -> None:
    """A tile has more slabs than the matrix, and a superblock is not whole."""
    pool = make_pool(random_weights, (quant, quant, "Q4_0"), 2, columns_of(quant), 32)
    hidden = pool.record.hidden
    x, (ids, weights) = activations(1, hidden), route(1, 2, 1)
    assert_experts(pool, pool.offsets, ids, x, weights)


@pytest.mark.parametrize(
    ("tokens", "experts", "slots", "own"), [(1, 9, 4, True), (3, 3, 2, False), (9, 2, 1, False)]
)  # fmt: skip
def test_each_way_to_find_pairs_equals_plain_torch(
    tokens: int,
    experts: int,
    slots: int,
    own: bool,
    random_weights: Callable[..., Bytes],
) -> None:
    """Pairs are alone or grouped by expert. Some experts are unused or not on the GPU; some pairs have none."""
    pool = make_pool(random_weights, ("Q4_0", "Q8_0", "IQ4_NL"), experts, 64, 32)
    x, (ids, weights) = activations(tokens, 64), route(tokens, experts, slots)
    offsets = pool.offsets.clone()
    offsets[1] = -1
    ids[ids == 2] = -1
    ids[-1, 0] = -1
    assert_experts(pool, offsets, ids, x.bfloat16(), weights, own_pairs=32 if own else 0)


@pytest.mark.parametrize("gate", GATES, ids=str)
def test_each_activation_equals_plain_torch(gate: GateFacts, random_weights: Callable[..., Bytes]) -> None:
    pool = make_pool(random_weights, ("MXFP4", "MXFP4", "Q4_0"), 2, 32, 32, biased=True)
    x, (ids, weights) = activations(2, 32), route(2, 2, 1)
    assert_experts(pool, pool.offsets, ids, x, weights, gate)


def test_a_pair_depends_on_no_other(random_weights: Callable[..., Bytes]) -> None:
    """This does without the tiles of one row, since they add in another order."""
    pool = make_pool(random_weights, ("Q6_K", "Q4_K", "Q8_0"), 1, 256, 32)
    x, weights = activations(4, 256), torch.ones(4, 1)
    results = []
    for tokens, own_pairs in ((4, 0), (2, 32)):
        ids = torch.zeros(tokens, 1, dtype=torch.int64)
        pairs = pool.pairs(ids)
        rows, lists = by_kernel(expert_int8.prepare, pairs, x[:tokens], own_pairs=own_pairs)
        tiles = TILES.own[1][1] if lists is None else TILES.dots
        mid = by_kernel(expert_int8.gate_up, pairs, lists, rows, native.SILU, tiles=tiles)
        results.append(by_kernel(expert_int8.down, pairs, lists, mid, weights[:tokens], tiles=tiles))
    assert torch.equal(results[0][:2], results[1])


@pytest.mark.parametrize(("tokens", "hidden"), [(1, 64), (3, 96)])
def test_the_last_program_adds_the_pairs_of_a_token(
    tokens: int, hidden: int, random_weights: Callable[..., Bytes]
) -> None:
    """The sum has the bits of add_rms_norm. Skipped pairs add nothing, and each launch leaves its counters 0."""
    pool = make_pool(random_weights, ("Q4_0", "Q8_0", "IQ4_NL"), 9, hidden, 64)
    ids, weights = route(tokens, 9, 4)
    offsets = pool.offsets.clone()
    offsets[ids[0, 1]] = -1
    ids[-1, 2] = -1
    pairs, mid = pool.pairs(ids, offsets), Int8Rows.quantise(activations(4 * tokens, 64))
    residual = activations(tokens + 7, hidden)[:tokens].bfloat16()
    counters = torch.zeros(expert_int8.down_counters(tokens, hidden), dtype=torch.int32)
    partials = by_kernel(expert_int8.down, pairs, None, mid, weights)
    found = residual.clone()
    for _ in range(2):
        added = by_kernel(expert_int8.down, pairs, None, mid, weights, added_to=found, counters=counters)
        assert torch.equal(added, partials)
        assert not counters.any()
        by_kernel(add_rms_norm, residual, torch.ones(hidden), 1e-6, partials=partials)
        assert torch.equal(found, residual)


def test_rows_that_are_not_finite_poison_themselves() -> None:
    x = activations(4, 96)
    x[0, 3], x[1, 40], x[2, 64:] = torch.inf, torch.nan, 0.0
    record = panel_layout.ExpertRecord("Q8_0", "Q8_0", "Q8_0", 96, 32)
    ids, offsets = torch.zeros(4, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    rows, _ = by_kernel(expert_int8.prepare, ExpertPairs(torch.empty(0), offsets, ids, record), x)
    expected = Int8Rows.quantise(x)
    for got, wanted in ((rows.codes, expected.codes), (rows.scales, expected.scales), (rows.sums, expected.sums)):
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=0, equal_nan=True)
    assert rows.scales.isnan().nonzero().tolist() == [[0, 0], [1, 1]]
    assert (rows.floats()[3] - x[3]).abs().max() <= x[3].abs().max() / 254 * 1.0001


def test_rows_are_rounded_where_that_is_faster(random_weights: Callable[..., Bytes]) -> None:
    """Rows are not rounded if they are float32, if exact products are wanted, or for matrices of floats."""
    pool = make_pool(random_weights, "Q8_0", 2, 64, 32)
    x, (ids, weights) = activations(3, 64), route(3, 2, 1)

    def run(x: torch.Tensor, pool: Pool, exact: bool = False) -> torch.Tensor:
        return products.experts(pool.pairs(ids), pool.offsets, x, weights, native.SILU, exact=exact)

    assert torch.equal(run(x, pool), run(x, pool, exact=True))
    rounded = run(x.bfloat16(), pool)
    assert not torch.equal(rounded, run(x.bfloat16(), pool, exact=True))
    assert (rounded - run(x, pool)).norm() < 0.02 * rounded.norm()
    floats = make_pool(random_weights, "F16", 2, 64, 32)
    assert torch.equal(run(x.bfloat16(), floats), run(x.bfloat16(), floats, exact=True))


def test_rows_may_be_quantised_before(random_weights: Callable[..., Bytes]) -> None:
    """A step that takes them computes the same, and says so: few pairs, none of which is sorted."""
    pool = make_pool(random_weights, ("Q4_0", "Q8_0", "IQ4_NL"), 4, 64, 32)
    x, (ids, weights) = activations(3, 64).bfloat16(), route(3, 4, 2)
    pairs, rows = pool.pairs(ids), Int8Rows.quantise(x)
    for run in (by_twin, by_kernel):
        found, expected = (
            run(products.experts, pairs, pool.offsets, x, weights, native.SILU, rows=given) for given in (rows, None)
        )
        assert_close(found, expected)
        residual, counters = x.clone(), torch.zeros(expert_int8.down_counters(3, 64), dtype=torch.int32)
        run(
            products.experts, pairs, pool.offsets, x, weights, native.SILU,
            rows=rows, added_to=residual, counters=counters,
        )  # fmt: skip
        torch.testing.assert_close(residual, (x.float() + found.sum(1)).bfloat16(), rtol=1e-2, atol=0)
    for experts, most in ((4, 32), (64, 32), (128, 64), (256, 64)):
        assert TILES.own_limit(experts) == most
        assert products.rounds_each_pair(pool.record, most, experts, x.dtype, exact=False)
        assert not products.rounds_each_pair(pool.record, most + 1, experts, x.dtype, exact=False)
    assert not products.rounds_each_pair(pool.record, 8, 128, torch.float32, exact=False)
    assert not products.rounds_each_pair(pool.record, 8, 128, x.dtype, exact=True)


@pytest.mark.compiled
def test_the_kernels_compile_for_an_h200(tmp_path: Path) -> None:
    sorted_pairs = ["_prepare_kernel", "_experts_kernel", "_experts_kernel"]
    few = [*sorted_pairs, "_experts_kernel"]  # whose last program adds the pairs of a token
    fetching = ["_divide_kernel", "_fetch_kernel"]
    assert compiled_for_h200("experts", tmp_path) == few * 2 + sorted_pairs + fetching * 2
