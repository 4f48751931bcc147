"""Norm, router and rounding in one launch: the kernel equals its twin, and that equals the launches one by one."""

from typing import Any

import pytest
import torch

from ktqueue.operators.gpu.kernels.expert_int8 import Int8Rows
from ktqueue.operators.gpu.kernels.few_rows_router import few_rows_route, has_few_rows
from ktqueue.operators.gpu.kernels.linear import few_rows_linear
from ktqueue.operators.gpu.kernels.norm import RmsNorm, add_rms_norm
from ktqueue.operators.gpu.kernels.router import PLAIN, Scoring, route

from ..interpreted import by_kernel
from .comparing import assert_same, check_rounded


def case(tokens: int, hidden: int, experts: int, dtype: torch.dtype, scoring: Scoring = PLAIN) -> dict[str, Any]:
    """Arguments of few_rows_route. Logits of one token are far apart, so that no rounding changes the choice."""
    torch.manual_seed(tokens)
    return {
        "residual": torch.randn(tokens, hidden).to(dtype),
        "norm": RmsNorm(torch.rand(hidden).to(dtype), 1e-5),
        "router": torch.randn(experts, hidden).to(dtype),
        "bias": torch.randn(experts).to(dtype),
        "experts_per_token": 3,
        "counters": torch.zeros(4, dtype=torch.int32),
        "renormalise": True,
        "scoring": scoring,
        "live_tokens": torch.tensor([max(tokens - 1, 1)], dtype=torch.int32),
        "counts": torch.ones(experts, dtype=torch.int32),
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize(("tokens", "hidden", "experts"), [(1, 64, 12), (3, 96, 5), (4, 160, 16)])
def test_the_kernel_equals_its_twin(tokens: int, hidden: int, experts: int, plain: bool, dtype: torch.dtype) -> None:
    """Twice: the launch leaves its counters as they were."""
    scoring = PLAIN if plain else Scoring(sigmoid=True, scale=2.5, scales=torch.rand(experts))
    ours, twin = (case(tokens, hidden, experts, dtype, scoring) for _ in range(2))
    if plain:
        ours["norm"] = twin["norm"] = RmsNorm(twin["norm"].weight.float(), 1e-5)
        ours |= {"bias": None, "live_tokens": None, "counts": None}
        twin |= {"bias": None, "live_tokens": None, "counts": None}
    for _ in range(2):
        x, rows, routing = by_kernel(few_rows_route, **ours)
        expected_x, _, expected = few_rows_route(**twin)
        assert_same(x, expected_x)
        assert torch.equal(routing.ids, expected.ids)
        torch.testing.assert_close(routing.weights, expected.weights, rtol=1e-2, atol=1e-3)
        check_rounded(rows, x)
        assert torch.equal(rows.codes, Int8Rows.quantise(x).codes)
        assert not ours["counters"].any()
    if not plain:
        assert torch.equal(ours["counts"], twin["counts"])
    assert torch.equal(ours["residual"], twin["residual"])


def test_the_twin_equals_launches_one_by_one() -> None:
    given = case(3, 64, 12, torch.bfloat16)
    x, rows, routing = few_rows_route(**given)
    expected = add_rms_norm(given["residual"], *given["norm"])
    logits = few_rows_linear(expected, given["router"], given["bias"], dtype=torch.float32)
    alone = route(logits, 3, renormalise=True, live_tokens=given["live_tokens"])
    assert torch.equal(x, expected)
    assert torch.equal(rows.codes, Int8Rows.quantise(x).codes)
    assert torch.equal(routing.ids, alone.ids) and torch.equal(routing.weights, alone.weights)
    assert routing.ids[2].tolist() == [-1] * 3


def test_other_steps_are_refused() -> None:
    given = case(4, 64, 12, torch.bfloat16)
    residual, router, norm = given["residual"], given["router"], given["norm"].weight
    assert has_few_rows(residual, router, norm, PLAIN)
    assert not has_few_rows(residual.repeat(2, 1), router, norm, PLAIN)
    assert not has_few_rows(residual[:0], router, norm, PLAIN)
    assert not has_few_rows(residual.float(), router.float(), norm, PLAIN)
    assert not has_few_rows(residual, router, norm.repeat(2, 1), PLAIN), "a LayerNorm"
    for scoring in (Scoring(bias=torch.zeros(12)), Scoring(groups=4, groups_used=2), Scoring(jitter=0.1)):
        assert not has_few_rows(residual, router, norm, scoring)
    for wrong in ({"residual": residual.float()}, {"router": router[:, :32]}, {"counters": given["counters"][:3]}):
        with pytest.raises(ValueError, match="few_rows_route does not take"):
            few_rows_route(**given | wrong)
