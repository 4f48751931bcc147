"""Folders of Ling 2.0 as they are published, compared with the published formulas.

transformers has no such model. The formulas are those of modeling_bailing_moe_v2.py of inclusionAI/Ling-mini-2.0.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_families import SEQUENCES, VOCAB, feed
from safetensors.torch import save_file
from torch.nn import functional

from ktqueue.core.errors import CheckpointError
from ktqueue.loading.huggingface.checkpoint import open_folder
from ktqueue.loading.load import load_model

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, EXPERTS, CHOSEN, GROUPS, USED = 64, 4, 2, 32, 8, 2, 4, 2
CONFIG: dict[str, Any] = {
    "architectures": ["BailingMoeV2ForCausalLM"],
    "model_type": "bailing_moe_v2",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 600_000,
    "rope_scaling": None,
    "partial_rotary_factor": 0.5,
    "use_bias": False,
    "use_qkv_bias": False,
    "use_qk_norm": True,
    "use_rmsnorm": True,
    "first_k_dense_replace": 1,
    "num_experts": EXPERTS,
    "num_experts_per_tok": CHOSEN,
    "num_shared_experts": 1,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "moe_router_enable_expert_bias": True,
    "n_group": GROUPS,
    "topk_group": USED,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "router_dtype": "fp32",
    "score_function": "sigmoid",
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 0,
    "torch_dtype": "float32",
}


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    """Random weights under the published names."""
    torch.manual_seed(5)

    def mlp(name: str, width: int) -> dict[str, torch.Tensor]:
        shapes = {"gate_proj": (width, HIDDEN), "up_proj": (width, HIDDEN), "down_proj": (HIDDEN, width)}
        return {f"{name}.{part}.weight": 0.15 * torch.randn(shape) for part, shape in shapes.items()}

    made = {f"{name}.weight": 0.15 * torch.randn(VOCAB, HIDDEN) for name in ("model.word_embeddings", "lm_head")}
    made["model.norm.weight"] = 0.5 + torch.rand(HIDDEN)
    for layer in range(3):
        name = f"model.layers.{layer}"
        rows = (HEADS + 2 * KV_HEADS) * HEAD_DIM
        made[f"{name}.attention.query_key_value.weight"] = 0.15 * torch.randn(rows, HIDDEN)
        made[f"{name}.attention.dense.weight"] = 0.15 * torch.randn(HIDDEN, HEADS * HEAD_DIM)
        for norm in ("attention.query_layernorm", "attention.key_layernorm"):
            made[f"{name}.{norm}.weight"] = 0.5 + torch.rand(HEAD_DIM)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            made[f"{name}.{norm}.weight"] = 0.5 + torch.rand(HIDDEN)
        if layer < CONFIG["first_k_dense_replace"]:
            made |= mlp(f"{name}.mlp", 96)
            continue
        made[f"{name}.mlp.gate.weight"] = 0.15 * torch.randn(EXPERTS, HIDDEN)
        made[f"{name}.mlp.gate.expert_bias"] = 0.4 * torch.rand(EXPERTS) - 0.6  # most biased scores are below 0
        made |= mlp(f"{name}.mlp.shared_experts", 32)
        for expert in range(EXPERTS):
            made |= mlp(f"{name}.mlp.experts.{expert}", 32)
    return made


@pytest.fixture
def folder(tensors: dict[str, torch.Tensor], tmp_path: Path) -> Path:
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def formulas(tensors: dict[str, torch.Tensor], ids: list[int]) -> torch.Tensor:
    """Return the logits [tokens, vocab] of a sequence."""

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + CONFIG["rms_norm_eps"]) * tensors[f"{name}.weight"]

    def mlp(x: torch.Tensor, name: str) -> torch.Tensor:
        gate, up, down = (tensors[f"{name}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        return (functional.silu(x @ gate.T) * (x @ up.T)) @ down.T

    def rotated(x: torch.Tensor) -> torch.Tensor:
        width = HEAD_DIM // 2
        frequencies = CONFIG["rope_theta"] ** -(torch.arange(0, width, 2) / width)
        angles = (torch.arange(len(ids))[:, None] * frequencies).repeat(1, 2)[:, None]
        first, second = x[..., : width // 2], x[..., width // 2 : width]
        turned = x[..., :width] * angles.cos() + torch.cat([-second, first], -1) * angles.sin()
        return torch.cat([turned, x[..., width:]], -1)

    def attention(x: torch.Tensor, name: str) -> torch.Tensor:
        qkv = (x @ tensors[f"{name}.query_key_value.weight"].T).view(len(ids), -1, HEAD_DIM)
        query, key, value = torch.split(qkv, [HEADS, KV_HEADS, KV_HEADS], 1)
        query, key = rotated(norm(query, f"{name}.query_layernorm")), rotated(norm(key, f"{name}.key_layernorm"))
        key, value = (states.repeat_interleave(HEADS // KV_HEADS, 1) for states in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) / HEAD_DIM**0.5
        scores += torch.full_like(scores, -torch.inf).triu(1)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).flatten(1) @ tensors[f"{name}.dense.weight"].T

    def experts(x: torch.Tensor, name: str) -> torch.Tensor:
        scores = (x @ tensors[f"{name}.gate.weight"].T).sigmoid()
        biased = (scores + tensors[f"{name}.gate.expert_bias"]).view(len(ids), GROUPS, -1)
        groups = biased.topk(2)[0].sum(-1).topk(USED)[1]
        is_used = torch.zeros(len(ids), GROUPS, dtype=torch.bool).scatter(1, groups, True)
        chosen = biased.masked_fill(~is_used[..., None], -torch.inf).flatten(1).topk(CHOSEN)[1]
        weights = scores.gather(1, chosen)
        weights = CONFIG["routed_scaling_factor"] * weights / (weights.sum(1, keepdim=True) + 1e-20)
        parts = [
            sum(weight * mlp(x[token], f"{name}.experts.{expert}") for expert, weight in zip(*pair, strict=True))
            for token, pair in enumerate(zip(chosen.tolist(), weights, strict=True))
        ]
        return torch.stack(parts) + mlp(x, f"{name}.shared_experts")

    x = tensors["model.word_embeddings.weight"][ids]
    for layer in range(CONFIG["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        x = x + attention(norm(x, f"{name}.input_layernorm"), f"{name}.attention")
        is_dense = layer < CONFIG["first_k_dense_replace"]
        x = x + (mlp if is_dense else experts)(norm(x, f"{name}.post_attention_layernorm"), f"{name}.mlp")
    return norm(x, "model.norm") @ tensors["lm_head.weight"].T


@pytest.mark.parametrize("model_type", ["bailing_moe_v2", "bailing_moe"])
def test_a_published_folder_computes_the_published_formulas(
    model_type: str, folder: Path, tensors: dict[str, torch.Tensor]
) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, "model_type": model_type}))
    loaded = load_model(str(folder))
    assert type(loaded.module).__name__ == "CpuDecoder"
    found = feed(loaded.module)
    for name, ids in SEQUENCES.items():
        logits = formulas(tensors, ids)
        assert logits.std() > 0.1
        assert (found[name] - logits).abs().max() < 1e-5 * logits.abs().max()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_bias": True}, "use_bias must be False, got True"),
        ({"score_function": "softmax"}, "score_function must be sigmoid, got 'softmax'"),
        (
            {"moe_shared_expert_intermediate_size": 48},
            "moe_shared_expert_intermediate_size must be num_shared_experts times moe_intermediate_size, 32, got 48",
        ),
        ({"num_key_value_heads": 4}, "query_key_value.weight' has 256 rows, 384 expected"),
        ({"architectures": ["BailingMoeForCausalLM"], "model_type": "bailing_moe"}, "Ling 1 is not supported"),
    ],
)
def test_other_folders_are_refused(changes: dict[str, Any], message: str, folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    with pytest.raises(CheckpointError) as caught:
        open_folder(folder)
    assert message in str(caught.value)


def test_layers_that_predict_further_tokens_have_their_norm_under_deepseeks_name(
    folder: Path, tensors: dict[str, torch.Tensor]
) -> None:
    further = {name.replace("layers.2.", "layers.3."): x.clone() for name, x in tensors.items() if "layers.2." in name}
    further |= {f"model.layers.3.{name}.weight": torch.ones(HIDDEN) for name in ("enorm", "hnorm", "final_layernorm")}
    save_file({**tensors, **further}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_nextn_predict_layers": 1}))
    assert "model.layers.3.shared_head.norm.weight" in open_folder(folder, next_tokens=True).names()
    assert not any("layers.3." in name for name in open_folder(folder).names())
