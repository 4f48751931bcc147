"""Weights may multiply the input of an expert instead of its output, as in Llama 4."""

import pytest
import torch
from kernel_types import MakeWeights, RunLayer

from ktqueue.operators import native

WEIGHTED = native.GateFacts("silu", weighted_input=True)


@pytest.mark.parametrize(("quant", "kept"), [("BF16", "int8"), ("Q4_K", "int8"), ("Q8_0", "float32")])
@pytest.mark.parametrize("biased", [False, True])
def test_an_expert_sees_the_weighted_token(
    quant: str, kept: native.ActivationType, biased: bool, isa: str, make_weights: MakeWeights, run_layer: RunLayer
) -> None:
    packed = make_weights(quant, 4, 256, 256, biased=biased)
    plain, weighted = (native.ExpertLayer(packed, gate, activations=kept, isa=isa) for gate in (native.SILU, WEIGHTED))
    for tokens in (1, 40):
        noise = torch.Generator().manual_seed(tokens)
        x, weights = torch.randn(tokens, 256, generator=noise), torch.rand(tokens, 2, generator=noise)
        ids = torch.rand(tokens, 4, generator=noise).topk(2).indices
        ids[-1, 0] = -1
        got = run_layer(weighted, x, ids, weights)
        expected = torch.zeros_like(x)
        for weight, chosen in zip(weights.T, ids.T, strict=True):
            expected += run_layer(plain, x * weight[:, None], chosen[:, None].contiguous(), torch.ones(tokens, 1))
        assert (got - expected).norm() <= 1e-2 * expected.norm()
        assert (got - run_layer(plain, x, ids, weights)).norm() > 0.1 * expected.norm()
