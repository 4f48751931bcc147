"""Shapes of real models, and the tensors of a GGUF file with such a shape. Knows no weights.

The tensors follow from the config: their shapes are those of transformers' model, and their names those of its family.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ktqueue.families.family import Family
from ktqueue.loading.gguf.families import family_of_model_type
from ktqueue.loading.gguf.library import ROW_VECTORS, TensorNameMap
from ktqueue.loading.gguf.writer import TensorDescription
from ktqueue.loading.huggingface.mimo import rope_by_kind
from ktqueue.loading.skeleton import build_config, build_skeleton, tied_names
from ktqueue.loading.weight_formats import BLOCKS

_FULL, _WINDOW = "full_attention", "sliding_attention"
# transformers configs by the name of the model with this shape. tiny, mid and tiny-latent are our own, for tests.
_QWEN3 = {"model_type": "qwen3_moe", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 32768}
_DEEPSEEK = {
    "model_type": "deepseek_v2", "rms_norm_eps": 1e-6, "n_shared_experts": 2, "first_k_dense_replace": 1,
    "q_lora_rank": None, "routed_scaling_factor": 1.0, "max_position_embeddings": 163840,
    "rope_scaling": {
        "type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 4096,
        "mscale": 0.707, "mscale_all_dim": 0.707, "beta_fast": 32, "beta_slow": 1,
    },
}  # fmt: skip
_DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "rms_norm_eps": 1e-6, "n_shared_experts": 1, "hidden_size": 7168,
    "num_hidden_layers": 61, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "intermediate_size": 18432,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "norm_topk_prob": True,
}  # fmt: skip
_GLM = {
    "model_type": "glm4_moe", "rms_norm_eps": 1e-5, "rope_theta": 1e6, "partial_rotary_factor": 0.5,
    "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "vocab_size": 151552, "attention_bias": True, "n_group": 1, "topk_group": 1,
    "norm_topk_prob": True,
}  # fmt: skip
_GPT_OSS = {
    "model_type": "gpt_oss", "rms_norm_eps": 1e-5, "hidden_size": 2880, "intermediate_size": 2880, "head_dim": 64,
    "num_attention_heads": 64, "num_key_value_heads": 8, "num_experts_per_tok": 4, "sliding_window": 128,
    "vocab_size": 201088, "max_position_embeddings": 131072, "attention_bias": True,
    "rope_scaling": {
        "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "original_max_position_embeddings": 4096, "truncate": False,
    },
}  # fmt: skip


def _yarn(theta: float, factor: float) -> dict[str, Any]:
    return {
        "type": "yarn", "rope_theta": theta, "factor": factor, "original_max_position_embeddings": 4096,
        "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1,
    }  # fmt: skip


_LLAMA4 = {
    "model_type": "llama4_text",
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "hidden_size": 5120,
    "num_hidden_layers": 48,
    "num_experts_per_tok": 1,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 202048,
}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        **_QWEN3, "hidden_size": 256, "num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 64, "vocab_size": 512,
    },
    "mid": {
        **_QWEN3, "hidden_size": 1024, "num_hidden_layers": 8, "num_experts": 64, "num_experts_per_tok": 8,
        "moe_intermediate_size": 512, "intermediate_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 4,
        "head_dim": 64, "vocab_size": 8192,
    },
    "qwen3-30b-a3b": {
        **_QWEN3, "hidden_size": 2048, "num_hidden_layers": 48, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "intermediate_size": 6144, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "vocab_size": 151936,
    },
    "tiny-latent": {
        **_DEEPSEEK, "hidden_size": 256, "num_hidden_layers": 2, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "kv_lora_rank": 256,
        "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32, "vocab_size": 512,
    },
    "deepseek-v2-lite": {
        **_DEEPSEEK, "hidden_size": 2048, "num_hidden_layers": 27, "n_routed_experts": 64, "num_experts_per_tok": 6,
        "moe_intermediate_size": 1408, "intermediate_size": 10944, "num_attention_heads": 16, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 102400,
    },
    "mixtral-8x7b": {
        "model_type": "mixtral", "rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_position_embeddings": 32768,
        "hidden_size": 4096, "num_hidden_layers": 32, "num_local_experts": 8, "num_experts_per_tok": 2,
        "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 32000,
    },
    "qwen3-235b-a22b": {
        **_QWEN3, "hidden_size": 4096, "num_hidden_layers": 94, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 1536, "intermediate_size": 12288, "num_attention_heads": 64, "num_key_value_heads": 4,
        "head_dim": 128, "vocab_size": 151936,
    },
    "deepseek-v3": {
        **_DEEPSEEK_V3, "n_routed_experts": 256, "num_attention_heads": 128, "first_k_dense_replace": 3, "n_group": 8,
        "topk_group": 4, "routed_scaling_factor": 2.5, "vocab_size": 129280, "max_position_embeddings": 163840,
        "rope_scaling": _yarn(1e4, 40.0),
    },
    "kimi-k2": {
        **_DEEPSEEK_V3, "n_routed_experts": 384, "num_attention_heads": 64, "first_k_dense_replace": 1, "n_group": 1,
        "topk_group": 1, "routed_scaling_factor": 2.827, "vocab_size": 163840, "max_position_embeddings": 131072,
        "rope_scaling": _yarn(5e4, 32.0),
    },
    "glm-4.6": {
        **_GLM, "hidden_size": 5120, "num_hidden_layers": 92, "n_routed_experts": 160, "moe_intermediate_size": 1536,
        "intermediate_size": 12288, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5, "use_qk_norm": True,
        "max_position_embeddings": 202752,
    },
    "glm-4.5-air": {
        **_GLM, "hidden_size": 4096, "num_hidden_layers": 46, "n_routed_experts": 128, "moe_intermediate_size": 1408,
        "intermediate_size": 10944, "first_k_dense_replace": 1, "routed_scaling_factor": 1.0, "use_qk_norm": False,
        "max_position_embeddings": 131072,
    },
    "minimax-m2": {
        "model_type": "minimax_m2", "rms_norm_eps": 1e-6, "rope_theta": 5e6, "rotary_dim": 64, "hidden_size": 3072,
        "num_hidden_layers": 62, "num_local_experts": 256, "num_experts_per_tok": 8, "intermediate_size": 1536,
        "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 200064,
        "max_position_embeddings": 196608,
    },
    "qwen3-next-80b-a3b": {
        "model_type": "qwen3_5_moe_text", "rms_norm_eps": 1e-6, "rope_theta": 1e7, "partial_rotary_factor": 0.25,
        "hidden_size": 2048, "num_hidden_layers": 48, "num_experts": 512, "num_experts_per_tok": 10,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_attention_heads": 16,
        "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "vocab_size": 151936,
        "max_position_embeddings": 262144,
    },
    "qwen3.5-27b": {
        "model_type": "qwen3_5_text", "rms_norm_eps": 1e-6, "rope_theta": 1e7, "partial_rotary_factor": 0.25,
        "hidden_size": 5120, "num_hidden_layers": 64, "intermediate_size": 17408, "num_attention_heads": 24,
        "num_key_value_heads": 4, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 48,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "vocab_size": 248320,
        "max_position_embeddings": 262144,
    },
    "llama-4-scout": {
        **_LLAMA4, "num_local_experts": 16, "interleave_moe_layer_step": 1, "max_position_embeddings": 10485760,
    },
    "llama-4-maverick": {
        **_LLAMA4, "num_local_experts": 128, "interleave_moe_layer_step": 2, "use_qk_norm": False,
        "max_position_embeddings": 1048576,
    },
    "gpt-oss-20b": {**_GPT_OSS, "num_hidden_layers": 24, "num_local_experts": 32},
    "gpt-oss-120b": {**_GPT_OSS, "num_hidden_layers": 36, "num_local_experts": 128},
    "ling-mini-2.0": {
        "model_type": "bailing_moe_v2", "rms_norm_eps": 1e-6, "rope_theta": 6e5, "partial_rotary_factor": 0.5,
        "hidden_size": 2048, "num_hidden_layers": 20, "num_attention_heads": 16, "num_key_value_heads": 4,
        "head_dim": 128, "intermediate_size": 5120, "n_routed_experts": 256, "num_experts_per_tok": 8,
        "moe_intermediate_size": 512, "n_shared_experts": 1, "n_group": 8, "topk_group": 4,
        "first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "vocab_size": 157184,
        "max_position_embeddings": 32768,
    },
    "mimo-v2-flash": {
        "model_type": "mimo_v2_flash", "rms_norm_eps": 1e-5, "hidden_size": 4096, "num_hidden_layers": 48,
        "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 192, "v_head_dim": 128,
        "attention_value_scale": 0.707, "sliding_window": 128, "intermediate_size": 16384, "n_routed_experts": 256,
        "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "vocab_size": 152576,
        "max_position_embeddings": 262144, "rope_parameters": rope_by_kind(5e6, 1e4, {}),
        "layer_types": [_FULL if i == 0 or i % 6 == 5 else _WINDOW for i in range(48)],
    },
    "step-3.5-flash": {
        "model_type": "step3p5", "rms_norm_eps": 1e-5, "hidden_size": 4096, "num_hidden_layers": 45,
        "num_attention_heads": 64, "num_sliding_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128,
        "sliding_window": 512, "intermediate_size": 11264, "n_routed_experts": 288, "num_experts_per_tok": 8,
        "moe_intermediate_size": 1280, "share_expert_dim": 1280, "moe_router_scaling_factor": 3.0,
        "vocab_size": 128896, "max_position_embeddings": 262144,
        "layer_types": [_WINDOW if i % 4 else _FULL for i in range(45)],
        "swiglu_limits": [0.0] * 43 + [7.0] * 2, "swiglu_limits_shared": [0.0] * 43 + [16.0] * 2,
        "rope_parameters": {
            _FULL: {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
            _WINDOW: {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
        },
    },
    "laguna-xs.2": {
        "model_type": "laguna", "rms_norm_eps": 1e-6, "hidden_size": 2048, "num_hidden_layers": 40,
        "num_attention_heads": 48, "num_attention_heads_per_layer": [48, 64, 64, 64] * 10, "num_key_value_heads": 8,
        "head_dim": 128, "sliding_window": 512, "intermediate_size": 8192, "num_experts": 256,
        "num_experts_per_tok": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        "moe_routed_scaling_factor": 2.5, "vocab_size": 100352, "max_position_embeddings": 262144,
        "layer_types": [_FULL, _WINDOW, _WINDOW, _WINDOW] * 10,
        "rope_parameters": {
            _FULL: {
                "rope_type": "yarn", "rope_theta": 5e5, "factor": 32.0, "original_max_position_embeddings": 8192,
                "beta_fast": 64.0, "beta_slow": 1.0, "partial_rotary_factor": 0.5,
            },
            _WINDOW: {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
        },
    },
}  # fmt: skip
MIX = "Q4_K_M"  # llama.cpp's mix of Q4_K and Q6_K; any other quantisation is one format for all matrices
ROUTER = "ffn_gate_inp"
_GAINS = {"output": 3.0, ROUTER: 2.0}  # of the logits of tokens and of routers
# Of matrices that add to the residual. All layers together add about the residual's own size.
RESIDUAL_GAINS = {"attn_output": 2.0, "ffn_down": 4.0, "ffn_down_exps": 4.0, "ffn_down_shexp": 4.0, "ssm_out": 2.0}
_VECTOR_DEVIATIONS = {"exp_probs_b": 0.02, "attn_sinks": 1.0}  # of any other bias 0.05
_EXPERT_ROWS = ("gate", "up")


@dataclass(frozen=True, slots=True)
class SyntheticTensor(TensorDescription):
    """One tensor of a file. `deviation` is the standard deviation of its weights, around `mean`."""

    deviation: float
    mean: float = 0.0

    @property
    def role(self) -> str:
        """The part of the model that it belongs to, such as `attn_q`."""
        return self.name.rpartition(".")[0].rpartition(".")[2]


def tensors_of(config: dict[str, Any], quant: str) -> Iterator[SyntheticTensor]:
    """Yield all tensors of a model of that config, in file order.

    `quant` is MIX or a storage format. A matrix whose rows are not a multiple of its block is Q8_0, or F16. Raises
    CheckpointError for a config that transformers refuses.
    """
    family = family_of_model_type(config["model_type"], "a synthetic model")
    layers = config["num_hidden_layers"]
    names = TensorNameMap(family.layout, layers)
    skeleton = build_skeleton(build_config(config, "a synthetic model"), torch.float32, "a synthetic model")
    tied = tied_names(skeleton)
    for name, tensor in skeleton.state_dict().items():
        if name not in tied:
            for part, shape in _stored_parts(name, tuple(tensor.shape), family):
                found = names.find(part)
                assert found is not None, part
                yield _tensor(found, shape, quant, layers)


def _stored_parts(name: str, shape: tuple[int, ...], family: Family) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of the tensors in which a file holds a tensor of transformers."""
    module, _, leaf = name.rpartition(".")
    if not module.endswith(".experts"):
        if name.endswith("conv1d.weight"):
            shape = (shape[0], shape[2])
        yield name, shape[1:] if name.endswith(ROW_VECTORS) else shape
        return
    kind = "bias" if leaf.endswith("_bias") else "weight"
    if family.transposed_experts and kind == "weight":
        shape = (shape[0], shape[2], shape[1])
    if leaf.startswith("down"):
        yield f"{module}.down_proj.{kind}", shape
        return
    for part in _EXPERT_ROWS:
        yield f"{module}.{part}_proj.{kind}", (shape[0], shape[1] // 2, *shape[2:])


def _tensor(name: str, shape: tuple[int, ...], quant: str, layers: int) -> SyntheticTensor:
    """Describe a tensor by its name in the file, such as `blk.0.attn_q.weight`."""
    path, _, kind = name.rpartition(".")
    role = path.rpartition(".")[2]
    if kind == "ssm_a":  # minus exp(A_log)
        return SyntheticTensor(name, "F32", shape, 0.1, -1.0)
    if role.endswith("_norm"):
        return SyntheticTensor(name, "F32", shape, 0.1, 1.0)
    if kind == "bias" or len(shape) == 1:
        return SyntheticTensor(name, "F32", shape, _VECTOR_DEVIATIONS.get(role, 0.05))
    gain = _GAINS.get(role, 1.0)
    if role in RESIDUAL_GAINS:
        gain = RESIDUAL_GAINS[role] * (2 * layers) ** -0.5
    elif role == "token_embd":
        gain = shape[-1] ** 0.5
    layer = int(path.split(".")[1]) if path.startswith("blk.") else 0
    wanted = "F32" if role in (ROUTER, "ssm_conv1d") else _choose(quant, role, layer, layers)
    fitting = (known for known in (wanted, "Q8_0") if shape[-1] % BLOCKS[known][0] == 0)
    return SyntheticTensor(name, next(fitting, "F16"), shape, gain / shape[-1] ** 0.5)


def _choose(quant: str, role: str, layer: int, layers: int) -> str:
    """Return the format of a matrix.

    In its mix, llama.cpp uses Q6_K for the logits. It also uses Q6_K for values and down in the first eighth of the
    layers, in the last eighth, and in every third layer between.
    """
    if quant != MIX:
        return quant
    eighth = layers // 8
    higher_precision = layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
    return "Q6_K" if role == "output" or (higher_precision and role in ("attn_v", "ffn_down_exps")) else "Q4_K"
