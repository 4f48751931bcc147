"""Without a GPU: the twin of the launch from some rows to their experts, and the sizes that it takes."""

import ctypes
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from ktqueue.operators.gpu.experts.step import ExpertResidency, RoutedLayer, StepExperts
from ktqueue.operators.gpu.kernels import some_rows_router
from ktqueue.operators.gpu.kernels.cuda_kernel import machine_code
from ktqueue.operators.gpu.kernels.expert_pairs import SortedPairs
from ktqueue.operators.gpu.kernels.norm import RmsNorm, add_rms_norm
from ktqueue.operators.gpu.kernels.panel_layout import ExpertRecord
from ktqueue.operators.gpu.kernels.router import PLAIN, Scoring, route
from ktqueue.operators.gpu.kernels.some_rows_router import (
    MOST_CHOSEN,
    SOME_ROWS,
    ExpertRequests,
    RouterFacts,
    constants,
    has_some_rows,
    programs_of,
    some_rows_route,
)

from .comparing import check_rounded


def test_lists_of_pairs() -> None:
    """In the order of the pairs, without skipped ones. An expert that is not there has a place, but no count."""
    ids = torch.tensor([[2, 0], [-1, -1], [0, 3], [2, 3]])
    lists = SortedPairs.of(ids, torch.tensor([0, 64, -1, 128]))
    assert lists.sorted[:6].tolist() == [1, 4, 0, 6, 5, 7]
    assert lists.starts.tolist() == [0, 2, 2, 4]
    assert lists.counts.tolist() == [2, 0, 0, 2]


def test_twin() -> None:
    torch.manual_seed(0)
    residual, router = torch.randn(7, 64).bfloat16(), torch.randn(16, 64).bfloat16()
    norm, offsets = RmsNorm(torch.rand(64).bfloat16(), 1e-6), torch.arange(16)
    bias, live, counters = torch.randn(16).bfloat16(), torch.tensor([5], dtype=torch.int32), torch.zeros(1).int()
    before = residual.clone()
    record, recent = ExpertRecord("Q4_K", "Q4_K", "Q6_K", 256, 96), torch.full((16,), 7, dtype=torch.int32)
    requests = ExpertRequests(torch.empty(0), record, recent)
    x, rows, lists, routing = some_rows_route(
        residual, norm, router, bias, 4,
        counters=counters, renormalise=True, scoring=PLAIN, offsets=offsets, live_tokens=live, requests=requests,
    )  # fmt: skip
    assert torch.equal(residual, before)
    assert torch.equal(x, add_rms_norm(residual, *norm))
    check_rounded(rows, x)
    expected = route(x.float() @ router.float().T + bias.float(), 4, renormalise=True, live_tokens=live)
    assert torch.equal(routing.ids, expected.ids)
    assert lists is not None
    assert lists.counts.sum() == 20
    assert torch.equal(recent, lists.counts)
    assert requests.lines == (12, record.down_start // 12)
    with pytest.raises(ValueError, match="some_rows_route"):
        some_rows_route(
            residual.float(), norm, router, bias, 4,
            counters=counters, renormalise=True, scoring=PLAIN, offsets=None,
        )  # fmt: skip
    with pytest.raises(ValueError, match="some_rows_route"):
        some_rows_route(
            residual, norm, router, bias, 4,
            counters=counters, renormalise=True, scoring=PLAIN, offsets=None, requests=requests,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("hidden", "experts", "takes"),
    [
        (2048, 128, True),
        (2048, 256, True),
        (4096, 128, True),
        (4096, 256, False),
        (2048, 512, False),
        (2880, 32, True),
        (4096, 8, True),
        (2048, 60, False),
        (7168, 256, False),
    ],
)
def test_sizes(hidden: int, experts: int, takes: bool) -> None:
    """Of routers of published models."""
    residual = torch.zeros(SOME_ROWS, hidden, dtype=torch.bfloat16)
    router, norm = residual.new_zeros(experts, hidden), residual.new_zeros(hidden)
    assert has_some_rows(residual, router, norm, PLAIN) == takes
    assert not has_some_rows(torch.zeros(SOME_ROWS + 1, hidden).bfloat16(), router, norm, PLAIN)
    assert not has_some_rows(residual.half(), router.half(), norm, PLAIN)
    assert not has_some_rows(residual, router, norm, Scoring(groups=4, groups_used=2))


def test_layers_that_take_it() -> None:
    """All but those whose tokens have too many experts, and most steps beside a shared expert."""
    record = ExpertRecord("Q4_K", "Q4_K", "Q4_K", 256, 256)
    residual, router = torch.zeros(32, 256).bfloat16(), torch.zeros(64, 256).bfloat16()
    residency = cast(ExpertResidency, SimpleNamespace(locations=lambda _: SimpleNamespace(on_gpu=True)))
    for chosen, takes in ((MOST_CHOSEN, True), (MOST_CHOSEN + 1, False)):
        kind = SimpleNamespace(experts_per_token=chosen, experts=64, scoring=PLAIN, record=record, exact=False)
        step = StepExperts([cast(RoutedLayer, kind)], residency, None, counters=torch.zeros(1).int())
        for rows, has_shared, pays in ((8, False, True), (8, True, True), (32, False, True), (32, True, False)):
            found = step.runs_from(0, residual[:rows], residual[0], router, has_shared=has_shared)
            assert found == (takes and pays)


def test_programs_share_experts() -> None:
    assert [programs_of(experts) for experts in (8, 32, 40, 64, 128, 256, 60)] == [1, 4, 5, 8, 8, 8, 0]


@pytest.mark.compiled
@pytest.mark.parametrize(
    "facts",
    [
        RouterFacts(128, 2048, 8, 4, renormalise=True, epsilon=1e-6, sorts=True, has_live=True),
        RouterFacts(128, 2048, 8, 1, True, 1e-6, sorts=True, lines=(96, 18432), requested=28 << 20),
        RouterFacts(40, 2048, 8, 1, True, 1e-6, sorts=True, lines=(176, 18432), requested=28 << 20),
        RouterFacts(64, 2048, 6, 1, renormalise=False, epsilon=1e-6),
        RouterFacts(128, 4096, 8, 1, renormalise=True, epsilon=1e-6, sigmoid=True, has_scales=True, counts_uses=True),
        RouterFacts(32, 2880, 4, 2, renormalise=True, epsilon=1e-5, has_bias=True, float_norm=True, sorts=True),
        RouterFacts(8, 4096, 2, 1, renormalise=True, epsilon=1e-6),
        RouterFacts(256, 2048, 8, 4, renormalise=True, epsilon=1e-6, sorts=True, has_live=True),
    ],
)
def test_kernel_compiles(facts: RouterFacts, compiler: ctypes.CDLL) -> None:
    options = [f"-D{name}={value}" for name, value in constants(facts).items()]
    assert b"route_some_rows" in machine_code(some_rows_router.SOURCE, options, "90", compiler)
