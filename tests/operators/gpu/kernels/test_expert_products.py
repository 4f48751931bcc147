"""The twins of packed experts against the CPU kernels, the Triton kernels (interpreted) against the twins."""

from collections.abc import Callable

import pytest
import torch

from ktqueue.operators import native
from ktqueue.operators.gpu.kernels import expert_products as products
from ktqueue.operators.gpu.kernels.expert_pairs import ExpertPairs
from ktqueue.operators.gpu.kernels.panel_layout import ExpertRecord
from ktqueue.operators.native import GateFacts
from ktqueue.operators.packed import Bytes

from ..interpreted import by_kernel
from .panel_pools import FLOATS, GATES, WEIGHTED, make_pool, route, small

BOUND = 2e-6
"""Relative error of float32 sums in another order."""


def activations(tokens: int, hidden: int) -> torch.Tensor:
    return torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(tokens))


def assert_close(got: torch.Tensor, expected: torch.Tensor, bound: float = BOUND) -> None:
    assert (got - expected).abs().max() <= bound * expected.abs().max()


def assert_experts(
    pairs: ExpertPairs,
    x: torch.Tensor,
    weights: torch.Tensor,
    gate: GateFacts = native.SILU,
    bound: float = BOUND,
    with_down: bool = True,
) -> None:
    """The kernels compute what the twins do; rows of skipped pairs are zero."""
    of_input, of_output = (weights, None) if gate.weighted_input else (None, weights)
    mid = by_kernel(products.gate_up, pairs, x, gate, of_input)
    expected = products.gate_up(pairs, x, gate, of_input)
    computed = (pairs.ids >= 0) & (pairs.offsets[pairs.ids.clamp(min=0)] >= 0)
    if computed.any():
        assert_close(mid[computed].float(), expected[computed].float(), bound)
    if not with_down:
        return
    partials = by_kernel(products.down, pairs, mid, of_output)
    if computed.any():
        wanted = products.down(pairs, mid.nan_to_num(), of_output)
        assert_close(partials, wanted, bound)
    assert partials[~computed].eq(0).all()


@pytest.mark.parametrize("quant", native.QUANTS)
def test_twins_equal_the_cpu_kernels(quant: str, random_weights: Callable[..., Bytes]) -> None:
    quants, hidden, intermediate = small(quant)
    pool = make_pool(random_weights, quants, 5, hidden, intermediate, biased=quant == "MXFP4")
    x, (ids, weights) = activations(9, hidden), route(9, 5, 3)
    expected = torch.empty_like(x)
    pool.layer.forward(x.numpy(), ids.numpy(), weights.numpy(), expected.numpy())
    mid = products.gate_up(pool.pairs(ids), x, native.SILU)
    assert_close(products.down(pool.pairs(ids), mid, weights).sum(1), expected)


def test_weights_multiply_the_input_as_on_the_cpu(random_weights: Callable[..., Bytes]) -> None:
    pool = make_pool(random_weights, "Q8_0", 5, 64, 32, gate=WEIGHTED)
    x, (ids, weights) = activations(9, 64), route(9, 5, 3)
    expected = torch.empty_like(x)
    pool.layer.forward(x.numpy(), ids.numpy(), weights.numpy(), expected.numpy())
    assert_close(products.experts(pool.pairs(ids), pool.offsets, x, weights, WEIGHTED).sum(1), expected)


def test_a_record_has_the_bytes_of_its_panels(random_weights: Callable[..., Bytes]) -> None:
    record = make_pool(random_weights, ("Q4_K", "Q8_0", "Q6_K"), 2, 256, 256).record
    assert record.down_start == 16 * (record.gate_panel_bytes + record.up_panel_bytes)
    assert (record.gate_panel_bytes, record.up_panel_bytes, record.down_panel_bytes) == (2368, 4352, 3392)
    with pytest.raises(ValueError, match="quant must be one of"):
        ExpertRecord("Q4_K", "Q4_K", "Q1_K", 256, 256)
    with pytest.raises(ValueError, match="multiples of 32"):
        ExpertRecord("Q8_0", "Q8_0", "Q8_0", 256, 40)


@pytest.mark.parametrize("quant", native.QUANTS)
def test_kernels_equal_the_twins(quant: str, random_weights: Callable[..., Bytes]) -> None:
    quants, hidden, intermediate = small(quant)
    pool = make_pool(random_weights, quants, 3, hidden, intermediate)
    x, (ids, weights) = activations(3, hidden), route(3, 3, 2)
    with_down = quant in ("Q4_0", *FLOATS)  # in the others down has Q4_0
    assert_experts(pool.pairs(ids), x, weights, with_down=with_down)


def test_three_formats_and_float16_equal_the_twins(random_weights: Callable[..., Bytes]) -> None:
    pool = make_pool(random_weights, ("Q8_0", "Q4_0", "IQ4_NL"), 2, 160, 64)
    x, (ids, weights) = activations(3, 160), route(3, 2, 1)
    assert_experts(pool.pairs(ids), x, weights)
    assert_experts(pool.pairs(ids), x.half(), weights, bound=2e-3)


@pytest.mark.parametrize("gate", GATES, ids=str)
def test_each_activation_equals_the_twins(gate: GateFacts, random_weights: Callable[..., Bytes]) -> None:
    pool = make_pool(random_weights, "MXFP4", 2, 32, 32, biased=True)
    for tokens in (2, 130):
        x, (ids, weights) = activations(tokens, 32), route(tokens, 2, 1)
        assert_experts(pool.pairs(ids), x, weights, gate)


@pytest.mark.parametrize(
    ("tokens", "experts", "slots"),
    [(1, 9, 4), (2, 4, 2), (17, 3, 2), (130, 3, 2), (130, 5, 4)],
    ids=["leaders", "few experts", "more than a block", "many blocks", "sorted"],
)
def test_each_way_to_find_pairs_equals_the_twins(
    tokens: int, experts: int, slots: int, random_weights: Callable[..., Bytes]
) -> None:
    """Some experts are unused or not on the GPU, and some pairs have no expert."""
    pool = make_pool(random_weights, "MXFP4", experts, 32, 32)
    x, (ids, weights) = activations(tokens, 32), route(tokens, experts, slots)
    assert_experts(pool.pairs(ids), x, weights)
    offsets = pool.offsets.clone()
    offsets[1] = -1
    ids[ids == 2] = -1
    ids[-1, 0] = -1
    assert_experts(pool.pairs(ids, offsets), x, weights)


@pytest.mark.parametrize("ids", [[[3, 3], [3, 3], [3, 3]], [[0, 0], [1, 0], [0, 1]], [[-1, -1]] * 3])
def test_tokens_may_repeat_an_expert_or_have_none(ids: list[list[int]], random_weights: Callable[..., Bytes]) -> None:
    pool = make_pool(random_weights, "Q4_0", 8, 64, 32)
    x, weights = activations(3, 64), torch.tensor([[0.5, 0.25], [1.0, 2.0], [0.1, 0.9]])
    assert_experts(pool.pairs(torch.tensor(ids)), x, weights)


def test_all_pairs_may_use_one_expert(random_weights: Callable[..., Bytes]) -> None:
    pool = make_pool(random_weights, "MXFP4", 8, 32, 32)
    for tokens in (70, 600):
        x, ids, weights = activations(tokens, 32), torch.full((tokens, 1), 6), torch.ones(tokens, 1)
        assert_experts(pool.pairs(ids), x, weights)


def test_columns_may_be_strided(random_weights: Callable[..., Bytes]) -> None:
    pool = make_pool(random_weights, "Q8_0", 3, 64, 32)
    for tokens in (3, 130):
        x, (ids, weights) = activations(64, tokens).T, route(tokens, 3, 2)
        assert_experts(pool.pairs(ids), x, weights)


def test_arguments_that_do_not_fit_are_refused(random_weights: Callable[..., Bytes]) -> None:
    pool = make_pool(random_weights, "Q8_0", 2, 64, 32)
    ids = torch.zeros(2, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match="do not fit"):
        products.gate_up(pool.pairs(ids), activations(3, 64), native.SILU)
