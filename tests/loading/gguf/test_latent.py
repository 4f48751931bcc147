"""Models with latent attention (DeepSeek-V2 and V3), from a folder and from GGUF, compared with transformers."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from own_weights import quantise

from ktqueue.core.errors import CheckpointError, RuleError
from ktqueue.loading.checkpoint import CheckpointTensor
from ktqueue.loading.gguf.checkpoint import read_parts
from ktqueue.loading.gguf.families import family_of_metadata, family_of_model_type
from ktqueue.loading.gguf.latent import join_latent_tensors
from ktqueue.loading.gguf.metadata import config_from_metadata, metadata_from_config
from ktqueue.loading.gguf.writer import GgufWriter
from ktqueue.loading.load import load_model, open_checkpoint
from ktqueue.loading.model_report import report_model
from ktqueue.loading.rules import DEFAULT_RULES
from ktqueue.loading.skeleton import build_config
from ktqueue.operators.decoder import CpuDecoder
from ktqueue.operators.kv_cache import KVLayout
from ktqueue.operators.native import packed_bytes

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "beta_fast": 24,
    "beta_slow": 1,
}
GROUPS = {"n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "V2-Lite": ("deepseek_v2", {"rope_parameters": YARN}),
    "V2": ("deepseek_v2", {**GROUPS, "q_lora_rank": 48, "routed_scaling_factor": 16.0, "first_k_dense_replace": 0}),
    "V3": ("deepseek_v3", {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}),
    "Moonlight": ("deepseek_v3", {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "norm_topk_prob": False}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("source", ["folder", "gguf"])
@pytest.mark.parametrize("rules", ["default", "modules"])
def test_logits_equal_transformers(
    case: str,
    source: str,
    rules: str,
    make_model: Callable[..., Path],
    make_source: Callable[..., Path],
    assert_equals_transformers: Callable[..., None],
) -> None:
    model_type, changes = CASES[case]
    model = load_model(
        str(make_source(source, model_type, **changes)), rules=str(DEFAULT_RULES.with_name(f"{rules}.yaml"))
    )
    layout = KVLayout(layers=2, kv_heads=1, head_dim=40, page_size=16, dtype=torch.float32, latent=32)
    assert model.kv_layout(16) == layout
    assert_equals_transformers(model, make_model(model_type, **changes))


@pytest.mark.parametrize("in_config", [True, False])
def test_layers_that_predict_further_tokens_are_left_out(
    in_config: bool, make_model: Callable[..., Path], assert_equals_transformers: Callable[..., None], tmp_path: Path
) -> None:
    """DeepSeek-V3 and R1 have such a layer after their own layers; only the config tells them apart."""
    folder = make_model("deepseek_v3")
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    layer_weights = {name: tensor for name, tensor in weights.items() if name.startswith("model.layers.1.")}
    weights |= {name.replace("layers.1.", "layers.2."): tensor.clone() for name, tensor in layer_weights.items()}
    weights |= {"model.layers.2.enorm.weight": torch.ones(64), "model.layers.2.eh_proj.weight": torch.ones(64, 128)}
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": int(in_config)}
    (tmp_path / "config.json").write_text(json.dumps(config))
    if in_config:
        assert_equals_transformers(load_model(str(tmp_path)), folder)
    else:
        with pytest.raises(CheckpointError, match=r"surplus: model\.layers\.2\."):
            load_model(str(tmp_path))


@pytest.mark.parametrize("case", ["V2-Lite", "V3"])
def test_keys_and_values_may_be_in_two_tensors(
    case: str,
    make_model: Callable[..., Path],
    make_gguf: Callable[..., Path],
    assert_equals_transformers: Callable[..., None],
    tmp_path: Path,
) -> None:
    """llama.cpp writes such files since April 2025. The widths of a head have their own keys."""
    model_type, changes = CASES[case]
    path = split_file(make_gguf(model_type=model_type, **changes), tmp_path / "split.gguf")
    model = load_model(str(path))
    assert_equals_transformers(model, make_model(model_type, **changes))
    checkpoint = open_checkpoint(str(path))
    assert checkpoint.nbytes("model.layers.0.self_attn.kv_b_proj.weight") == 4 * 4 * 40 * 32


def test_two_tensors_stay_quantised(
    make_gguf: Callable[..., Path], run_logits: Callable[..., torch.Tensor], tmp_path: Path
) -> None:
    """The compiled decoder multiplies by both as they are stored. Its twin decodes them."""
    whole = make_gguf(model_type="deepseek_v3", qk_nope_head_dim=32)
    path = split_file(whole, tmp_path / "split.gguf", plain=32, quant="Q8_0")
    rules = str(DEFAULT_RULES.with_name("exact.yaml"))
    model, twin = load_model(str(path), rules=rules), load_model(str(path), rules="modules")
    assert isinstance(model.module, CpuDecoder)
    found, expected = (run_logits(each.module, each.kv_layout(16), [*range(3, 43)]) for each in (model, twin))
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)
    saved = packed_bytes("F32", 4 * 32, 32) + packed_bytes("F32", 4 * 32, 32)  # 24 rows of values fill two panels
    saved -= packed_bytes("Q8_0", 4 * 32, 32) + packed_bytes("Q8_0", 4 * 32, 32)
    totals = [report_model(str(file)).device_bytes["cpu"] for file in (whole, path)]
    assert totals[0] - totals[1] == 2 * saved


def split_file(whole: Path, path: Path, *, plain: int = 16, quant: str = "F32") -> Path:
    """Write a float32 file again, with the matrix that expands latents in two tensors of `quant`."""
    (header,) = read_parts(whole)
    metadata = {key: value for key, value in header.metadata.items() if key != "general.architecture"}
    for key in ("deepseek2.attention.key_length", "deepseek2.attention.value_length"):
        metadata[f"{key}_mla"] = metadata[key]
    metadata |= {"deepseek2.attention.key_length": 40, "deepseek2.attention.value_length": 32}
    metadata["deepseek2.attention.head_count_kv"] = 1
    tensors: dict[str, np.ndarray[Any, Any]] = {}
    for info in header.tensors:
        data = header.data[info.offset : info.offset + 4 * math.prod(info.shape)].view("<f4").reshape(info.shape)
        if info.name.endswith("attn_kv_b.weight"):
            heads = data.reshape(4, plain + 24, 32)
            tensors[info.name.replace("kv_b", "k_b")] = heads[:, :plain].transpose(0, 2, 1)
            tensors[info.name.replace("kv_b", "v_b")] = heads[:, plain:]
        else:
            tensors[info.name] = data
    quants = {name: quant if name.endswith(("k_b.weight", "v_b.weight")) else "F32" for name in tensors}
    with GgufWriter(path, "deepseek2", "F32") as writer:
        writer.add_metadata(metadata)
        for name, data in tensors.items():
            writer.add_tensor(name, quants[name], data.shape)
        writer.start()
        for name, data in tensors.items():
            writer.write(quantise(torch.from_numpy(data.copy()), quants[name]))
    return path


def test_a_half_of_the_two_tensors_is_refused(make_gguf: Callable[..., Path]) -> None:
    (header,) = read_parts(make_gguf(model_type="deepseek_v2"))
    stored = {"blk.0.attn_k_b.weight": CheckpointTensor("k", "F32", (4, 32, 16), header.data[: 4 * 4 * 32 * 16])}
    with pytest.raises(CheckpointError, match="attn_v_b beside it must have three dimensions"):
        join_latent_tensors("file", stored)


def metadata_of(model_type: str, **changes: Any) -> dict[str, Any]:
    config = {
        "max_position_embeddings": 4096, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "rms_norm_eps": 1e-6, "intermediate_size": 96, "moe_intermediate_size": 32, "n_routed_experts": 8,
        "num_experts_per_tok": 2, "n_shared_experts": 2, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8, "v_head_dim": 24, "routed_scaling_factor": 1.0, "first_k_dense_replace": 1,
        "n_group": 1, "topk_group": 1, **changes,
    }  # fmt: skip
    family = family_of_model_type(model_type, "folder")
    return {"general.architecture": family.layout.architecture, **metadata_from_config(family, config, "folder")}


def config_of(metadata: dict[str, Any]) -> dict[str, Any]:
    return config_from_metadata(family_of_metadata(metadata, "file"), metadata, "file")


def test_scores_decide_the_family() -> None:
    v2, v3 = metadata_of("deepseek_v2"), metadata_of("deepseek_v3", n_group=1, topk_group=1)
    assert config_of(v2)["model_type"] == "deepseek_v2"
    assert config_of(v3)["model_type"] == "deepseek_v3"
    del v2["deepseek2.expert_gating_func"]  # as in files of DeepSeek-V2 from 2024
    assert config_of(v2)["model_type"] == "deepseek_v2"


def test_metadata_survives_a_round_trip() -> None:
    yarn = {**YARN, "factor": 40.0, "original_max_position_embeddings": 4096}
    found = config_of(metadata_of("deepseek_v2", **GROUPS, q_lora_rank=48, rope_scaling=yarn, first_k_dense_replace=0))
    assert found["rope_parameters"] == yarn
    assert {key: found[key] for key in GROUPS} == GROUPS
    assert (found["q_lora_rank"], found["first_k_dense_replace"], found["num_key_value_heads"]) == (48, 0, 4)
    plain = config_of(metadata_of("deepseek_v2", n_group=4, topk_group=2, topk_method="greedy"))
    assert (plain["q_lora_rank"], plain["topk_method"], plain["n_group"]) == (None, "greedy", 1)


def test_a_log_multiplier_of_0_means_none() -> None:
    yarn = {**YARN, "mscale": 0.0, "mscale_all_dim": 0.0}
    metadata = metadata_of("deepseek_v2", rope_scaling=yarn)
    rope = config_of({**metadata, "deepseek2.rope.scaling.yarn_log_multiplier": 0.0})["rope_parameters"]
    assert rope == config_of(metadata)["rope_parameters"]
    assert "mscale" not in rope


def test_a_number_of_groups_needs_the_number_of_used_groups() -> None:
    metadata = metadata_of("deepseek_v2", **GROUPS)
    del metadata["deepseek2.expert_group_used_count"]
    with pytest.raises(CheckpointError, match=r"metadata key deepseek2\.expert_group_used_count is missing"):
        config_of(metadata)


def test_a_text_is_no_truth_value() -> None:
    metadata = {**metadata_of("deepseek_v2"), "deepseek2.expert_weights_norm": "false"}
    with pytest.raises(CheckpointError, match=r"deepseek2\.expert_weights_norm must be true or false, got 'false'"):
        config_of(metadata)


@pytest.mark.parametrize("key", ["n_group", "topk_group", "routed_scaling_factor"])
def test_a_config_with_sigmoid_scores_must_have_certain_keys(key: str) -> None:
    """Without them transformers uses DeepSeek-V3's values, and the GGUF file would have none."""
    with pytest.raises(CheckpointError, match=f"folder: config key {key} is missing"):
        metadata_of("deepseek_v3", **{key: None})


def test_sigmoids_in_a_family_of_softmax_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"qwen3moe\.expert_gating_func 2 is not supported"):
        family_of_metadata({"general.architecture": "qwen3moe", "qwen3moe.expert_gating_func": 2}, "file")


@pytest.mark.parametrize(("experts", "groups"), [(160, (8, 3)), (256, (8, 4)), (64, (1, 1))])
def test_old_files_have_default_groups(experts: int, groups: tuple[int, int]) -> None:
    metadata = metadata_of("deepseek_v3", n_routed_experts=experts)
    del metadata["deepseek2.expert_group_count"], metadata["deepseek2.expert_group_used_count"]
    found = config_of(metadata)
    assert (found["n_group"], found["topk_group"]) == groups


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"deepseek2.rope.dimension_count": 24}, "must be even and less than the length of a key, 24"),
        ({"deepseek2.attention.temperature_scale": 0.1}, "attention.temperature_scale is not supported"),
        ({"deepseek2.rope.dimension_count": 7}, "must be even"),
        ({"deepseek2.expert_gating_func": 3}, "file: metadata key deepseek2.expert_gating_func 3 is not supported"),
        ({"deepseek2.rope.scaling.attn_factor": 0.5}, "deepseek2.rope.scaling.attn_factor 0.5 is not supported"),
        ({"deepseek2.expert_weights_norm": True}, "expert_weights_norm with softmax scores is not supported"),
        ({"deepseek2.leading_dense_block_count": -1}, "leading_dense_block_count must be a positive number"),
        ({"deepseek2.attention.kv_lora_rank": 0}, "kv_lora_rank must be a positive number"),
    ],
)
def test_impossible_metadata_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        config_of({**metadata_of("deepseek_v2"), **changes})


INDEXER = {"index_n_heads": 4, "index_head_dim": 16, "index_topk": 8, "q_lora_rank": 48, "num_hidden_layers": 7}


def test_layers_share_choices_as_a_file_or_its_context_says() -> None:
    """GLM-5.2 has a context of a million tokens, and files that do not name its layers."""
    metadata = metadata_of("glm_moe_dsa", **INDEXER, max_position_embeddings=1 << 20)
    assert config_of(metadata)["indexer_types"] == ["full"] * 7
    key = "glm-dsa.attention.indexer.types"
    assert config_of({**metadata, key: [1, 0, 0, 1, 1, 1, 1, 0]})["indexer_types"][:4] == [
        "full",
        *["shared"] * 2,
        "full",
    ]
    with pytest.raises(CheckpointError, match=f"{key} must be true or false for each of 7 layers"):
        config_of({**metadata, key: [True]})
    del metadata[key]
    assert config_of(metadata)["indexer_types"] == [*["full"] * 3, *["shared"] * 3, "full"]
    assert "indexer_types" not in config_of({**metadata, "glm-dsa.context_length": 1 << 17})
    with pytest.raises(CheckpointError, match=r"glm-dsa\.expert_gating_func 1 is not supported"):
        config_of({**metadata, "glm-dsa.expert_gating_func": 1})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"index_topk_freq": 4}, "index_topk_freq cannot be written to GGUF without indexer_types"),
        ({"mlp_layer_types": ["sparse", "dense"]}, "GGUF cannot express mlp_layer_types"),
    ],
)
def test_layers_that_gguf_cannot_express_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        metadata_of("glm_moe_dsa", **INDEXER, **change)


def test_without_their_growth_queries_of_a_file_have_the_original_context() -> None:
    """llama.cpp's converter leaves it out. Up to there queries do not grow."""
    rope = {**YARN, "original_max_position_embeddings": 128, "llama_4_scaling_beta": 0.3}
    metadata = metadata_of("mistral4", rope_parameters=rope)
    found = config_of(metadata)
    assert (found["rope_parameters"], found["max_position_embeddings"]) == (rope, 4096)
    assert found["norm_topk_prob"] is True
    prefix = "mistral4.attention.temperature"
    with pytest.raises(CheckpointError, match=f"{prefix}_length must be 128, the original context, got 64"):
        config_of({**metadata, f"{prefix}_length": 64})
    del metadata[f"{prefix}_scale"], metadata[f"{prefix}_length"]
    assert config_of(metadata)["max_position_embeddings"] == 128
    with pytest.raises(CheckpointError, match="rope llama_4_scaling_beta is missing"):
        metadata_of("mistral4", rope_parameters=YARN)


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("deepseek_v2", {**GROUPS, "n_group": 3}, "n_group must be a divisor of n_routed_experts, 8, got 3"),
        ("deepseek_v2", {**GROUPS, "n_group": 8, "topk_group": 1}, "num_experts_per_tok must be at most 1, .* got 2"),
        ("deepseek_v3", {"n_group": 4, "topk_group": 5}, "topk_group must be from 1 to n_group, 4, got 5"),
        ("deepseek_v3", {"n_group": 0}, "n_group must be a divisor of n_routed_experts, 8, got 0"),
        ("deepseek_v3", {"n_group": 8, "topk_group": 2}, "n_group must be below 8, .* got 8"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method must be greedy or group.* 'noaux_tc'"),
    ],
)
def test_impossible_groups_are_refused(
    model_type: str, changes: dict[str, Any], message: str, make_model: Callable[..., Path], tmp_path: Path
) -> None:
    """This is noticed before weights are read, not in the first step."""
    folder = make_model(model_type)
    (tmp_path / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | changes))
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=message):
        load_model(str(tmp_path))


def test_impossible_groups_of_a_file_are_refused() -> None:
    config = config_of({**metadata_of("deepseek_v2", **GROUPS), "deepseek2.expert_group_count": 3})
    with pytest.raises(CheckpointError, match="file: n_group must be a divisor of n_routed_experts, 8, got 3"):
        build_config(config, "file")


def test_values_that_gguf_cannot_express_are_refused() -> None:
    with pytest.raises(CheckpointError, match="norm_topk_prob is True"):
        metadata_of("deepseek_v2", norm_topk_prob=True)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("{name: '^model$'}\n  replace: {op: default}", r"\(DeepseekV2Attention\) must be .* no rule does so"),
        ("{class: '^Linear$'}\n  replace: {op: CpuLinear}", r"layers\.0\.self_attn .* no rule does so"),
        (
            "{class: 'Attention$'}\n  replace: {op: CpuLinear}",
            "CpuDecoder or GpuDecoder or LatentAttention, but CpuLinear replaces it",
        ),
    ],
)
def test_a_rule_must_name_the_attention(
    rule: str, message: str, make_model: Callable[..., Path], tmp_path: Path
) -> None:
    """This is checked before anything is loaded: in the first step it would look like a fault of the device."""
    rules = tmp_path / "rules.yaml"
    rules.write_text(f"- match: {rule}\n")
    for look in (report_model, load_model):
        with pytest.raises(RuleError, match=message):
            look(str(make_model("deepseek_v2")), rules=str(rules))


@pytest.mark.parametrize("quant", ["f32", "q8_0"])
def test_the_report_counts_what_the_decoder_packs(quant: str, make_gguf: Callable[..., Path]) -> None:
    path = str(make_gguf(quant, quant, model_type="deepseek_v3"))
    report, decoder = report_model(path), load_model(path).module
    norms = sum(row.device_bytes for row in report.rows if "norm" in row.name)
    biases = 4 * 8  # of the router that is not dense
    assert isinstance(decoder, CpuDecoder)
    assert report.device_bytes["cpu"] == decoder.device_bytes()["cpu"] + norms + biases


def test_a_gpu_decoder_attends_latents(make_model: Callable[..., Path]) -> None:
    assert {row.operator for row in report_model(str(make_model("deepseek_v2")), device="cuda").rows} == {"GpuDecoder"}


def test_the_operator_refuses_other_attention(make_model: Callable[..., Path], tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text("- match: {class: 'Attention$'}\n  replace: {op: LatentAttention}\n")
    with pytest.raises(RuleError, match="Qwen3MoeAttention cannot be replaced by LatentAttention: it makes no latents"):
        load_model(str(make_model()), rules=str(rules))
