"""The choice of a share from measured times, and the routing with which they are. The measurement needs a GPU."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ktqueue.operators.gpu.experts.probes import fastest, likely_logits


@pytest.mark.parametrize(
    ("relative", "share"),
    [
        ({0.0: 1.0, 0.25: 0.85, 0.5: 1.6}, 0.25),
        ({0.0: 1.0, 0.125: 0.98, 0.25: 1.1}, 0.0),
        ({0.0: 1.0, 0.125: 0.94, 0.1875: 0.93, 0.25: 1.1}, 0.1875),
    ],
)
def test_the_fastest_share_is_chosen_if_it_gains_enough(relative: dict[float, float], share: float) -> None:
    assert fastest(relative) == share


@pytest.mark.parametrize(
    ("experts", "slots", "share"), [(128, 64, 1 / 8), (128, 32, 27 / 64), (128, 0, 1.0), (8, 1, 0.875), (8, 8, 0.0)]
)
def test_routing_uses_absent_experts_seldom(experts: int, slots: int, share: float) -> None:
    layer: Any = SimpleNamespace(experts=experts, experts_per_token=8)
    logits = likely_logits(layer, slots, 2000, torch.Generator().manual_seed(1))
    chosen = logits.topk(8, -1).indices
    assert (chosen >= slots).float().mean().item() == pytest.approx(share, abs=0.01)
    assert len(set(chosen.flatten().tolist())) == experts
