"""On a GPU, the kernels of packed experts equal their twins: every format, few and many tokens, also in a graph."""

from collections.abc import Callable

import pytest
import torch

from ktqueue.operators import native
from ktqueue.operators.gpu.kernels import expert_int8, panel_layout
from ktqueue.operators.gpu.kernels import expert_products as products
from ktqueue.operators.gpu.kernels.expert_int8 import Int8Rows
from ktqueue.operators.gpu.kernels.panel_layout import ExpertRecord
from ktqueue.operators.packed import Bytes

from ..operators.gpu.kernels.panel_pools import make_pool, route, small

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]

BOUNDS = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Relative norm of the error: weights and the rows between the two products are rounded to the dtype."""
EXPERTS, SLOTS = 6, 3


def assert_close(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    error = (got.cpu().double() - expected.double()).norm()
    assert error <= BOUNDS[dtype] * expected.double().norm()


def assert_experts(
    pool: torch.Tensor,
    offsets: torch.Tensor,
    ids: torch.Tensor,
    x: torch.Tensor,
    weights: torch.Tensor,
    record: ExpertRecord,
) -> None:
    """Both products on the GPU, against the twins of the same inputs."""
    on_gpu = pool.cuda(), offsets.cuda(), ids.cuda()
    mid = products.gate_up(*on_gpu, x.cuda(), record, "silu")
    partials = products.down(*on_gpu, mid, weights.cuda(), record)
    computed = (ids >= 0) & (offsets[ids.clamp(min=0)] >= 0)
    expected = products.gate_up(pool, offsets, ids, x, record, "silu")
    assert_close(mid.cpu()[computed], expected[computed], x.dtype)
    wanted = products.down(pool, offsets, ids, mid.cpu().nan_to_num(), weights, record)
    assert_close(partials, wanted, x.dtype)
    assert partials.cpu()[~computed].eq(0).all()


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("quant", native.QUANTS)
def test_equals_the_twins(quant: str, dtype: torch.dtype, random_weights: Callable[..., Bytes]) -> None:
    cases = [small(quant)]
    if quant not in ("F32", "F16", "BF16"):
        cases.append(((quant,) * 3, 512, 256))
    for quants, hidden, intermediate in cases:
        pool = make_pool(random_weights, quants, EXPERTS, hidden, intermediate)
        offsets = pool.offsets.clone()
        offsets[1] = -1
        for tokens in (1, 5, 90, 200, 700):
            x, (ids, weights) = torch.randn(tokens, hidden).to(dtype), route(tokens, EXPERTS, SLOTS, tokens)
            ids[-1, 0] = -1
            assert_experts(pool.bytes, offsets, ids, x, weights, pool.record)


def test_all_pairs_on_one_expert(random_weights: Callable[..., Bytes]) -> None:
    pool = make_pool(random_weights, "Q4_K", EXPERTS, 512, 256)
    for tokens in (3, 100, 600):
        x, ids = torch.randn(tokens, 512).bfloat16(), torch.full((tokens, 2), 4)
        assert_experts(pool.bytes, pool.offsets, ids, x, torch.rand(tokens, 2), pool.record)


def test_records_far_away(random_weights: Callable[..., Bytes]) -> None:
    """Offsets beyond 32 bits."""
    pool = make_pool(random_weights, "Q6_K", 2, 256, 256)
    far = torch.empty((5 << 30) + pool.bytes.numel(), dtype=torch.uint8, device="cuda")
    far[5 << 30 :] = pool.bytes.cuda()
    x, (ids, weights) = torch.randn(9, 256).bfloat16(), route(9, 2, 1)
    near = pool.bytes.cuda(), pool.offsets.cuda(), ids.cuda()
    distant = far, pool.offsets.cuda() + (5 << 30), ids.cuda()
    mids = [products.gate_up(*packed, x.cuda(), pool.record, "silu") for packed in (near, distant)]
    assert torch.equal(*mids)
    assert torch.equal(*(products.down(*packed, mids[0], weights.cuda(), pool.record) for packed in (near, distant)))


def assert_rounded(
    pool: torch.Tensor,
    offsets: torch.Tensor,
    ids: torch.Tensor,
    x: torch.Tensor,
    weights: torch.Tensor,
    record: ExpertRecord,
) -> None:
    """Each launch of the integer kernel, against plain torch of the same inputs; and all of them in one call."""
    packed, places, chosen, factors = (one.cuda() for one in (pool, offsets, ids, weights))
    rows, pairs = expert_int8.prepare(x.cuda(), chosen, places)
    expected = Int8Rows.quantise(x)
    assert (rows.codes.cpu().int() - expected.codes.int()).abs().max() <= 1
    x = Int8Rows(*(one.cpu() for one in (rows.codes, rows.scales, rows.sums))).floats()
    mid = expert_int8.gate_up(packed, places, chosen, rows, pairs, record, "silu")
    got = expert_int8.down(packed, places, chosen, mid, pairs, factors, record)
    computed = ((ids >= 0) & (offsets[ids.clamp(min=0)] >= 0)).flatten()
    exact = torch.zeros(*ids.shape, record.intermediate)
    products.gate_up_twin(pool, offsets, ids, x, record, "silu", exact)
    between = Int8Rows(*(one.cpu() for one in (mid.codes, mid.scales, mid.sums)))
    wanted = Int8Rows.quantise(exact.view(-1, record.intermediate))
    torch.testing.assert_close(
        between.scales[computed], wanted.scales[computed], rtol=1e-4, atol=1e-6 * float(wanted.scales[computed].max())
    )
    assert (between.codes.int() - wanted.codes.int())[computed].abs().max() <= 1
    assert (between.codes != wanted.codes)[computed].float().mean() < 1e-2
    partials = torch.empty(*ids.shape, record.hidden)
    products.down_twin(pool, offsets, ids, between.floats().nan_to_num(), weights, record, partials)
    assert_close(got, partials, torch.float32)
    assert got.cpu().flatten(0, 1)[~computed].eq(0).all()


@pytest.mark.parametrize("quant", [quant for quant in native.QUANTS if quant not in panel_layout.FLOATS])
def test_few_tokens_equal_rounded_products(quant: str, random_weights: Callable[..., Bytes]) -> None:
    cases = [small(quant), ((quant,) * 3, 2048, 768)]
    for quants, hidden, intermediate in cases:
        pool = make_pool(random_weights, quants, EXPERTS, hidden, intermediate)
        offsets = pool.offsets.clone()
        offsets[1] = -1
        for tokens in (1, 2, 9, 13, 40):
            x, (ids, weights) = torch.randn(tokens, hidden).bfloat16(), route(tokens, EXPERTS, SLOTS, tokens)
            ids[-1, 0] = -1
            assert_rounded(pool.bytes, offsets, ids, x, weights, pool.record)


def test_few_tokens_depend_on_no_others(random_weights: Callable[..., Bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_int8, "TILES_OF_MANY", expert_int8.TILES)
    pool = make_pool(random_weights, "Q4_K", EXPERTS, 512, 256)
    x, (ids, weights) = torch.randn(23, 512).bfloat16().cuda(), (one.cuda() for one in route(23, EXPERTS, SLOTS))
    packed, offsets = pool.bytes.cuda(), pool.offsets.cuda()
    results = [
        products.experts(packed, offsets, offsets, ids[:n], x[:n], weights[:n], pool.record, "silu") for n in (1, 5, 23)
    ]
    assert torch.equal(results[0], results[1][:1])
    assert torch.equal(results[1], results[2][:5])


@pytest.mark.parametrize("tokens", [2, 20])
def test_few_tokens_in_a_graph(tokens: int, random_weights: Callable[..., Bytes]) -> None:
    """Replays see new activations, ids and offsets."""
    pool = make_pool(random_weights, "Q4_K", EXPERTS, 512, 256)
    packed, offsets = pool.bytes.cuda(), pool.offsets.cuda()
    x = torch.randn(tokens, 512, device="cuda").bfloat16()
    ids, weights = (one.cuda() for one in route(tokens, EXPERTS, SLOTS))

    def forward() -> torch.Tensor:
        return products.experts(packed, offsets, offsets, ids, x, weights, pool.record, "silu")

    forward()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = forward()
    for seed in (1, 2):
        x.copy_(torch.randn(tokens, 512))
        ids.copy_(route(tokens, EXPERTS, SLOTS, seed)[0])
        offsets[seed] = -1
        graph.replay()
        assert torch.equal(captured, forward())


@pytest.mark.parametrize("tokens", [2, 300])
def test_in_a_graph(tokens: int, random_weights: Callable[..., Bytes]) -> None:
    """Replays see new activations, ids and offsets."""
    pool = make_pool(random_weights, "Q4_K", EXPERTS, 512, 256)
    record, packed, offsets = pool.record, pool.bytes.cuda(), pool.offsets.cuda()
    x = torch.randn(tokens, 512, device="cuda").bfloat16()
    ids, weights = (one.cuda() for one in route(tokens, EXPERTS, SLOTS))

    def forward() -> torch.Tensor:
        mid = products.gate_up(packed, offsets, ids, x, record, "silu")
        return products.down(packed, offsets, ids, mid, weights, record)

    forward()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = forward()
    for seed in (1, 2):
        x.copy_(torch.randn(tokens, 512))
        ids.copy_(route(tokens, EXPERTS, SLOTS, seed)[0])
        offsets[seed] = -1
        graph.replay()
        assert torch.equal(captured, forward())
