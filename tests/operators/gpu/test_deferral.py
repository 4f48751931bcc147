"""Deferred experts in GpuDecoder beside their definition, applied to transformers' own modules.

The definition: in a step in which each row has one token, a token's experts of least weight, `deferred` of them, are
not added by their own layer if the CPU computes them, but by the next layer with routed experts, beside that layer's
own. The last such layer defers nothing, and neither does a step that reads a prompt.
"""

from types import MethodType
from typing import Any

import pytest
import torch
from decoder_families import SEQUENCES, Cache, make_model, make_planner_for

from ktqueue.operators.gpu.decoder import GpuDecoder

PROMPTS = {"s0": 1, "s1": 4, "s2": 22}  # tokens that are read in one step; those behind them one by one
FAMILIES = {
    "qwen3_moe": {"num_experts_per_tok": 4, "num_hidden_layers": 4},
    "qwen2_moe with dense layers": {"num_experts_per_tok": 4, "num_hidden_layers": 4, "mlp_only_layers": [0, 2]},
    "olmoe": {},
}


def defer(model: Any, deferred: int, first: int, on_gpu: list[torch.Tensor]) -> None:
    """Let the model's layers defer, for tokens from `first` on. on_gpu: bool [experts] of each routed layer."""
    routed = [layer.mlp for layer in model.model.layers if hasattr(layer.mlp, "experts")]
    late: list[torch.Tensor] = []

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        index, x = routed.index(self), hidden_states[0]
        _, weights, ids = self.gate(x)
        order = weights.argsort(dim=-1, descending=True)
        ids, weights = ids.gather(1, order), weights.gather(1, order)
        is_late = torch.zeros_like(ids, dtype=torch.bool)
        if self is not routed[-1]:
            is_late[first:, ids.shape[1] - deferred :] = True
        is_late &= ~on_gpu[index][ids]
        out = self.experts(x, ids, weights.masked_fill(is_late, 0))
        if hasattr(self, "shared_expert"):
            out = out + torch.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)
        if index > 0:
            out = out + late.pop()
        late.append(self.experts(x, ids, weights.masked_fill(~is_late, 0)))
        return out[None]

    for one in routed:
        one.forward = MethodType(forward, one)


def defined(family: str, deferred: int, on_gpu: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """[tokens, vocab] logits of each sequence, its prompt read as PROMPTS says."""
    found = {}
    for name, ids in SEQUENCES.items():
        model = make_model(family, **FAMILIES[family])
        first = 0 if PROMPTS[name] == 1 else PROMPTS[name]  # a prompt of one token is a row like any other
        defer(model, deferred, first, on_gpu)
        with torch.no_grad():
            found[name] = model(torch.tensor([ids])).logits[0]
    return found


def fed(decoder: GpuDecoder) -> dict[str, torch.Tensor]:
    """The same of the decoder: each prompt alone, then all sequences together, token by token."""
    cache = Cache(decoder, device=decoder.device, planner=make_planner_for)
    found: dict[str, list[torch.Tensor]] = {}
    with torch.inference_mode():
        for name, length in PROMPTS.items():
            found[name] = [cache.step({name: SEQUENCES[name][:length]})]
        while rows := {
            name: ids[cache.fed[name] :][:1] for name, ids in SEQUENCES.items() if cache.fed[name] < len(ids)
        }:
            for name, logits in zip(rows, cache.step(rows), strict=True):
                found[name].append(logits[None])
    decoder.after_step()
    return {name: torch.cat(parts) for name, parts in found.items()}


def distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    return max(float((found[name] - one).abs().max() / one.abs().max()) for name, one in expected.items())


def places(decoder: GpuDecoder) -> list[torch.Tensor]:
    """Which experts are on the GPU, layer by layer."""
    resident = decoder._experts._resident
    return [resident.places(layer).gate_up.cpu() >= 0 for layer in range(len(decoder._routed))]


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("family", "deferred"), [(one, 1) for one in FAMILIES] + [("qwen3_moe", 3), ("olmoe", 2)])
def test_equals_its_definition(family, deferred, share, make_decoder):
    """`share` of the experts is on the GPU."""
    model = make_model(family, **FAMILIES[family])
    plain = make_decoder(model)
    memory = int(share * sum(layer.record.bytes * layer.experts for layer in plain._routed))
    decoder = make_decoder(model, deferred_experts=deferred, expert_memory_bytes=memory)
    expected = defined(family, deferred, places(decoder))
    for _ in range(2):  # nothing is left of what was before
        assert distance(fed(decoder), expected) < 1e-5
    assert (distance(fed(plain), expected) < 1e-5) == (share == 1.0), "the definition does nothing"


def test_what_comes_to_a_step_is_not_deferred(make_decoder):
    model = make_model("qwen3_moe", **FAMILIES["qwen3_moe"])
    settings = {"deferred_experts": 2, "expert_streaming": "on"}
    plain = make_decoder(model)
    expected = fed(plain)
    assert distance(fed(make_decoder(model, **settings, fetched_share=1.0)), expected) < 1e-5
    assert distance(fed(make_decoder(model, **settings, fetched_share=0.0)), expected) > 1e-3
    assert distance(fed(make_decoder(model, **settings, fetched_share=0.5)), expected) > 1e-3


def test_layers_take_turns_with_the_memory_of_their_rows(make_decoder):
    """The CPU still reads those of one while the next one's are written."""
    decoder = make_decoder(make_model("qwen3_moe", **FAMILIES["qwen3_moe"]), deferred_experts=2)
    for decodes in (True, False):
        step = decoder._experts.step(1, 1, decodes=decodes, captured=False)
        x = [step.buffers(layer, 1).x.data_ptr() for layer in range(4)]
        assert x[0] == x[2] and x[1] == x[3] and (x[0] != x[1]) == decodes


def test_a_model_of_one_routed_layer_defers_nothing(make_decoder):
    model = make_model("qwen3_moe", num_hidden_layers=1)
    assert distance(fed(make_decoder(model, deferred_experts=1)), fed(make_decoder(model))) < 1e-6


def test_steps_that_read_a_prompt_or_do_not_score_a_row_defer_nothing(make_decoder, device):
    model = make_model("qwen3_moe", **FAMILIES["qwen3_moe"])
    caches = [Cache(make_decoder(model, deferred_experts=d), device=device, planner=make_planner_for) for d in (0, 3)]
    steps: list[tuple[dict[str, list[int]], list[int] | None]] = [
        ({"a": [3, 4, 5], "b": [9]}, None),
        ({"a": [6], "b": [7, 8]}, None),
        ({"a": [6], "b": [7]}, [1]),
        ({"a": [6], "b": [7]}, []),
        ({"a": [1], "b": [2, 3]}, None),
    ]
    with torch.inference_mode():
        for chunks, scored in steps:
            plain, other = (cache.step(chunks, scored) for cache in caches)
            torch.testing.assert_close(other, plain, atol=1e-5, rtol=1e-5)
        plain, other = (cache.step({"a": [1], "b": [2]}) for cache in caches)
    assert (other - plain).abs().max() > 1e-3


def test_long_decode_steps_defer_instead_of_streaming(make_decoder, device):
    """As they do where they are captured, and so do not stream."""
    model = make_model("qwen3_moe", **FAMILIES["qwen3_moe"])
    streaming = {"expert_streaming": "on", "fetched_share": 0.0, "streaming_tokens": 8}
    found = []
    for settings in (streaming, {}):
        cache = Cache(make_decoder(model, deferred_experts=2, **settings), device=device, planner=make_planner_for)
        with torch.inference_mode():
            found.append(cache.step({str(row): [row] for row in range(12)}))
    torch.testing.assert_close(*found)


def test_more_than_a_token_has_are_refused(make_decoder):
    with pytest.raises(ValueError, match="deferred experts must be from 0 to 1, got 2"):
        make_decoder(make_model("qwen3_moe"), deferred_experts=2)
