"""The guess which experts the next layer will use, beside transformers' own modules: the next layer's norm and router,
applied to the residual before this layer's experts are added."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from decoder_families import SEQUENCES, Cache, make_model, make_planner_for

from ktqueue.operators.gpu.decoder import GpuDecoder
from ktqueue.operators.gpu.handoff.handoff import Handoff


@pytest.fixture
def predicted(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Where each hand-off's guess is left."""
    noted: list[torch.Tensor] = []
    buffers = Handoff.buffers

    def note(self: Handoff, *arguments: Any, **options: Any) -> Any:
        made = buffers(self, *arguments, **options)
        noted.append(made.predicted)
        return made

    monkeypatch.setattr(Handoff, "buffers", note)
    return noted


def guesses(model: Any) -> torch.Tensor:
    """[tokens, experts_per_token]: for the last token of each sequence, by the definition, of a model's last layer."""
    first, second = model.model.layers[-2:]
    residuals: list[torch.Tensor] = []
    hook = first.post_attention_layernorm.register_forward_pre_hook(lambda _, given: residuals.append(given[0][0, -1]))
    with torch.no_grad():
        for prompt in SEQUENCES.values():
            model(torch.tensor([prompt]))
        hook.remove()
        ids: torch.Tensor = second.mlp.gate(second.post_attention_layernorm(torch.stack(residuals)))[2]
        return ids


def decode(decoder: GpuDecoder) -> None:
    """All sequences but for their last tokens, then these, one row each."""
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
def test_is_the_next_router_s_word_on_this_residual(
    family: str, layers: int, make_decoder: Callable[..., Any], predicted: list[torch.Tensor]
) -> None:
    model = make_model(family, num_hidden_layers=layers)
    decode(make_decoder(model))
    assert [set(row) for row in predicted[-2].tolist()] == [set(row) for row in guesses(model).tolist()]


def test_names_no_expert_that_the_gpu_has(make_decoder: Callable[..., Any], predicted: list[torch.Tensor]) -> None:
    model = make_model("qwen3_moe", num_hidden_layers=2)
    record = make_decoder(model)._routed[0].record.bytes
    decoder = make_decoder(model, expert_memory_bytes=8 * record)
    decode(decoder)
    on_gpu = (decoder._experts._pool.offsets[1] >= 0).cpu()
    assert on_gpu.sum() == 4
    expected = guesses(model)
    expected[on_gpu[expected]] = -1
    assert [sorted(row) for row in predicted[-2].tolist()] == [sorted(row) for row in expected.tolist()]
    assert (expected < 0).any() and (expected >= 0).any()


def test_leaves_out_what_comes_to_the_gpu(make_decoder: Callable[..., Any], predicted: list[torch.Tensor]) -> None:
    model = make_model("qwen3_moe", num_hidden_layers=2)
    decode(make_decoder(model, expert_streaming="auto", fetched_shares=(0.5, 0.5)))
    expected = guesses(model)
    used = torch.unique(expected)
    expected[torch.isin(expected, used[: len(used) // 2])] = -1  # the lowest numbers: see divide
    assert [sorted(row) for row in predicted[-2].tolist()] == [sorted(row) for row in expected.tolist()]


def test_is_made_where_each_row_has_one_token_and_it_is_asked_for(
    make_decoder: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[bool] = []
    request = Handoff.request

    def note(self: Handoff, *arguments: Any, **options: Any) -> None:
        told.append(options["predicts"])
        request(self, *arguments, **options)

    monkeypatch.setattr(Handoff, "request", note)
    model = make_model("qwen3_moe", num_hidden_layers=3)
    decode(make_decoder(model))
    assert told == 3 * [False] + [True, True, False]
    told.clear()
    decode(make_decoder(model, expert_prefetch=False))
    assert told == 6 * [False]
    told.clear()
    decode(make_decoder(make_model("qwen3_moe with dense layers", num_hidden_layers=4)))  # the second is dense
    assert told == 3 * [False] + [False, True, False]
