"""GGUF files of the newer families, with metadata as llama.cpp's converter writes it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ktqueue.core.errors import CheckpointError
from ktqueue.families.table import family_of_type
from ktqueue.loading.checkpoint import Checkpoint, CheckpointTensor
from ktqueue.loading.convert import convert
from ktqueue.loading.gguf.checkpoint import build_checkpoint
from ktqueue.loading.gguf.families import family_of_model_type
from ktqueue.loading.gguf.gemma import gemma_config
from ktqueue.loading.gguf.header import ModelMetadata
from ktqueue.loading.gguf.metadata import config_from_metadata
from ktqueue.loading.load import load_model

LLAMA4 = family_of_model_type("llama4_text", "file")
Parts = tuple[dict[str, Any], dict[str, CheckpointTensor]]


def built(parts: Parts, **changes: Any) -> Checkpoint:
    metadata, tensors = parts
    return build_checkpoint("file", {**metadata, **changes}, tensors)


def test_layers_that_predict_further_tokens_are_left_out(parts_of: Callable[[str], Parts]) -> None:
    parts = parts_of("glm4_moe")
    parts[1]["blk.2.nextn.eh_proj.weight"] = parts[1]["blk.1.attn_q.weight"]
    changes = {"glm4moe.block_count": 3, "glm4moe.nextn_predict_layers": 1}
    checkpoint = built(parts, **changes)
    assert checkpoint.config()["num_hidden_layers"] == 2
    assert not any(".2." in name or "nextn" in name for name in checkpoint.names())
    with pytest.raises(CheckpointError, match=r"nextn_predict_layers is 3, which is not below glm4moe\.block_count"):
        built(parts_of("glm4_moe"), **{**changes, "glm4moe.nextn_predict_layers": 3})


def test_what_a_file_lacks_is_off(parts_of: Callable[[str], Parts]) -> None:
    """GLM-4.5-Air has no norms of query and key, and other models have no biases. llama.cpp's defaults are zero."""
    metadata, tensors = parts_of("glm4_moe")
    full = built((metadata, dict(tensors))).config()
    assert full["use_qk_norm"] and full["attention_bias"] and full["norm_topk_prob"]
    assert (full["routed_scaling_factor"], full["n_group"], full["topk_group"]) == (1.5, 4, 2)
    assert full["rope_parameters"]["partial_rotary_factor"] == 0.5
    for name in [name for name in tensors if ("_norm" in name and "attn_q" in name) or "attn_k_norm" in name]:
        del tensors[name]
    for name in [name for name in tensors if name.endswith(("attn_q.bias", "attn_k.bias", "attn_v.bias"))]:
        del tensors[name]
    for key in ("weights_norm", "weights_scale", "group_count", "group_used_count"):
        del metadata[f"glm4moe.expert_{key}"]
    config = built((metadata, tensors)).config()
    assert not (config["use_qk_norm"] or config["attention_bias"] or config["norm_topk_prob"])
    assert (config["routed_scaling_factor"], config["n_group"], config["topk_group"]) == (1.0, 1, 1)


def test_files_of_mimo_list_kinds_and_heads_of_layers(parts_of: Callable[[str], Parts]) -> None:
    """llama.cpp's converter writes the kinds as 0 and 1. Older files have no scale of values."""
    metadata, tensors = parts_of("mimo_v2_flash")
    pattern, heads = "mimo2.attention.sliding_window_pattern", "mimo2.attention.head_count_kv"
    del metadata["mimo2.attention.value_scale"]
    config = built((metadata, dict(tensors)), **{pattern: [0, 1]}).config()
    assert (config["layer_types"], config["num_key_value_heads"]) == (["full_attention", "sliding_attention"], 1)
    assert (config["head_dim"], config["v_head_dim"]) == (24, 16) and "attention_value_scale" not in config
    assert int(24 * config["rope_parameters"]["full_attention"]["partial_rotary_factor"]) == 8
    for key, wrong, message in (
        (pattern, [0], f"{pattern} must be 0 or 1 for each of 2 layers"),
        (heads, 2, f"{heads} must have a number for each of 2 layers"),
        (heads, [1, 1], rf"{heads} must be 1, and twice that in layers with a window, got \[1, 1\]"),
    ):
        with pytest.raises(CheckpointError, match=message):
            built((metadata, dict(tensors)), **{key: wrong})


def test_files_of_laguna_list_the_query_heads_of_layers(parts_of: Callable[[str], Parts]) -> None:
    """llama.cpp's converter names no kinds of layers. The factor of YaRN that it writes is the usual one."""
    metadata, tensors = parts_of("laguna")
    prefix = "laguna.attention"
    del metadata[f"{prefix}.sliding_window_pattern"]
    yarn = {"laguna.rope.scaling.yarn_attn_factor": 1.138629}
    config = built((metadata, dict(tensors)), **yarn).config()
    assert config["layer_types"] == ["full_attention", "sliding_attention"] and config["gating"] == "per-head"
    assert (config["num_attention_heads"], config["num_attention_heads_per_layer"]) == (4, [4, 6])
    full, local = (config["rope_parameters"][kind] for kind in config["layer_types"])
    assert (full["rope_type"], full["factor"], full["partial_rotary_factor"]) == ("yarn", 4.0, 0.5)
    assert (local["rope_theta"], local["partial_rotary_factor"]) == (1e3, 1.0)
    config = built((metadata, dict(tensors)), **{f"{prefix}.sliding_window": 0}).config()
    assert config["layer_types"] == ["full_attention"] * 2 and "sliding_window" not in config
    for key, wrong, message in (
        (f"{prefix}.head_count", [4], "has numbers for 1 of 2 layers"),
        (f"{prefix}.head_count", [4, 0], "must be a positive number, got 0"),
        ("laguna.rope.scaling.yarn_attn_factor", 1.5, "1.5 is not supported"),
        ("laguna.expert_weights_norm", False, "must be True, got False"),
    ):
        with pytest.raises(CheckpointError, match=f"{key} {message}"):
            built((metadata, dict(tensors)), **{key: wrong})


def test_gpt_oss_scores_experts_by_the_softmax_of_the_chosen(parts_of: Callable[[str], Parts]) -> None:
    config = built(parts_of("gpt_oss"), **{"gpt-oss.expert_gating_func": 3}).config()
    assert config["rope_parameters"]["truncate"] is False
    assert config["sliding_window"] == 7
    with pytest.raises(CheckpointError, match=r"qwen3moe\.expert_gating_func 3 is not supported"):
        built(parts_of("qwen3_moe"), **{"qwen3moe.expert_gating_func": 3})


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("glm4_moe", {"glm4moe.expert_weights_norm": 1}, "expert_weights_norm must be true or false, got 1"),
        ("glm4_moe", {"glm4moe.rope.dimension_count": 64}, "must be the width of a head, 32, got 64"),
        ("glm4_moe", {"glm4moe.leading_dense_block_count": -1}, "leading_dense_block_count must be a positive number"),
        ("qwen3_moe", {"qwen3moe.rope.dimension_count": 16}, "must be the width of a head, 32, got 16"),
        ("olmoe", {"olmoe.embedding_length": 3}, "embedding_length must be at least the 4 heads, got 3"),
    ],
)
def test_wrong_metadata_is_refused(
    model_type: str, changes: dict[str, Any], message: str, parts_of: Callable[[str], Parts]
) -> None:
    with pytest.raises(CheckpointError, match=message):
        built(parts_of(model_type), **changes)


def test_a_file_may_list_the_layers_with_windows(parts_of: Callable[[str], Parts]) -> None:
    """Layers that predict further tokens may be in the list too."""
    key = "exaone-moe.attention.sliding_window_pattern"
    parts = parts_of("exaone_moe")
    assert parts[0][key] == [False, True]
    for listed in ([True, False], [True, False, True]):
        config = built((parts[0], dict(parts[1])), **{key: listed}).config()
        assert (config["layer_types"], config["sliding_window"]) == (["sliding_attention", "full_attention"], 7)
    for wrong in ([True], [1, 0], 2, None):
        with pytest.raises(CheckpointError, match="sliding_window_pattern must be true or false for each of 2 layers"):
            built((parts[0], dict(parts[1])), **{key: wrong})


def test_llama4_files_imply_chunks_and_norms(
    parts_of: Callable[[str], Parts], make_model: Callable[..., Path], tmp_path: Path
) -> None:
    """llama.cpp ignores the size of chunks in a file, and gives no norms to models with 128 experts."""
    parts = parts_of("llama4_text")
    config = built((parts[0], dict(parts[1]))).config()
    assert (config["attention_chunk_size"], config["floor_scale"], config["use_qk_norm"]) == (8192, 8192, True)
    assert not config_from_metadata(LLAMA4, {**parts[0], "llama4.expert_count": 128}, "file")["use_qk_norm"]
    for key, size in (("attention.sliding_window", 0), ("attention.chunk_size", 4096)):
        with pytest.raises(CheckpointError, match=rf"llama4\.{key} must be 8192, got {size}"):
            built((parts[0], dict(parts[1])), **{f"llama4.{key}": size})
    for name, value in {
        "attention_chunk_size": 4096,
        "use_qk_norm": False,
        "no_rope_layers": [1, 1, 0, 1],
        "layer_types": ["full_attention"] * 4,
        "moe_layers": [0],
    }.items():
        with pytest.raises(CheckpointError, match=rf"{name} is .*; GGUF's llama4 implies "):
            convert(make_model("llama4_text", **{name: value}), tmp_path / "file.gguf", experts="f32")


def test_biases_of_experts_must_be_whole(parts_of: Callable[[str], Parts]) -> None:
    parts = parts_of("gpt_oss")
    bias = parts[1].pop("blk.0.ffn_up_exps.bias")
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.mlp\.experts has 2 of 3 biases"):
        built(parts)
    parts = parts_of("gpt_oss")
    parts[1]["blk.0.ffn_up_exps.bias"] = CheckpointTensor(bias.name, bias.quant, (4, 64), bias.data)
    with pytest.raises(CheckpointError, match=r"a bias is \[4, 64\], not \[8, 32\]"):
        built(parts)
    decoded = built(parts_of("gpt_oss")).decode("model.layers.0.mlp.experts.gate_up_proj_bias", torch.float32)
    assert torch.equal(decoded[:, 1::2], bias.decode(torch.float32))


def test_windows_that_gguf_does_not_imply_are_not_written(make_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_model("gpt_oss", layer_types=["full_attention", "full_attention"])
    with pytest.raises(CheckpointError, match="GGUF's gpt-oss cannot express layer_types"):
        convert(folder, tmp_path / "file.gguf", experts="f32", dense="f32")


@pytest.mark.parametrize(
    "model_type",
    [
        "granite",
        "ernie4_5",
        "seed_oss",
        "hunyuan_v1_dense",
        "glm4_moe_lite",
        "deepseek_v32",
        "glm_moe_dsa",
        "mistral4",
        "ministral3",
    ],
)
def test_logits_of_files_equal_transformers(
    model_type: str,
    make_model: Callable[..., Path],
    make_gguf: Callable[..., Path],
    assert_equals_transformers: Callable[..., None],
) -> None:
    """GLM-4.7-Flash has the architecture of DeepSeek-V3 in files."""
    model = load_model(str(make_gguf(model_type=model_type)))
    assert_equals_transformers(model, make_model(model_type))


@pytest.mark.parametrize(
    ("architecture", "text", "model_type"),
    [("qwen2vl", "qwen2", "qwen2"), ("qwen3vl", "qwen3", "qwen3"), ("qwen3vlmoe", "qwen3moe", "qwen3_moe")],
)
def test_files_of_models_with_encoders_hold_the_text_model(
    architecture: str, text: str, model_type: str, parts_of: Callable[[str], Parts]
) -> None:
    """The three positions of a token of text are equal, so sections of rotary columns do not matter."""
    metadata, tensors = parts_of(model_type)
    config = built((dict(metadata), dict(tensors))).config()
    stored = {key.replace(f"{text}.", f"{architecture}.", 1): value for key, value in metadata.items()}
    stored |= {"general.architecture": architecture, f"{architecture}.rope.dimension_sections": [2, 3, 3, 0]}
    assert built((stored, tensors)).config() == config


def test_mistral_in_files_of_ministral3_has_queries_that_do_not_grow(parts_of: Callable[[str], Parts]) -> None:
    """llama.cpp's converter writes Mistral Small 3 so: without growth, and without yarn."""
    metadata, tensors = parts_of("ministral3")
    bare = {key: value for key, value in metadata.items() if "temperature" not in key and ".rope.scaling" not in key}
    rope = built((bare, tensors)).config()["rope_parameters"]
    assert (rope["rope_type"], rope["llama_4_scaling_beta"], "mscale" in rope) == ("default", 0, False)


def test_gemma_files_imply_windows_and_the_scale_of_queries(parts_of: Callable[[str], Parts]) -> None:
    """llama.cpp knows the largest model, whose queries have another scale, by its number of layers."""
    parts = parts_of("gemma3_text")
    kinds = built((parts[0], dict(parts[1]))).config()["layer_types"]
    assert kinds == ["sliding_attention"] * 5 + ["full_attention"]
    key = "gemma3.attention.sliding_window_pattern"
    for pattern, period in ((2, 2), ([True, False] * 3, 2), (3, 3)):
        kinds = built((parts[0], dict(parts[1])), **{key: pattern}).config()["layer_types"]
        assert [kind == "full_attention" for kind in kinds] == [(i + 1) % period == 0 for i in range(6)]
    with pytest.raises(CheckpointError, match="sliding_window_pattern must be true or false for each of 6 layers"):
        built(parts, **{key: [True]})
    sizes = {"hidden_size": 5376, "num_attention_heads": 32, "head_dim": 128, "rope_parameters": {}}
    version, metadata = family_of_type("gemma3_text").layout.gemma, ModelMetadata("gemma3", {}, "file")
    assert version is not None
    for layers, scale in ((62, 168), (48, 128)):
        config = gemma_config(version, metadata, {**sizes, "num_hidden_layers": layers})
        assert config["query_pre_attn_scalar"] == scale and {*config["layer_types"]} == {"full_attention"}
        assert config["rope_parameters"]["sliding_attention"]["rope_theta"] == 10_000.0


@pytest.mark.parametrize(
    ("model_type", "change", "message"),
    [
        ("gemma3_text", {"query_pre_attn_scalar": 24}, "query_pre_attn_scalar is 24; GGUF's gemma3 implies 32"),
        ("gemma2", {"layer_types": ["full_attention"] * 2}, "layer_types is .* GGUF's gemma2 implies"),
        ("gemma2", {"attn_logit_softcapping": None}, "attn_logit_softcapping is None, but GGUF's gemma2 implies a"),
    ],
)
def test_a_gemma_that_gguf_cannot_express_is_not_written(
    model_type: str, change: dict[str, Any], message: str, make_model: Callable[..., Path], tmp_path: Path
) -> None:
    folder = make_model(model_type, **change)
    with pytest.raises(CheckpointError, match=message):
        convert(folder, tmp_path / "file.gguf", experts="f32", dense="f32")


def test_files_of_gemma_4_have_heads_by_layer(parts_of: Callable[[str], Parts]) -> None:
    """llama.cpp's converter writes one tensor for gate and up, one number of heads if layers have the same, and v_proj
    if values are not keys."""
    metadata, tensors = parts_of("gemma4_text")
    config = built((metadata, dict(tensors))).config()
    heads = [(layer["num_key_value_heads"], layer["head_dim"]) for layer in config["per_layer_config"].values()]
    assert heads == [(2, 16), (1, 32)] and config["attention_k_eq_v"] and config["hidden_size_per_layer_input"] == 0
    assert config["rope_parameters"]["full_attention"]["partial_rotary_factor"] == 0.25
    gate, up = (tensors.pop(f"blk.0.ffn_{part}_exps.weight") for part in ("gate", "up"))
    both = np.concatenate([part.data.reshape(8, -1) for part in (gate, up)], axis=1).reshape(-1)
    tensors["blk.0.ffn_gate_up_exps.weight"] = CheckpointTensor("both", "F32", (8, 64, 64), both)
    experts = built((metadata, dict(tensors))).experts("model.layers.0.experts")
    assert [bytes(part.data[7]) for part in (experts.gate, experts.up)] == [
        bytes(part.data.reshape(8, -1)[7]) for part in (gate, up)
    ]
    tensors["blk.1.attn_v.weight"] = tensors["blk.1.attn_k.weight"]
    config = built((metadata, dict(tensors)), **{"gemma4.attention.head_count_kv": 1}).config()
    assert not config["attention_k_eq_v"] and config["per_layer_config"]["0"]["num_key_value_heads"] == 1
    for key, value, message in (
        ("attention.shared_kv_layers", 1, "a Gemma 4 with layers that share keys and values is served from its folder"),
        ("attention.value_length_swa", 8, "value_length_swa must be 16, got 8"),
        ("attention.head_count_kv", [1], "head_count_kv has numbers for 1 of 2 layers"),
        ("attention.sliding_window_pattern", [False, True], "must be false for the last layer"),
    ):
        with pytest.raises(CheckpointError, match=message):
            built((metadata, dict(tensors)), **{f"gemma4.{key}": value})
    tensors["rope_freqs.weight"] = tensors["blk.0.attn_q_norm.weight"]
    with pytest.raises(CheckpointError, match=r"'rope_freqs.weight' must hold 16 numbers: first 1, then 1e\+30"):
        built((metadata, tensors))
