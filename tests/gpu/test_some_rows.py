"""On a GPU, one launch from the residual of some rows to their experts equals launches one by one, in each replay."""

from typing import NamedTuple

import pytest
import torch

from ktqueue.operators.gpu.device import launches_dependents
from ktqueue.operators.gpu.kernels.expert_pairs import SortedPairs
from ktqueue.operators.gpu.kernels.norm import RmsNorm, add_rms_norm
from ktqueue.operators.gpu.kernels.operation import dependent_launches
from ktqueue.operators.gpu.kernels.panel_layout import ExpertRecord
from ktqueue.operators.gpu.kernels.router import PLAIN, Scoring
from ktqueue.operators.gpu.kernels.some_rows_router import SOME_ROWS, ExpertRequests, some_rows_route

from ..operators.gpu.kernels.comparing import check_rounded

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (torch.cuda.is_available() and launches_dependents("cuda")), reason="there are no clusters"),
]


class Shape(NamedTuple):
    """Of a router."""

    hidden: int
    experts: int
    chosen: int
    renormalise: bool = True
    scoring: Scoring = PLAIN
    has_bias: bool = False
    float_norm: bool = False


SHAPES = {
    "Qwen3": Shape(2048, 128, 8),
    "DeepSeek-V2-Lite": Shape(2048, 64, 6, renormalise=False),
    "Qwen3.5": Shape(2048, 256, 8),
    "gpt-oss": Shape(2880, 32, 4, has_bias=True, float_norm=True),
    "Mixtral": Shape(4096, 8, 2),
    "sigmoids": Shape(4096, 128, 8, scoring=Scoring(sigmoid=True, scale=2.5)),
    "few programs": Shape(96, 40, 5),
}


class Router(NamedTuple):
    """Weights of a router and its norm."""

    norm: RmsNorm
    weights: torch.Tensor
    bias: torch.Tensor | None
    scoring: Scoring


def make_router(shape: Shape) -> Router:
    factors = torch.rand(shape.hidden, device="cuda") + 0.5
    norm = RmsNorm(factors if shape.float_norm else factors.bfloat16(), 1e-6)
    weights = (torch.randn(shape.experts, shape.hidden, device="cuda") / shape.hidden**0.5).bfloat16()
    bias = torch.randn(shape.experts, device="cuda").bfloat16() if shape.has_bias else None
    scales = torch.rand(shape.experts, device="cuda") if shape.scoring.sigmoid else None
    return Router(norm, weights, bias, Scoring(shape.scoring.sigmoid, shape.scoring.scale, scales=scales))


@pytest.mark.parametrize("tokens", [1, 5, 16, 17, 40, SOME_ROWS])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_norm_router_and_lists(shape: Shape, tokens: int) -> None:
    """Experts may change places with nearly equal ones."""
    torch.manual_seed(tokens)
    router, residual = make_router(shape), (3 * torch.randn(tokens, shape.hidden, device="cuda")).bfloat16()
    before, counters = residual.clone(), torch.zeros(1, dtype=torch.int32, device="cuda")
    offsets = torch.arange(shape.experts, device="cuda") * 64
    offsets[3] = -1
    live = max(1, tokens - 3)
    live_tokens = torch.tensor([live], dtype=torch.int32, device="cuda")
    record = ExpertRecord("Q4_K", "Q4_K", "Q6_K", 256, 64)
    pool = torch.zeros(shape.experts * record.bytes, dtype=torch.uint8, device="cuda")
    recent = torch.randint(0, 3, (shape.experts,), dtype=torch.int32, device="cuda")
    for has_lists, has_live in ((True, False), (True, True), (False, False)):
        counts = torch.zeros(shape.experts, dtype=torch.int32, device="cuda")
        x, rows, lists, routing = some_rows_route(
            residual,
            router.norm,
            router.weights,
            router.bias,
            shape.chosen,
            counters=counters,
            renormalise=shape.renormalise,
            scoring=router.scoring,
            offsets=offsets if has_lists else None,
            live_tokens=live_tokens if has_live else None,
            counts=counts if has_live else None,
            requests=ExpertRequests(pool, record, recent) if has_lists else None,
        )
        assert torch.equal(residual, before)
        assert not counters.any()
        expected = add_rms_norm(residual.clone(), *router.norm)
        assert (x.float() - expected.float()).abs().max() <= 2**-7 * expected.float().abs().max()
        assert (x == expected).float().mean() > 0.97
        check_rounded(rows, x)

        used = live if has_live else tokens
        logits = x.float() @ router.weights.float().T + (0.0 if router.bias is None else router.bias.float())
        chosen, ids = logits[:used], routing.ids[:used]
        best = chosen.topk(shape.chosen).values
        torch.testing.assert_close(chosen.gather(1, ids), best, rtol=0, atol=1e-3 * chosen.std().item())
        assert all(len(set(row)) == shape.chosen for row in ids.tolist())
        values = chosen.gather(1, ids)
        weights = values.sigmoid() if router.scoring.sigmoid else chosen.softmax(-1).gather(1, ids)
        if shape.renormalise:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights * router.scoring.scale
        if router.scoring.scales is not None:
            weights = weights * router.scoring.scales[ids]
        torch.testing.assert_close(routing.weights[:used], weights, rtol=1e-2, atol=1e-3)
        assert (routing.ids[used:] == -1).all()
        assert not routing.weights[used:].any()

        assert (lists is not None) == has_lists
        if lists is not None:
            twin = SortedPairs.of(routing.ids.cpu(), offsets.cpu())
            pairs = used * shape.chosen
            assert torch.equal(lists.sorted[:pairs].cpu(), twin.sorted[:pairs])
            assert torch.equal(lists.starts.cpu(), twin.starts)
            assert torch.equal(lists.counts.cpu(), twin.counts)
            assert torch.equal(recent.cpu(), torch.bincount(ids.flatten().cpu(), minlength=shape.experts).int())
        if has_live:
            assert torch.equal(counts.cpu(), torch.bincount(ids.flatten().cpu(), minlength=shape.experts).int())


def test_equal_logits_and_unsound_ones() -> None:
    """The lowest ids of equal logits are chosen. A row with a NaN spoils no other."""
    shape = SHAPES["Qwen3"]
    router = make_router(shape)
    residual = torch.ones(16, shape.hidden, dtype=torch.bfloat16, device="cuda")
    residual[5, 7] = torch.nan
    router.weights[:] = router.weights[0]
    counters = torch.zeros(1, dtype=torch.int32, device="cuda")
    _, rows, _, routing = some_rows_route(
        residual, router.norm, router.weights, None, 8, counters=counters, renormalise=True, scoring=PLAIN, offsets=None
    )
    assert torch.equal(routing.ids.cpu(), torch.arange(8).repeat(16, 1))
    sound = torch.arange(16) != 5
    assert (routing.weights.cpu()[sound] == 0.125).all()
    assert routing.weights[5].isnan().all()
    assert rows.scales[5].isnan().any()
    assert not rows.scales.cpu()[sound].isnan().any()


def test_replays_of_a_graph_that_begin_early() -> None:
    """Each reads what the launch before wrote."""
    shape = SHAPES["Qwen3"]
    router, counters = make_router(shape), torch.zeros(1, dtype=torch.int32, device="cuda")
    source = torch.randn(300, 24, shape.hidden, device="cuda").bfloat16()
    offsets = torch.arange(shape.experts, device="cuda") * 64
    zeros, found = torch.zeros(24, shape.hidden, dtype=torch.bfloat16, device="cuda"), []

    def run(residual: torch.Tensor) -> tuple[torch.Tensor, ...]:
        add_rms_norm(residual, router.norm.weight, 1e-6, added=zeros)
        x, rows, lists, routing = some_rows_route(
            residual, router.norm, router.weights, None, 8,
            counters=counters, renormalise=True, scoring=PLAIN, offsets=offsets,
        )  # fmt: skip
        assert lists is not None
        return x, rows.codes, rows.scales, rows.sums, *lists, routing.ids, routing.weights

    residual = source[0].clone()
    run(residual)
    with dependent_launches(True):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = run(residual)
    for one in source:
        residual.copy_(one)
        graph.replay()
        found.append([output.clone() for output in outputs])
    for one, replayed in zip(source, found, strict=True):
        for output, expected in zip(replayed, run(one.clone()), strict=True):
            assert torch.equal(output, expected)
