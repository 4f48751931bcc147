"""On a GPU, the kernels of packed experts equal their twins: every format, few and many tokens, also in a graph."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from ktqueue.operators import native
from ktqueue.operators.gpu.device import launches_dependents, program_bytes
from ktqueue.operators.gpu.kernels import decoded_experts, expert_int8, expert_matrices, panel_layout
from ktqueue.operators.gpu.kernels import expert_products as products
from ktqueue.operators.gpu.kernels.expert_int8 import Int8Rows
from ktqueue.operators.gpu.kernels.expert_pairs import ExpertBiases, ExpertPairs
from ktqueue.operators.gpu.kernels.expert_tiles import INFINITE, TILES, MatrixTile, MatrixTiles
from ktqueue.operators.gpu.kernels.operation import dependent_launches
from ktqueue.operators.packed import Bytes

from ..operators.gpu.kernels.panel_pools import GATES, WEIGHTED, make_pool, route, small

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]

BOUNDS = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Relative norm of the error: weights and the rows between the two products are rounded to the dtype."""
EXPERTS, SLOTS = 6, 3


def assert_close(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    error = (got.cpu().double() - expected.double()).norm()
    assert error <= BOUNDS[dtype] * expected.double().norm()


def on_gpu(pairs: ExpertPairs) -> ExpertPairs:
    """The same pairs in GPU memory."""
    biases = pairs.biases and ExpertBiases(*(bias.cuda() for bias in pairs.biases))
    return ExpertPairs(pairs.pool.cuda(), pairs.offsets.cuda(), pairs.ids.cuda(), pairs.record, biases)


def on_either_side(weights: torch.Tensor, gate: native.GateFacts) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The weights of gate and up, and those of down."""
    return (weights, None) if gate.weighted_input else (None, weights)


def assert_experts(
    pairs: ExpertPairs, x: torch.Tensor, weights: torch.Tensor, gate: native.GateFacts = native.SILU
) -> None:
    """Both products on the GPU, against the twins of the same inputs."""
    there, (of_input, of_output) = on_gpu(pairs), on_either_side(weights.cuda(), gate)
    mid = products.gate_up(there, x.cuda(), gate, of_input)
    partials = products.down(there, mid, of_output)
    of_input, of_output = on_either_side(weights, gate)
    computed = (pairs.ids >= 0) & (pairs.offsets[pairs.ids.clamp(min=0)] >= 0)
    expected = products.gate_up(pairs, x, gate, of_input)
    assert_close(mid.cpu()[computed], expected[computed], x.dtype)
    wanted = products.down(pairs, mid.cpu().nan_to_num(), of_output)
    assert_close(partials, wanted, x.dtype)
    assert partials.cpu()[~computed].eq(0).all()


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("quant", native.QUANTS)
def test_equals_the_twins(quant: str, dtype: torch.dtype, random_weights: Callable[..., Bytes]) -> None:
    cases = [small(quant)]
    if quant not in panel_layout.FLOAT_PRODUCTS:
        cases.append(((quant,) * 3, 512, 256))
    for quants, hidden, intermediate in cases:
        pool = make_pool(random_weights, quants, EXPERTS, hidden, intermediate)
        offsets = pool.offsets.clone()
        offsets[1] = -1
        for tokens in (1, 5, 90, 200, 700):
            x, (ids, weights) = torch.randn(tokens, hidden).to(dtype), route(tokens, EXPERTS, SLOTS, tokens)
            ids[-1, 0] = -1
            assert_experts(pool.pairs(ids, offsets), x, weights)


@pytest.mark.parametrize("quant", native.QUANTS)
def test_decoded_experts_equal_packed_ones(quant: str, random_weights: Callable[..., Bytes]) -> None:
    """An expert is on the CPU, one has no pairs, and a pair has no expert. The host does not wait for the device."""
    pool = make_pool(random_weights, (quant,) * 3, EXPERTS, 512, 256)
    if not decoded_experts.can_be_grouped(pool.record, torch.bfloat16, torch.device("cuda")):
        pytest.skip("torch has no grouped product for this GPU")
    offsets = pool.offsets.clone()
    offsets[1] = -1
    weights_of_layer = decoded_experts.decoded_weights(pool.record, EXPERTS)
    memory = torch.full((weights_of_layer,), torch.nan, dtype=torch.bfloat16, device="cuda")
    for tokens in (1, 90, 700):
        x, (ids, weights) = torch.randn(tokens, 512).bfloat16(), route(tokens, EXPERTS, SLOTS, tokens)
        ids[ids == 3] = -1
        pairs = pool.pairs(ids, offsets)
        there, own = on_gpu(pairs), (x.cuda(), weights.cuda())
        torch.cuda.set_sync_debug_mode("error")
        found = decoded_experts.experts(there, there.offsets, *own, native.SILU, memory)
        torch.cuda.set_sync_debug_mode("default")
        expected = products.experts(pairs, offsets, x.float(), weights, native.SILU).sum(1, keepdim=True)
        assert_close(found, expected, torch.bfloat16)


def test_all_pairs_on_one_expert(random_weights: Callable[..., Bytes]) -> None:
    pool = make_pool(random_weights, "Q4_K", EXPERTS, 512, 256)
    for tokens in (3, 100, 600):
        x, ids = torch.randn(tokens, 512).bfloat16(), torch.full((tokens, 2), 4)
        assert_experts(pool.pairs(ids), x, torch.rand(tokens, 2))


def test_records_far_away(random_weights: Callable[..., Bytes]) -> None:
    """Offsets beyond 32 bits."""
    pool = make_pool(random_weights, "Q6_K", 2, 256, 256)
    far = torch.empty((5 << 30) + pool.bytes.numel(), dtype=torch.uint8, device="cuda")
    far[5 << 30 :] = pool.bytes.cuda()
    x, (ids, weights) = torch.randn(9, 256).bfloat16(), route(9, 2, 1)
    near = on_gpu(pool.pairs(ids))
    distant = near._replace(pool=far, offsets=near.offsets + (5 << 30))
    mids = [products.gate_up(pairs, x.cuda(), native.SILU) for pairs in (near, distant)]
    assert torch.equal(*mids)
    assert torch.equal(*(products.down(pairs, mids[0], weights.cuda()) for pairs in (near, distant)))


def assert_rounded(
    pairs: ExpertPairs,
    x: torch.Tensor,
    weights: torch.Tensor,
    gate: native.GateFacts = native.SILU,
    matrices: MatrixTiles | None = None,
) -> None:
    """Each launch of the integer kernel, or of that for matrices, against plain torch of the same inputs."""
    there, ids, record = on_gpu(pairs), pairs.ids, pairs.record
    rows, lists = expert_int8.prepare(there, x.cuda(), own_pairs=0 if matrices else TILES.own_pairs)
    expected = Int8Rows.quantise(x)
    assert (rows.codes.cpu().int() - expected.codes.int()).abs().max() <= 1
    x = Int8Rows(*(part.cpu() for part in (rows.codes, rows.scales, rows.sums))).floats()
    of_input, of_output = on_either_side(weights.cuda(), gate)
    if matrices:
        assert lists
        mid = expert_matrices.gate_up(there, lists, rows, gate, of_input, matrices.gate_up)
        got = expert_matrices.down(there, lists, mid, of_output, matrices.down)
    else:
        mid = expert_int8.gate_up(there, lists, rows, gate, of_input)
        got = expert_int8.down(there, lists, mid, of_output)
    of_input, of_output = on_either_side(weights, gate)
    computed = ((ids >= 0) & (pairs.offsets[ids.clamp(min=0)] >= 0)).flatten()
    exact = torch.zeros(*ids.shape, record.intermediate)
    products.gate_up_twin(pairs, x, gate, exact, of_input)
    between = Int8Rows(*(part.cpu() for part in (mid.codes, mid.scales, mid.sums)))
    wanted = Int8Rows.quantise(exact.view(-1, record.intermediate))
    torch.testing.assert_close(
        between.scales[computed], wanted.scales[computed], rtol=1e-4, atol=1e-6 * float(wanted.scales[computed].max())
    )
    assert (between.codes.int() - wanted.codes.int())[computed].abs().max() <= 1
    assert (between.codes != wanted.codes)[computed].float().mean() < 1e-2
    partials = torch.empty(*ids.shape, record.hidden)
    products.down_twin(pairs, between.floats().nan_to_num(), of_output, partials)
    assert_close(got, partials, torch.float32)
    assert got.cpu().flatten(0, 1)[~computed].eq(0).all()


@pytest.mark.parametrize("quant", [quant for quant in native.QUANTS if quant not in panel_layout.FLOAT_PRODUCTS])
def test_few_tokens_equal_rounded_products(quant: str, random_weights: Callable[..., Bytes]) -> None:
    cases = [small(quant), ((quant,) * 3, 2048, 768)]
    for quants, hidden, intermediate in cases:
        pool = make_pool(random_weights, quants, EXPERTS, hidden, intermediate)
        offsets = pool.offsets.clone()
        offsets[1] = -1
        for tokens in (1, 2, 9, 13, 40):
            x, (ids, weights) = torch.randn(tokens, hidden).bfloat16(), route(tokens, EXPERTS, SLOTS, tokens)
            ids[-1, 0] = -1
            assert_rounded(pool.pairs(ids, offsets), x, weights)


MATRICES = [
    MatrixTiles(MatrixTile(8, warps=4, has_runs=False), MatrixTile(8, warps=4, has_runs=False)),
    MatrixTiles(MatrixTile(24, warps=4, stages=3), MatrixTile(24, warps=3)),
]


@pytest.mark.parametrize("quant", [quant for quant in native.QUANTS if quant not in panel_layout.FLOAT_PRODUCTS])
@pytest.mark.parametrize("matrices", MATRICES, ids=["8 pairs", "24 pairs"])
def test_matrices_of_int8_equal_rounded_products(
    matrices: MatrixTiles, quant: str, random_weights: Callable[..., Bytes]
) -> None:
    """Also where a row's last superblock is short, an expert is absent, and an expert has more pairs than a tile."""
    for quants, hidden, intermediate in (small(quant), ((quant,) * 3, 2048, 768)):
        pool = make_pool(random_weights, quants, EXPERTS, hidden, intermediate)
        memory = program_bytes(pool.offsets.cuda().device)
        for tile, part, columns in ((matrices.gate_up, quants[0], hidden), (matrices.down, quants[2], intermediate)):
            assert expert_matrices.fitting_tile(part, EXPERTS, columns, tile, memory) == tile
        offsets = pool.offsets.clone()
        offsets[1] = -1
        for tokens in (1, 13, 90):
            x, (ids, weights) = torch.randn(tokens, hidden).bfloat16(), route(tokens, EXPERTS, SLOTS, tokens)
            ids[-1, 0] = -1
            assert_rounded(pool.pairs(ids, offsets), x, weights, matrices=matrices)


@pytest.mark.parametrize("share", [0.4, 0.6, 0.8, 1.0])
def test_matrices_of_int8_with_about_as_many_lists_as_programs(
    share: float, random_weights: Callable[..., Bytes]
) -> None:
    """There, programs may have a list of their own, or share one."""
    matrices = MatrixTiles(MatrixTile(8, warps=8), MatrixTile(8, warps=8))
    programs = 2 * torch.cuda.get_device_properties("cuda").multi_processor_count
    pool = make_pool(random_weights, "Q4_K", EXPERTS, 512, 256)
    tokens = int(share * programs * matrices.down.pairs / SLOTS) - EXPERTS
    x, (ids, weights) = torch.randn(tokens, 512).bfloat16(), route(tokens, EXPERTS, SLOTS)
    assert_rounded(pool.pairs(ids), x, weights, matrices=matrices)


@pytest.mark.parametrize("gate", GATES, ids=lambda gate: f"{gate.activation}{gate.weighted_input}")
def test_matrices_of_int8_have_biases_and_gates(gate: native.GateFacts, random_weights: Callable[..., Bytes]) -> None:
    pool = make_pool(random_weights, "Q4_K", EXPERTS, 512, 256, biased=True, gate=gate)
    x, (ids, weights) = torch.randn(40, 512).bfloat16(), route(40, EXPERTS, SLOTS)
    for matrices in MATRICES:
        assert_rounded(pool.pairs(ids), x, weights, gate, matrices)


def test_matrices_of_int8_keep_what_is_no_number_to_its_row(random_weights: Callable[..., Bytes]) -> None:
    pool = make_pool(random_weights, "Q4_K", EXPERTS, 512, 256)
    x, (ids, weights) = torch.randn(40, 512).bfloat16().cuda(), (one.cuda() for one in route(40, EXPERTS, SLOTS))
    there = on_gpu(pool.pairs(ids))
    assert (tiles := TILES.matrix_tiles(ids.numel(), EXPERTS))
    assert expert_matrices.fitting_tiles(pool.record, EXPERTS, tiles, x.device) == tiles
    whole = products.experts(there, there.offsets, x, weights, native.SILU)
    x[3, 7] = torch.nan
    broken = products.experts(there, there.offsets, x, weights, native.SILU)
    assert broken[3].isnan().all()
    others = torch.arange(40, device="cuda") != 3
    assert torch.equal(broken[others], whole[others])


def test_matrices_of_int8_may_be_launched_early(random_weights: Callable[..., Bytes]) -> None:
    """Kernels of a graph that begin before the one before has ended compute the same, in every replay."""
    if not launches_dependents(torch.device("cuda")):
        pytest.skip("this GPU has no such launches")
    pool = make_pool(random_weights, "Q4_K", EXPERTS, 512, 512)
    there = on_gpu(pool.pairs(route(40, EXPERTS, SLOTS)[0]))
    x, weights = torch.randn(40, 512, device="cuda").bfloat16(), torch.rand(40, SLOTS, device="cuda")

    def forward() -> torch.Tensor:
        rows = x
        for _ in range(20):
            rows = products.experts(there, there.offsets, rows, weights, native.SILU).sum(1).tanh().bfloat16()
        return rows

    expected = forward()
    graph = torch.cuda.CUDAGraph()
    with dependent_launches(True):
        forward()
        with torch.cuda.graph(graph):
            captured = forward()
    for _ in range(10):
        captured.zero_()
        graph.replay()
        assert torch.equal(captured, expected)


@pytest.mark.parametrize("tokens", [2, 40, 600])
def test_weights_may_multiply_the_input(tokens: int, random_weights: Callable[..., Bytes]) -> None:
    pool = make_pool(random_weights, "Q4_K", EXPERTS, 512, 256)
    x, (ids, weights) = torch.randn(tokens, 512), route(tokens, EXPERTS, 1, tokens)
    for dtype in BOUNDS:
        assert_experts(pool.pairs(ids), x.to(dtype), weights, WEIGHTED)
    if tokens < 600:
        assert_rounded(pool.pairs(ids), x.bfloat16(), weights, WEIGHTED)


def test_few_tokens_depend_on_no_others(random_weights: Callable[..., Bytes]) -> None:
    """The tiles of one row and those of matrices are left out, since they add in another order."""
    tiles = replace(TILES, own=TILES.own[1:], matrices=((INFINITE, None),), early_pairs=None)
    pool = make_pool(random_weights, "Q4_K", EXPERTS, 512, 256)
    x, (ids, weights) = torch.randn(23, 512).bfloat16().cuda(), (one.cuda() for one in route(23, EXPERTS, SLOTS))
    there = on_gpu(pool.pairs(ids))
    results = [
        products.experts(there._replace(ids=ids[:n]), there.offsets, x[:n], weights[:n], native.SILU, tiles=tiles)
        for n in (1, 5, 23)
    ]
    assert torch.equal(results[0], results[1][:1])
    assert torch.equal(results[1], results[2][:5])


@pytest.mark.parametrize("tokens", [2, 20, 40])
def test_few_tokens_in_a_graph(tokens: int, random_weights: Callable[..., Bytes]) -> None:
    """Replays see new activations, ids and offsets."""
    pool = make_pool(random_weights, "Q4_K", EXPERTS, 512, 256)
    packed, offsets = pool.bytes.cuda(), pool.offsets.cuda()
    x = torch.randn(tokens, 512, device="cuda").bfloat16()
    ids, weights = (one.cuda() for one in route(tokens, EXPERTS, SLOTS))

    def forward() -> torch.Tensor:
        return products.experts(ExpertPairs(packed, offsets, ids, pool.record), offsets, x, weights, native.SILU)

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
    packed, offsets = pool.bytes.cuda(), pool.offsets.cuda()
    x = torch.randn(tokens, 512, device="cuda").bfloat16()
    ids, weights = (one.cuda() for one in route(tokens, EXPERTS, SLOTS))
    pairs = ExpertPairs(packed, offsets, ids, pool.record)

    def forward() -> torch.Tensor:
        return products.down(pairs, products.gate_up(pairs, x, native.SILU), weights)

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
