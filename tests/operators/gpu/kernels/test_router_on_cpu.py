"""The kernel that routes some rows, run on the CPU: it gives what its twin gives. tests/gpu does so on a GPU."""

from pathlib import Path

import pytest
import torch

from ktqueue.operators.gpu.kernels import some_rows_router
from ktqueue.operators.gpu.kernels.expert_int8 import Int8Rows
from ktqueue.operators.gpu.kernels.expert_pairs import SortedPairs
from ktqueue.operators.gpu.kernels.norm import RmsNorm
from ktqueue.operators.gpu.kernels.panel_layout import ExpertRecord
from ktqueue.operators.gpu.kernels.router import PLAIN, Scoring
from ktqueue.operators.gpu.kernels.some_rows_router import (
    ExpertRequests,
    RouterFacts,
    constants,
    programs_of,
    some_rows_route,
)

from ..on_cpu.emulated import EmulatedKernel
from .comparing import check_rounded

pytestmark = pytest.mark.compiled


@pytest.mark.parametrize(
    ("tokens", "hidden", "experts", "chosen", "renormalise", "scoring"),
    [
        (16, 2048, 128, 8, True, PLAIN),
        (20, 256, 64, 6, False, PLAIN),
        (5, 2880, 32, 4, True, Scoring(sigmoid=True, scale=2.5)),
        (7, 96, 40, 5, True, PLAIN),
    ],
)
def test_norm_router_and_lists(
    tokens: int,
    hidden: int,
    experts: int,
    chosen: int,
    renormalise: bool,
    scoring: Scoring,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With an absent expert, and rows of which the last ones do not live."""
    noise = torch.Generator().manual_seed(tokens)
    residual = (3 * torch.randn(tokens, hidden, generator=noise)).bfloat16()
    norm = RmsNorm((torch.rand(hidden, generator=noise) + 0.5).bfloat16(), 1e-6)
    router = (torch.randn(experts, hidden, generator=noise) / hidden**0.5).bfloat16()
    offsets = torch.arange(experts) * 64
    offsets[3] = -1
    live = torch.tensor([tokens - 2], dtype=torch.int32)
    record = ExpertRecord("Q4_K", "Q4_K", "Q6_K", 256, 64)
    recent = torch.randint(0, 3, (experts,), dtype=torch.int32, generator=noise)

    class Launched:
        def __init__(self, facts: RouterFacts) -> None:
            self._kernel = EmulatedKernel(some_rows_router.SOURCE, constants(facts), some_rows_router.NAME, tmp_path)

        def launch(self, grid: tuple[int, int], arguments: list[torch.Tensor | int], *, early: bool) -> None:
            self._kernel.launch(grid, arguments, threads=512, together=programs_of(experts))

    def route(
        counts: torch.Tensor,
    ) -> tuple[torch.Tensor, Int8Rows, SortedPairs, torch.Tensor, torch.Tensor]:
        x, rows, lists, routing = some_rows_route(
            residual, norm, router, None, chosen,
            counters=torch.zeros(1, dtype=torch.int32), renormalise=renormalise, scoring=scoring, offsets=offsets,
            live_tokens=live, counts=counts,
            requests=ExpertRequests(torch.zeros(experts * record.bytes, dtype=torch.uint8), record, recent),
        )  # fmt: skip
        assert lists is not None
        return x, rows, lists, routing.ids, routing.weights

    expected, _, _, wanted_ids, wanted_weights = route(torch.zeros(experts, dtype=torch.int32))
    monkeypatch.setattr(some_rows_router, "is_gpu", lambda _: True)
    monkeypatch.setattr(some_rows_router, "program_bytes", lambda _: 227 << 10)
    monkeypatch.setattr(some_rows_router, "launches_dependents", lambda _: True)
    monkeypatch.setattr(some_rows_router, "_requested_bytes", lambda _: 1 << 20)
    monkeypatch.setattr(some_rows_router, "_kernel", Launched)
    counts = torch.zeros(experts, dtype=torch.int32)
    x, rows, lists, ids, weights = route(counts)
    assert (x == expected).float().mean() > 0.97
    assert (x.float() - expected.float()).abs().max() <= 2**-7 * expected.float().abs().max()
    check_rounded(rows, x)
    used = tokens - 2
    assert (ids[used:] == -1).all()
    assert not weights[used:].any()
    same = ids == wanted_ids  # nearly equal experts may change places
    assert same.float().mean() > 0.95
    torch.testing.assert_close(weights[same], wanted_weights[same], rtol=1e-2, atol=1e-3)
    twin = SortedPairs.of(ids, offsets)
    assert torch.equal(lists.sorted[: used * chosen], twin.sorted[: used * chosen])
    assert torch.equal(lists.starts, twin.starts)
    assert torch.equal(lists.counts, twin.counts)
    uses = torch.bincount(ids[:used].flatten(), minlength=experts).int()
    assert torch.equal(recent, uses)
    assert torch.equal(counts, uses)
