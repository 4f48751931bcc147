"""The predicted experts equal those of transformers' modules: the next layer's norm and router, applied to the residual
before this layer's experts are added."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from decoder_families import SEQUENCES, Cache, make_model, make_planner_for

from ktqueue.operators.gpu.decoder import GpuDecoder
from ktqueue.operators.gpu.handoff.handoff import Handoff


@pytest.fixture
def predicted(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The `predicted` buffers of all tasks."""
    noted: list[torch.Tensor] = []
    buffers = Handoff.buffers

    def note(self: Handoff, *arguments: Any, **options: Any) -> Any:
        made = buffers(self, *arguments, **options)
        noted.append(made.predicted)
        return made

    monkeypatch.setattr(Handoff, "buffers", note)
    return noted


def guesses(model: Any) -> torch.Tensor:
    """The prediction for the last layer by its definition: [sequences, experts_per_token], for the last tokens."""
    first, second = model.model.layers[-2:]
    residuals: list[torch.Tensor] = []
    hook = first.post_attention_layernorm.register_forward_pre_hook(
        lambda _, inputs: residuals.append(inputs[0][0, -1])
    )
    with torch.no_grad():
        for prompt in SEQUENCES.values():
            model(torch.tensor([prompt]))
        hook.remove()
        ids: torch.Tensor = second.mlp.gate(second.post_attention_layernorm(torch.stack(residuals)))[2]
        return ids


def decode(decoder: GpuDecoder) -> None:
    """Compute all sequences without their last tokens, then the last tokens as a decode step."""
    cache = Cache(decoder, device=decoder.device, planner=make_planner_for)
    with torch.inference_mode():
        cache.step({name: ids[:-1] for name, ids in SEQUENCES.items() if len(ids) > 1})
        cache.step({name: ids[-1:] for name, ids in SEQUENCES.items()})
    if decoder.device == "cuda":
        torch.cuda.synchronize()


@pytest.mark.parametrize(
    ("family", "layers"),
    [("qwen3_moe", 2), ("qwen2_moe", 2), ("olmoe", 2), ("deepseek_v2 with groups", 3), ("deepseek_v3", 3)],
)
def test_the_next_router_is_applied_to_this_residual(
    family: str, layers: int, make_decoder: Callable[..., Any], predicted: list[torch.Tensor]
) -> None:
    model = make_model(family, num_hidden_layers=layers)
    decode(make_decoder(model))
    assert [set(row) for row in predicted[-2].tolist()] == [set(row) for row in guesses(model).tolist()]


def test_experts_in_gpu_memory_are_not_predicted(
    make_decoder: Callable[..., Any], predicted: list[torch.Tensor]
) -> None:
    model = make_model("qwen3_moe", num_hidden_layers=2)
    all_experts = make_decoder(model).statistics()
    record = int(all_experts["expert_bytes"] / all_experts["experts"])
    decoder = make_decoder(model, expert_memory_bytes=8 * record)
    decode(decoder)
    on_gpu = (decoder._experts._pool.offsets[1] >= 0).cpu()
    assert on_gpu.sum() == 4
    expected = guesses(model)
    expected[on_gpu[expected]] = -1
    assert [sorted(row) for row in predicted[-2].tolist()] == [sorted(row) for row in expected.tolist()]
    assert (expected < 0).any() and (expected >= 0).any()


def test_fetched_experts_are_not_predicted(make_decoder: Callable[..., Any], predicted: list[torch.Tensor]) -> None:
    model = make_model("qwen3_moe", num_hidden_layers=2)
    decode(make_decoder(model, expert_streaming="auto", fetched_shares=(0.5, 0.5)))
    expected = guesses(model)
    used = torch.unique(expected)
    expected[torch.isin(expected, used[: len(used) // 2])] = -1  # the lowest numbers: see divide
    assert [sorted(row) for row in predicted[-2].tolist()] == [sorted(row) for row in expected.tolist()]


def test_only_decode_steps_predict_and_only_if_enabled(
    make_decoder: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    predicts: list[bool] = []
    request = Handoff.request

    def note(self: Handoff, *arguments: Any, **options: Any) -> None:
        predicts.append(options["predicts"])
        request(self, *arguments, **options)

    monkeypatch.setattr(Handoff, "request", note)
    model = make_model("qwen3_moe", num_hidden_layers=3)
    decode(make_decoder(model))
    assert predicts == 3 * [False] + [True, True, False]
    predicts.clear()
    decode(make_decoder(model, expert_prefetch=False))
    assert predicts == 6 * [False]
    predicts.clear()
    decode(make_decoder(make_model("qwen3_moe with dense layers", num_hidden_layers=4)))  # the second is dense
    assert predicts == 3 * [False] + [False, True, False]
