"""Kernels of GpuDecoder that depend on the length of a step: fewer and earlier launches if it is short, decoded experts
or warpgroups if it is long."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from decoder_families import Cache, make_model, make_planner_for

from ktqueue.operators.gpu import decoder as decoder_module
from ktqueue.operators.gpu.experts import memory as memory_module
from ktqueue.operators.gpu.experts import step as step_module
from ktqueue.operators.gpu.experts.step import StepExperts
from ktqueue.operators.gpu.kernels import decoded_experts, expert_warpgroups
from ktqueue.operators.gpu.kernels.expert_products import experts
from ktqueue.operators.gpu.kernels.expert_tiles import TILES
from ktqueue.operators.gpu.kernels.operation import launch_options

from .test_decoder import assert_close, fed, record_bytes

PLACES = [  # shares of the experts in slots, and of the others that are streamed: one family has them all
    *(("qwen3_moe", *shares) for shares in ((0.0, 0.5), (0.0, 1.0), (0.5, 0.5), (0.5, 1.0), (1.0, 0.5))),
    *itertools.product(["qwen2_moe with dense layers", "deepseek_v3", "llama4", "gpt_oss"], [0.5], [0.5]),
]


@pytest.mark.parametrize(("family", "share", "streamed"), PLACES)
def test_decoded_experts_change_nothing(
    family: str, share: float, streamed: float, make_decoder: Callable[..., Any], decoded_pairs: list[int]
) -> None:
    """Steps of eight tokens or more decode experts, those in slots and those that are streamed. All others do not."""
    model = make_model(family)
    plain = make_decoder(model, "Q8_0")
    expected = fed(plain)
    decoder = make_decoder(
        model,
        "Q8_0",
        decode_experts_from=8,
        expert_memory_bytes=int(share * record_bytes(plain)),
        expert_streaming="on",
        streamed_share=streamed,
        streaming_tokens=8,
    )
    if torch.device(decoder.device).type == "cuda":
        pytest.skip("torch's grouped product takes no float32 on a GPU")
    assert_close(fed(decoder), expected, 1e-5)
    assert decoded_pairs and min(decoded_pairs) >= 8
    assert sum(decoder.device_bytes().values()) > sum(plain.device_bytes().values())


@pytest.mark.parametrize(("family", "share", "streamed"), PLACES)
def test_warpgroups_change_nothing(
    family: str, share: float, streamed: float, make_decoder: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps with two pairs of an expert or more multiply by warpgroups, and none decodes experts. CPU tensors have the
    twin here, and a GPU has the kernel in test_decoder_cuda.py."""
    model = make_model(family)
    plain = make_decoder(model, "Q8_0")
    if plain.device != "cpu":
        pytest.skip("these experts are too small for the kernel")
    expected = fed(plain)
    monkeypatch.setattr(expert_warpgroups, "can_multiply", lambda *_: True)
    monkeypatch.setattr(expert_warpgroups, "LEAST_PAIRS", 2)
    decoder = make_decoder(
        model,
        "Q8_0",
        decode_experts_from=1,
        expert_memory_bytes=int(share * record_bytes(plain)),
        expert_streaming="on",
        streamed_share=streamed,
        streaming_tokens=8,
    )
    pairs: list[float] = []
    compute = expert_warpgroups.experts

    def noted(pairs_of_step: Any, *rest: Any) -> torch.Tensor:
        pairs.append(pairs_of_step.ids.numel() / pairs_of_step.offsets.numel())
        return compute(pairs_of_step, *rest)

    monkeypatch.setattr(expert_warpgroups, "experts", noted)
    monkeypatch.setattr(decoded_experts, "experts", None)
    assert_close(fed(decoder), expected, 1e-5)
    assert pairs and min(pairs) >= 2


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_rounding_beside_the_router_changes_no_bit(
    share: float, make_decoder: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of few tokens round the experts' input in the router's launch, if all experts are on the GPU."""
    model = make_model("qwen3_moe").to(torch.bfloat16)
    memory = int(share * record_bytes(make_decoder(model, "Q8_0")))
    decoder = make_decoder(model, "Q8_0", activations="int8", expert_memory_bytes=memory)
    given: set[tuple[bool, bool]] = set()

    def noted(pairs: Any, *rest: Any, **options: Any) -> torch.Tensor:
        given.add((pairs.ids.numel() <= TILES.own_limit(pairs.offsets.numel()), options["rows"] is not None))
        return experts(pairs, *rest, **options)

    monkeypatch.setattr(step_module, "experts", noted)
    found = fed(decoder)
    assert given == {(True, share == 1), (False, False)}
    monkeypatch.setattr(StepExperts, "_rows_to_quantise", lambda *_: None)
    expected = fed(decoder)
    assert (True, False) in given
    if decoder.device == "cpu" or share == 1:
        assert all(torch.equal(found[name], logits) for name, logits in expected.items())


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_short_captured_steps_are_launched_early(
    share: float, make_decoder: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps with prompts are not, nor those of more than EARLY_TOKENS."""
    model = make_model("qwen3_moe")
    memory = int(share * record_bytes(make_decoder(model, "Q8_0")))
    asked: list[dict[str, bool]] = []

    def noted(*arguments: Any, **options: Any) -> StepExperts:
        asked.append(launch_options())
        return StepExperts(*arguments, **options)

    monkeypatch.setattr(memory_module, "StepExperts", noted)
    monkeypatch.setattr(decoder_module, "launches_dependents", lambda _: True)
    monkeypatch.setattr(decoder_module, "EARLY_TOKENS", 16)
    decoder = make_decoder(model, "Q8_0", expert_memory_bytes=memory)
    cache = Cache(decoder, device=decoder.device, planner=make_planner_for)
    asked.clear()
    with torch.inference_mode():
        for rows, live in ((16, 16), (17, 17), (16, None)):
            cache.step({f"row {row}": [row] for row in range(rows)}, live_tokens=live)
        cache.step({"a prompt": [1, 2, 3]}, scored=[2], live_tokens=3)
    late, early = {"WAITS": False}, {"WAITS": True, "launch_pdl": True}
    assert asked == [early, late, late, late]
