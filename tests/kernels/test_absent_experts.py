"""An expert id of -1 means no expert: the slot adds nothing and changes no bit of any other token."""

import pytest
import torch
from kernel_types import MakeWeights, RunLayer

from ktqueue.operators import native

pytestmark = pytest.mark.usefixtures("batch_invariant")  # tokens alone and in a batch must be equal

TOKENS = (1, 2, 3, 5, 7, 8, 33, 130)


def inputs(tokens: int, hidden: int, experts: int, slots: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.rand(tokens, experts, generator=generator).topk(slots).indices
    weights = torch.rand(tokens, slots, generator=generator)
    return torch.randn(tokens, hidden, generator=generator), ids, weights


@pytest.mark.parametrize("quant", ["F32", "BF16", "Q4_K"])
@pytest.mark.parametrize("tokens", TOKENS)
def test_a_slot_without_an_expert_adds_nothing(
    tokens: int, quant: str, isa: str, make_weights: MakeWeights, run_layer: RunLayer, two_threads: None
) -> None:
    """A token with absent slots equals the same token alone with its remaining experts."""
    layer = native.ExpertLayer(make_weights(quant, 6, 256, 256), isa=isa)
    x, ids, weights = inputs(tokens, 256, 6, 4)
    absent = torch.rand(ids.shape, generator=torch.Generator().manual_seed(9)) < 0.5
    absent[tokens // 2] = True
    out = run_layer(layer, x, ids.masked_fill(absent, -1), weights.masked_fill(absent, torch.nan))
    assert out[tokens // 2].eq(0).all()
    for t in range(0, tokens, 1 + tokens // 16):
        kept = ~absent[t]
        assert torch.equal(run_layer(layer, x[t : t + 1], ids[t, kept][None], weights[t, kept][None])[0], out[t])


def test_other_tokens_keep_their_bits(isa: str, make_weights: MakeWeights, run_layer: RunLayer) -> None:
    layer = native.ExpertLayer(make_weights("Q4_K", 5, 256, 256), isa=isa)
    x, ids, weights = inputs(40, 256, 5, 3)
    whole = run_layer(layer, x, ids, weights)
    gone = torch.arange(40) % 3 == 1
    ids[gone], x[gone] = -1, torch.nan
    out = run_layer(layer, x, ids, weights)
    assert torch.equal(out[~gone], whole[~gone])
    assert out[gone].eq(0).all()


@pytest.mark.parametrize("tokens", [1, 6, 64, 2049])
def test_a_layer_may_use_no_expert_at_all(
    tokens: int, isa: str, make_weights: MakeWeights, run_layer: RunLayer
) -> None:
    layer = native.ExpertLayer(make_weights("Q4_0", 3, 32, 32), isa=isa)
    x, ids, weights = inputs(tokens, 32, 3, 2)
    assert run_layer(layer, x, ids.fill_(-1), weights).eq(0).all()
