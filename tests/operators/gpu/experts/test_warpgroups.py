"""What is compiled and run at start for the warpgroups of a model's layers."""

from typing import Any, cast

import pytest
import torch

from ktqueue.operators.gpu.experts import warpgroups
from ktqueue.operators.gpu.experts.step import RoutedLayer
from ktqueue.operators.gpu.kernels import expert_products, expert_warpgroups
from ktqueue.operators.gpu.kernels.expert_warpgroups import NARROW, WIDE, WarpgroupKernel, kernel_for
from ktqueue.operators.gpu.kernels.panel_layout import ExpertRecord
from ktqueue.operators.gpu.settings import Trials
from ktqueue.operators.native import SILU, ExpertLayer


@pytest.mark.parametrize(
    ("max_tokens", "kernels"), [(39, set()), (40, {NARROW}), (199, {NARROW}), (200, {NARROW, WIDE})]
)
def test_kernels_of_the_longest_step_are_compiled_and_run(
    max_tokens: int, kernels: set[WarpgroupKernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of both products are compiled before any runs, also for a longest step that is no power of two."""
    record, packed = ExpertRecord("Q4_K", "Q4_K", "Q6_K", 256, 512), cast("ExpertLayer", None)
    layer = RoutedLayer(
        packed=packed, record=record, experts=4, experts_per_token=2, renormalise=True, gate=SILU, exact=True
    )
    compiled: set[tuple[WarpgroupKernel, str]] = set()
    run: set[WarpgroupKernel] = set()
    copied: set[torch.dtype | None] = set()

    def compile_products(products: Any) -> None:
        assert not run
        compiled.update((kernel, facts.quant) for kernel, facts in products)

    monkeypatch.setattr(warpgroups, "is_gpu", lambda _: True)
    monkeypatch.setattr(expert_warpgroups, "can_multiply", lambda *_: True)
    monkeypatch.setattr(expert_warpgroups, "compile_products", compile_products)
    monkeypatch.setattr(expert_warpgroups, "experts", lambda pairs, *_: run.add(kernel_for(pairs.ids.numel(), 4)))
    monkeypatch.setattr(expert_products, "experts", lambda *_, **__: None)

    def add_rms_norm(x: torch.Tensor, *_: Any, copy: torch.Tensor | None, ordered: torch.Tensor, **__: Any) -> None:
        assert ordered.shape == x.shape and ordered.dtype == x.dtype
        copied.add(None if copy is None else copy.dtype)

    monkeypatch.setattr(warpgroups, "add_rms_norm", add_rms_norm)
    pool = torch.zeros(record.bytes, dtype=torch.uint8)
    chosen = warpgroups.prepare_warpgroups([layer, layer], pool, torch.bfloat16, max_tokens, Trials())
    assert chosen == {0, 1}
    assert run == kernels
    assert copied == ({None, torch.float32} if kernels else set())
    assert compiled == {(kernel, quant) for kernel in kernels for quant in ("Q4_K", "Q6_K")}
