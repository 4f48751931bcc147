"""What ktqueue relies on in the pinned transformers. A failure shows what an upgrade would break."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from latent_sizes import LATENT_SIZES
from torch import nn
from transformers.initialization import no_init_weights

MOE: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 32, "head_dim": 32},
    "qwen2_moe": {"num_experts": 8, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 96},
    "mixtral": {"num_local_experts": 8, "intermediate_size": 96, "sliding_window": None},
    "olmoe": {"num_experts": 8, "intermediate_size": 32},
}
COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
}
NAME = "contract_attention"


def _config(model_type: str, **changes: Any) -> Any:
    return transformers.CONFIG_MAPPING[model_type](**{**COMMON, **MOE[model_type], **changes})


def _build(config: Any, attention: str = "eager") -> nn.Module:
    factory: Any = transformers.AutoModelForCausalLM
    model: nn.Module = factory.from_config(config, attn_implementation=attention, dtype=torch.float32)
    return model.eval()


@pytest.fixture
def calls() -> Iterator[list[dict[str, Any]]]:
    """The arguments of each call of a custom attention function."""
    seen: list[dict[str, Any]] = []

    def attend(
        module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **named: Any
    ) -> tuple[torch.Tensor, None]:
        (mask,) = rest
        seen.append({"layer": module.layer_idx, "query": query, "key": key, "value": value, "mask": mask, **named})
        return query.transpose(1, 2), None

    transformers.AttentionInterface.register(NAME, attend)
    yield seen
    del transformers.AttentionInterface._global_mapping[NAME]


def test_transformers_has_the_pinned_version() -> None:
    assert transformers.__version__.startswith("5.17.")


@pytest.mark.parametrize("model_type", list(MOE))
def test_a_custom_attention_gets_the_step_and_no_mask(model_type: str, calls: list[dict[str, Any]]) -> None:
    config = _config(model_type)
    model = _build(config, NAME)
    step = object()
    ids = torch.arange(6)[None]
    positions = torch.tensor([[0, 1, 2, 0, 1, 5]])  # packed rows: positions start again
    with torch.no_grad():
        model(input_ids=ids, position_ids=positions, use_cache=False, step=step)
    head_dim = getattr(config, "head_dim", None) or 16
    assert [call["layer"] for call in calls] == [0, 1]
    for call in calls:
        assert call["step"] is step and call["mask"] is None
        assert call["query"].shape == (1, 4, 6, head_dim)
        assert call["key"].shape == call["value"].shape == (1, 2, 6, head_dim)
        assert call["scaling"] == head_dim**-0.5


@pytest.mark.parametrize("model_type", list(MOE))
def test_logits_to_keep_takes_rows(model_type: str) -> None:
    model = _build(_config(model_type))
    ids = torch.arange(6)[None]
    with torch.no_grad():
        whole = model(input_ids=ids, use_cache=False)
        some = model(input_ids=ids, use_cache=False, logits_to_keep=torch.tensor([1, 5]))
    assert some.logits.shape == (1, 2, 96)
    torch.testing.assert_close(some.logits[0], whole.logits[0, [1, 5]])
    assert whole.past_key_values is None


@pytest.mark.parametrize("model_type", list(MOE))
def test_experts_modules_share_one_call(model_type: str) -> None:
    seen: list[tuple[Any, ...]] = []

    class ExpertsSpy(nn.Module):
        def forward(self, *args: Any) -> torch.Tensor:
            seen.append(args)
            return torch.zeros_like(args[0])

    model = _build(_config(model_type))
    for layer in range(2):
        block: Any = model.get_submodule(f"model.layers.{layer}.mlp")
        assert type(block.experts).__name__.endswith("Experts")
        assert block.experts.get_parameter("down_proj").shape[0] == 8
        assert block.experts.get_parameter("gate_up_proj").dim() == 3
        block.experts = ExpertsSpy()
    with torch.no_grad():
        model(input_ids=torch.arange(6)[None], use_cache=False)
    assert len(seen) == 2
    for hidden, index, weights in seen:
        assert hidden.shape == (6, 64) and index.shape == weights.shape == (6, 2)
        assert index.dtype == torch.int64 and weights.is_floating_point()


@pytest.mark.parametrize("model_type", list(MOE))
def test_a_meta_skeleton_computes_its_own_buffers(model_type: str) -> None:
    whole = _build(_config(model_type))
    with torch.device("meta"), no_init_weights():
        skeleton = _build(_config(model_type))
    assert all(tensor.is_meta for tensor in skeleton.state_dict().values())
    rotary = skeleton.get_submodule("model.rotary_emb")
    left = {name for name, _ in skeleton.named_buffers()} - set(skeleton.state_dict())
    assert left == {"model.rotary_emb.inv_freq", "model.rotary_emb.original_inv_freq"}
    for name, buffer in list(rotary.named_buffers(recurse=False)):
        rotary._buffers[name] = torch.full(buffer.shape, float("nan"))
    skeleton._init_weights(rotary)  # type: ignore[operator]
    torch.testing.assert_close(rotary.inv_freq, whole.get_submodule("model.rotary_emb").inv_freq)


def test_tied_names_are_listed() -> None:
    tied = _build(_config("qwen3_moe", tie_word_embeddings=True))
    assert tied.all_tied_weights_keys == {"lm_head.weight": "model.embed_tokens.weight"}
    assert not _build(_config("qwen3_moe", tie_word_embeddings=False)).all_tied_weights_keys


def test_router_logits_can_be_switched_off_in_the_config() -> None:
    model: Any = _build(_config("qwen3_moe", output_router_logits=True))
    ids = torch.arange(6)[None]
    with torch.no_grad():
        assert model(input_ids=ids).router_logits is not None
        model.config.output_router_logits = False
        assert model(input_ids=ids).router_logits is None


def test_saved_experts_are_one_by_one(tmp_path: Any) -> None:
    from safetensors import safe_open

    _build(_config("qwen3_moe")).save_pretrained(tmp_path)  # type: ignore[operator]
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert "model.layers.0.mlp.experts.7.up_proj.weight" in names
    assert not any("gate_up_proj" in name for name in names)


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3"])
def test_latent_attention_is_called_with_angles_and_the_step(model_type: str) -> None:
    seen: list[dict[str, Any]] = []

    class AttentionSpy(nn.Module):
        def forward(self, hidden_states: torch.Tensor, **named: Any) -> tuple[torch.Tensor, None]:
            seen.append(named)
            return hidden_states, None

    model = _build(transformers.CONFIG_MAPPING[model_type](**{**COMMON, **LATENT_SIZES, "n_group": 1, "topk_group": 1}))
    for layer in range(2):
        attention = model.get_submodule(f"model.layers.{layer}.self_attn")
        assert attention.layer_idx == layer and attention.scaling == 24**-0.5
        assert {name for name, _ in attention.named_parameters()} == {
            "q_proj.weight",
            "kv_a_proj_with_mqa.weight",
            "kv_a_layernorm.weight",
            "kv_b_proj.weight",
            "o_proj.weight",
        }
        model.get_submodule(f"model.layers.{layer}").self_attn = AttentionSpy()
    step = object()
    with torch.no_grad():
        model(input_ids=torch.arange(6)[None], position_ids=torch.arange(6)[None], use_cache=False, step=step)
    assert len(seen) == 2
    angles = torch.outer(torch.arange(6.0), 10_000 ** -(torch.arange(0, 8, 2) / 8))
    for named in seen:
        assert named["step"] is step
        angles_of_the_call = named["position_embeddings"]
        if model_type == "deepseek_v2":
            torch.testing.assert_close(angles_of_the_call, torch.polar(torch.ones(1, 6, 4), angles[None]))
        else:
            torch.testing.assert_close(angles_of_the_call[0], torch.cat([angles, angles], -1)[None].cos())
            torch.testing.assert_close(angles_of_the_call[1], torch.cat([angles, angles], -1)[None].sin())


def test_phimoe_uses_its_short_factors_for_all_lengths() -> None:
    """Microsoft's code and earlier releases of transformers use the long ones, as RotaryByLength does. Once this fails,
    tests can compare Phi-3.5-MoE with transformers as it is."""
    longrope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 4}
    factors = {"short_factor": [1.0] * 8, "long_factor": [9.0] * 8, "short_mscale": 1.0, "long_mscale": 1.0}
    values: dict[str, Any] = {**COMMON, "rope_parameters": {**longrope, **factors}}
    rotary = _build(transformers.CONFIG_MAPPING["phimoe"](**values)).get_submodule("model.rotary_emb")
    (short, _), (long, _) = (rotary(torch.empty(0), torch.arange(length)[None]) for length in (4, 8))
    assert torch.equal(short, long[:, :4])
