"""On a GPU, launches of few rows whose last program does more equal launches one by one, in each of many replays."""

from collections.abc import Callable

import pytest
import torch

from ktqueue.operators import native
from ktqueue.operators.gpu.attention.base import AttentionShape
from ktqueue.operators.gpu.attention.triton import TritonPlanner
from ktqueue.operators.gpu.device import launches_dependents
from ktqueue.operators.gpu.kernels import expert_int8
from ktqueue.operators.gpu.kernels import expert_products as products
from ktqueue.operators.gpu.kernels.expert_int8 import Int8Rows
from ktqueue.operators.gpu.kernels.few_rows_router import few_rows_route
from ktqueue.operators.gpu.kernels.linear import few_rows_linear
from ktqueue.operators.gpu.kernels.norm import RmsNorm, add_rms_norm
from ktqueue.operators.gpu.kernels.operation import dependent_launches
from ktqueue.operators.gpu.kernels.panel_matrix import multiply_few
from ktqueue.operators.gpu.kernels.router import PLAIN, Scoring
from ktqueue.operators.kv_cache import KVLayout
from ktqueue.operators.packed import Bytes
from ktqueue.operators.step import ScoreOptions

from ..operators.gpu.kernels.comparing import check_rounded
from ..operators.gpu.kernels.matrices import make_panels
from ..operators.gpu.kernels.panel_pools import make_pool, route
from .test_attention import make_step, random_cache

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]

ROWS = (1, 3, 4)
REPLAYS = 300
STEP = {torch.float16: 2**-10, torch.bfloat16: 2**-7}


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def nearly(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Equal but for a last bit in a few numbers."""
    assert (found.float() - expected.float()).abs().max() <= STEP[dtype] * expected.float().abs().max()
    assert (found == expected).float().mean() > 0.97


@pytest.mark.parametrize("dtype", STEP)
@pytest.mark.parametrize(("outputs", "columns"), [(5120, 2048), (1000, 2880)])
@pytest.mark.parametrize("tokens", ROWS)
def test_products_with_a_norm_and_a_sum(tokens: int, outputs: int, columns: int, dtype: torch.dtype) -> None:
    weight = (torch.randn(outputs, columns, device="cuda") / columns**0.5).to(dtype)
    x, before = normal(tokens, columns, dtype=dtype), normal(tokens, outputs, dtype=dtype)
    for factors in (torch.rand(columns, device="cuda"), torch.rand(columns, device="cuda").to(dtype)):
        norm = RmsNorm(factors, 1e-6)
        expected = few_rows_linear(add_rms_norm(x, *norm), weight)
        assert (few_rows_linear(x, weight, norm=norm) - expected).abs().max() <= 2 * STEP[dtype] * expected.abs().max()
    added = few_rows_linear(x, weight, added_to=before.clone())
    assert torch.equal(added, (before.float() + few_rows_linear(x, weight).float()).to(dtype))


def test_a_norm_and_a_sum_of_quantised_weights(random_weights: Callable[..., Bytes]) -> None:
    parts = [make_panels(random_weights, quant, 64, 512, "cuda")[0] for quant in ("Q4_K", "Q6_K")]
    norm = RmsNorm(torch.rand(512, device="cuda").bfloat16(), 1e-6)
    for tokens in ROWS:
        x, before = normal(tokens, 512), normal(tokens, 128)
        product, found = torch.empty_like(before), before.clone()
        multiply_few(parts, x, None, product)
        multiply_few(parts, x, None, found, adds=True)
        assert torch.equal(found, (before.float() + product.float()).bfloat16())
        multiply_few(parts, add_rms_norm(x, *norm), None, product)
        multiply_few(parts, x, None, found, norm=norm)
        assert (found - product).abs().max() <= 2 * STEP[torch.bfloat16] * product.abs().max()


@pytest.mark.parametrize("dtype", STEP)
@pytest.mark.parametrize(("hidden", "experts", "chosen"), [(2048, 128, 8), (2880, 32, 4), (7168, 256, 8)])
@pytest.mark.parametrize("tokens", ROWS)
def test_norm_and_router(tokens: int, hidden: int, experts: int, chosen: int, dtype: torch.dtype) -> None:
    """Experts may change places with nearly equal ones."""
    residual, router = normal(tokens, hidden, dtype=dtype), normal(experts, hidden, dtype=dtype)
    norm, counters = RmsNorm(torch.rand(hidden, device="cuda").to(dtype), 1e-6), torch.zeros(4, device="cuda").int()
    counts = torch.zeros(experts, dtype=torch.int32, device="cuda")
    for scoring in (PLAIN, Scoring(sigmoid=True, scale=2.5)):
        x, rows, routing = few_rows_route(
            residual, norm, router, None, chosen, counters=counters, renormalise=True, scoring=scoring, counts=counts
        )
        nearly(x, add_rms_norm(residual.clone(), *norm), dtype)
        logits = x.float() @ router.float().T
        expected, spread = logits.topk(chosen).values, logits.std().item()
        torch.testing.assert_close(logits.gather(1, routing.ids), expected, rtol=0, atol=1e-3 * spread)
        weights = expected.sigmoid() if scoring.sigmoid else expected.softmax(-1)
        weights = weights / weights.sum(-1, keepdim=True) * scoring.scale
        torch.testing.assert_close(routing.weights, weights, rtol=1e-2, atol=1e-3)
        check_rounded(rows, x)
        assert not counters.any()
    assert counts.sum() == 2 * tokens * chosen


@pytest.mark.parametrize("tokens", ROWS)
def test_pairs_are_added_by_the_last_program(tokens: int, random_weights: Callable[..., Bytes]) -> None:
    """With the bits of the norm's launch."""
    pool = make_pool(random_weights, ("Q4_K", "Q4_K", "Q6_K"), 16, 2048, 256)
    ids, weights = (x.cuda() for x in route(tokens, 16, 8))
    ids[0, 3] = -1
    pairs = pool.pairs(ids, pool.offsets.cuda())._replace(pool=pool.bytes.cuda())
    residual = normal(tokens, 2048)
    counters = torch.zeros(expert_int8.down_counters(tokens, 2048), dtype=torch.int32, device="cuda")
    mid = Int8Rows.quantise(torch.randn(8 * tokens, 256, device="cuda"))
    found = residual.clone()
    for _ in range(REPLAYS):
        partials = expert_int8.down(pairs, None, mid, weights, added_to=found, counters=counters)
        add_rms_norm(residual, torch.ones(2048, device="cuda"), 1e-6, partials=partials)
        assert torch.equal(found, residual)
        assert not counters.any()


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("tokens", [1, 4])
def test_a_layer_is_the_same_in_each_replay(tokens: int, early: bool, random_weights: Callable[..., Bytes]) -> None:
    """All launches that count programs, one behind the other, with and without early launches, for several layers. A
    program that read what another has not written yet, or a counter that is not 0 again, would change some bits."""
    if early and not launches_dependents(torch.device("cuda")):
        pytest.skip("this GPU launches no kernel early")
    pool = make_pool(random_weights, ("Q4_K", "Q4_K", "Q6_K"), 16, 2048, 256)
    memory, offsets = pool.bytes.cuda(), pool.offsets.cuda()
    layout = KVLayout(layers=1, kv_heads=4, head_dim=128, page_size=16, dtype=torch.bfloat16)
    kv = random_cache(layout, 200)
    shape = AttentionShape(layout=layout, heads=32, scaling=0.1, windows=(0,), device="cuda", dtype=torch.bfloat16)
    plan = TritonPlanner(shape).decode_plan(tokens, 40)
    plan.update(make_step(kv, [1] * tokens, [600, 70, 200, 1][:tokens]))
    query_weights, output = normal(4096, 2048) / 45, normal(2048, 4096) / 64
    router, norm = normal(16, 2048), RmsNorm(torch.rand(2048, device="cuda").bfloat16(), 1e-6)
    counters = torch.zeros(expert_int8.down_counters(4, 2048), dtype=torch.int32, device="cuda")
    begin = normal(tokens, 2048)
    residual = begin.clone()

    def layers() -> None:
        residual.copy_(begin)
        for _ in range(4):
            query = few_rows_linear(residual, query_weights, norm=norm).view(tokens, 32, 128)
            attended = plan.attend(0, query, kv, ScoreOptions(0.1)).flatten(1)
            few_rows_linear(attended, output, added_to=residual)
            x, rows, routing = few_rows_route(
                residual, norm, router, None, 8, counters=counters, renormalise=True, scoring=PLAIN
            )
            pairs = pool.pairs(routing.ids, offsets)._replace(pool=memory)
            products.experts(
                pairs, offsets, x, routing.weights, native.SILU, rows=rows, added_to=residual, counters=counters
            )

    with dependent_launches(early):
        layers()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            layers()
    graph.replay()
    expected = residual.clone()
    assert expected.isfinite().all() and not torch.equal(expected, begin)
    for _ in range(REPLAYS):
        graph.replay()
        assert torch.equal(residual, expected)
    assert not counters.any()
