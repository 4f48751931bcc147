"""Model families that GGUF files can hold: one table entry describes one family.

Knows nothing of tensor contents or tokenizers.
"""

from collections.abc import Mapping
from typing import Any

from ktqueue.core.errors import CheckpointError
from ktqueue.loading.family import EXPERT_KEY, MetadataField, ModelFamily
from ktqueue.loading.gguf.header import metadata_count
from ktqueue.loading.gguf.latent import SIGMOID
from ktqueue.loading.unsupported import check_architecture

_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_NORMS = ("input_layernorm", "post_attention_layernorm")
_MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_EXPERTS = ("mlp.gate", "mlp.experts.gate_proj", "mlp.experts.up_proj", "mlp.experts.down_proj")
_SHARED = tuple(f"mlp.shared_expert{part}" for part in (".gate_proj", ".up_proj", ".down_proj", "_gate"))


_SOFTMAX_OF_CHOSEN = 3  # value of `expert_gating_func` (llama.cpp)
_DENSE = (
    MetadataField("max_position_embeddings", "context_length"),
    MetadataField("hidden_size", "embedding_length"),
    MetadataField("num_hidden_layers", "block_count"),
    MetadataField("num_attention_heads", "attention.head_count"),
    MetadataField("num_key_value_heads", "attention.head_count_kv"),
    MetadataField("rms_norm_eps", "attention.layer_norm_rms_epsilon", float),
)
_COMMON = (*_DENSE, MetadataField("num_experts_per_tok", "expert_used_count"))
_EXPERT_COUNT = MetadataField("num_experts", EXPERT_KEY, aliases=("num_local_experts",))
_EXPERT_WIDTH = MetadataField("moe_intermediate_size", "expert_feed_forward_length")
_WIDTH = MetadataField("intermediate_size", "feed_forward_length")
_ANY_WIDTH = MetadataField("intermediate_size", "feed_forward_length", required=False)
_SHARED_WIDTH = MetadataField("shared_expert_intermediate_size", "expert_shared_feed_forward_length")
_HEAD_DIM = MetadataField("head_dim", "attention.key_length", required=False)
_LATENT = (
    *(entry for entry in _COMMON if entry.config != "num_key_value_heads"),
    MetadataField("n_routed_experts", EXPERT_KEY, aliases=("num_experts", "num_local_experts")),
    _EXPERT_WIDTH,
    _WIDTH,
    MetadataField("n_shared_experts", "expert_shared_count"),
    MetadataField("routed_scaling_factor", "expert_weights_scale", float, required=False),
    MetadataField("kv_lora_rank", "attention.kv_lora_rank"),
)
_SIGMOID = (
    *_COMMON,
    MetadataField("n_routed_experts", EXPERT_KEY, aliases=("num_experts", "num_local_experts")),
    _EXPERT_WIDTH,
    _WIDTH,
    _HEAD_DIM,
    MetadataField("n_shared_experts", "expert_shared_count"),
    MetadataField("first_k_dense_replace", "leading_dense_block_count", least=0),
    MetadataField("routed_scaling_factor", "expert_weights_scale", float, required=False, absent=1.0),
    MetadataField("norm_topk_prob", "expert_weights_norm", bool, required=False, absent=False),
    MetadataField("n_group", "expert_group_count", required=False, absent=1),
    MetadataField("topk_group", "expert_group_used_count", required=False, absent=1),
)
_EXAONE = (
    *(entry for entry in _SIGMOID if entry.config not in ("n_routed_experts", "n_shared_experts")),
    _EXPERT_COUNT,
    MetadataField("num_shared_experts", "expert_shared_count"),
    MetadataField("sliding_window", "attention.sliding_window"),
)
_LOCAL_EXPERTS = (
    *_COMMON,
    MetadataField("num_local_experts", EXPERT_KEY, aliases=("num_experts",)),
    MetadataField("intermediate_size", "expert_feed_forward_length"),
    _HEAD_DIM,
)
_ERNIE = (
    *_DENSE,
    MetadataField("moe_num_experts", EXPERT_KEY, aliases=("num_experts", "num_local_experts")),
    MetadataField("moe_k", "expert_used_count", aliases=("num_experts_per_tok",)),
    _EXPERT_WIDTH,
    _WIDTH,
    _HEAD_DIM,
    MetadataField("moe_num_shared_experts", "expert_shared_count", least=0, required=False, absent=0),
    MetadataField("moe_layer_start_index", "leading_dense_block_count", least=0),
    MetadataField("moe_layer_interval", "interleave_moe_layer_step", required=False, absent=1),
)
_GRANITE = (
    _WIDTH,
    MetadataField("attention_multiplier", "attention.scale", float),
    MetadataField("embedding_multiplier", "embedding_scale", float),
    MetadataField("residual_multiplier", "residual_scale", float),
    MetadataField("logits_scaling", "logit_scale", float),
)
_HUNYUAN = (
    *_DENSE,
    MetadataField("num_experts", EXPERT_KEY, aliases=("num_local_experts",)),
    MetadataField("moe_topk", "expert_used_count", aliases=("num_experts_per_tok",)),
    MetadataField("intermediate_size", "expert_feed_forward_length"),
    _HEAD_DIM,
)
_QK_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
_HUNYUAN_NORMS = ("self_attn.query_layernorm", "self_attn.key_layernorm")
_SHARED_EXPERTS = tuple(f"mlp.shared_experts.{part}" for part in ("gate_proj", "up_proj", "down_proj"))
_LATENT_MODULES = (
    *_NORMS,
    *(f"self_attn.{part}" for part in ("q_proj", "q_a_proj", "q_a_layernorm", "q_b_proj", "o_proj")),
    *(f"self_attn.{part}" for part in ("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj")),
    *_EXPERTS,
    *_SHARED_EXPERTS,
    *_MLP,
)

_LINEAR = (
    _SHARED_WIDTH,
    MetadataField("linear_conv_kernel_dim", "ssm.conv_kernel"),
    MetadataField("linear_key_head_dim", "ssm.state_size"),
    MetadataField("linear_num_key_heads", "ssm.group_count"),
    MetadataField("linear_num_value_heads", "ssm.time_step_rank"),
)
_LINEAR_NAMES = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "conv1d", "norm", "out_proj")
_LINEAR_MODULES = tuple(f"linear_attn.{name}" for name in _LINEAR_NAMES)


def _linear_family(architecture: str) -> ModelFamily:
    """Qwen3-Next and Qwen3.5-MoE, whose arithmetic is the same. In files, both have the projections of Qwen3.5."""
    return ModelFamily(
        architecture=architecture,
        model_type="qwen3_5_moe_text",
        class_name="Qwen3_5MoeForCausalLM",
        fields=(*_COMMON, _EXPERT_COUNT, _EXPERT_WIDTH, _HEAD_DIM, *_LINEAR),
        layer_modules=(*_NORMS, *_ATTENTION, *_QK_NORMS, *_EXPERTS, *_SHARED, *_LINEAR_MODULES),
        layer_tensors=("linear_attn.A_log", "linear_attn.dt_bias"),
        implied={"hidden_act": "silu", "attention_bias": False},
        linear=True,
        names="qwen35moe",
    )


FAMILIES = (
    ModelFamily(
        architecture="qwen3moe",
        model_type="qwen3_moe",
        class_name="Qwen3MoeForCausalLM",
        fields=(*_COMMON, _EXPERT_COUNT, _EXPERT_WIDTH, _HEAD_DIM, _ANY_WIDTH),
        layer_modules=(*_NORMS, *_ATTENTION, *_QK_NORMS, *_EXPERTS, *_MLP),
        implied={"norm_topk_prob": True, "hidden_act": "silu", "attention_bias": False},
    ),
    ModelFamily(
        architecture="qwen2moe",
        model_type="qwen2_moe",
        class_name="Qwen2MoeForCausalLM",
        fields=(*_COMMON, _EXPERT_COUNT, _EXPERT_WIDTH, _ANY_WIDTH, _SHARED_WIDTH),
        layer_modules=(*_NORMS, *_ATTENTION, *_EXPERTS, *_SHARED, *_MLP),
        implied={"norm_topk_prob": False, "hidden_act": "silu", "qkv_bias": True},
    ),
    ModelFamily(
        architecture="llama",
        model_type="mixtral",
        class_name="MixtralForCausalLM",
        fields=(
            *_COMMON,
            MetadataField("num_local_experts", EXPERT_KEY, aliases=("num_experts",)),
            _WIDTH,
            _HEAD_DIM,
        ),
        layer_modules=(*_NORMS, *_ATTENTION, *_EXPERTS),
        implied={"hidden_act": "silu", "sliding_window": None},
        permuted=True,
    ),
    ModelFamily(
        architecture="olmoe",
        model_type="olmoe",
        class_name="OlmoeForCausalLM",
        fields=(*_COMMON, _EXPERT_COUNT, _WIDTH),
        layer_modules=(*_NORMS, *_ATTENTION, *_QK_NORMS, *_EXPERTS),
        implied={"norm_topk_prob": False, "hidden_act": "silu", "attention_bias": False, "clip_qkv": None},
    ),
    ModelFamily(
        architecture="deepseek2",
        model_type="deepseek_v2",
        class_name="DeepseekV2ForCausalLM",
        fields=_LATENT,
        layer_modules=_LATENT_MODULES,
        implied={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "norm_topk_prob": False},
        latent=True,
    ),
    ModelFamily(
        architecture="deepseek2",
        model_type="deepseek_v3",
        class_name="DeepseekV3ForCausalLM",
        fields=_LATENT,
        layer_modules=_LATENT_MODULES,
        layer_tensors=("mlp.gate.e_score_correction_bias",),
        implied={"hidden_act": "silu", "attention_bias": False, "rope_interleave": True},
        latent=True,
        sigmoid=True,
    ),
    ModelFamily(  # read as DeepSeek-V3, whose arithmetic is the same
        architecture="deepseek2",
        model_type="glm4_moe_lite",
        class_name="Glm4MoeLiteForCausalLM",
        fields=_LATENT,
        layer_modules=_LATENT_MODULES,
        layer_tensors=("mlp.gate.e_score_correction_bias",),
        implied={"hidden_act": "silu", "attention_bias": False, "rope_interleave": True},
        latent=True,
        sigmoid=True,
    ),
    ModelFamily(
        architecture="glm4moe",
        model_type="glm4_moe",
        class_name="Glm4MoeForCausalLM",
        fields=_SIGMOID,
        layer_modules=(*_NORMS, *_ATTENTION, *_QK_NORMS, *_EXPERTS, *_SHARED_EXPERTS, *_MLP),
        layer_tensors=("mlp.gate.e_score_correction_bias",),
        by_tensor={
            "attention_bias": "model.layers.0.self_attn.q_proj.bias",
            "use_qk_norm": "model.layers.0.self_attn.q_norm.weight",
        },
        implied={"hidden_act": "silu"},
        sigmoid=True,
    ),
    ModelFamily(
        architecture="dots1",
        model_type="dots1",
        class_name="Dots1ForCausalLM",
        fields=_SIGMOID,
        layer_modules=(*_NORMS, *_ATTENTION, *_QK_NORMS, *_EXPERTS, *_SHARED_EXPERTS, *_MLP),
        layer_tensors=("mlp.gate.e_score_correction_bias",),
        implied={"hidden_act": "silu", "attention_bias": False, "sliding_window": None},
        sigmoid=True,
    ),
    ModelFamily(
        architecture="minimax-m2",
        model_type="minimax_m2",
        class_name="MiniMaxM2ForCausalLM",
        fields=_LOCAL_EXPERTS,
        layer_modules=(*_NORMS, *_ATTENTION, *_QK_NORMS, *_EXPERTS),
        layer_tensors=("mlp.e_score_correction_bias",),
        implied={"hidden_act": "silu"},
        sigmoid=True,
    ),
    ModelFamily(
        architecture="gpt-oss",
        model_type="gpt_oss",
        class_name="GptOssForCausalLM",
        fields=(*_LOCAL_EXPERTS, MetadataField("sliding_window", "attention.sliding_window")),
        layer_modules=(*_NORMS, *_ATTENTION, "mlp.router", *_EXPERTS[1:]),
        layer_tensors=("self_attn.sinks",),
        implied={"hidden_act": "silu", "attention_bias": True},
        rope={"truncate": False},
        alternating=True,
        softmax_of_chosen=True,
    ),
    _linear_family("qwen35moe"),
    _linear_family("qwen3next"),
    ModelFamily(
        architecture="hunyuan-moe",
        model_type="hunyuan_v1_moe",
        class_name="HunYuanMoEV1ForCausalLM",
        fields=_HUNYUAN,
        layer_modules=(
            *_NORMS,
            *_ATTENTION,
            *_HUNYUAN_NORMS,
            "mlp.gate.wg",
            *_EXPERTS[1:],
            *(f"mlp.shared_mlp.{part}" for part in ("gate_proj", "up_proj", "down_proj")),
        ),
        implied={"hidden_act": "silu", "attention_bias": False},
    ),
    ModelFamily(
        architecture="ernie4_5-moe",
        model_type="ernie4_5_moe",
        class_name="Ernie4_5_MoeForCausalLM",
        fields=_ERNIE,
        layer_modules=(*_NORMS, *_ATTENTION, *_EXPERTS, *_SHARED_EXPERTS, *_MLP),
        layer_tensors=("mlp.gate.moe_statics.e_score_correction_bias",),
        implied={"hidden_act": "silu", "use_bias": False},
    ),
    ModelFamily(
        architecture="exaone-moe",
        model_type="exaone_moe",
        class_name="ExaoneMoeForCausalLM",
        fields=_EXAONE,
        layer_modules=(*_NORMS, *_ATTENTION, *_QK_NORMS, *_EXPERTS, *_SHARED_EXPERTS, *_MLP),
        layer_tensors=("mlp.gate.e_score_correction_bias",),
        implied={"hidden_act": "silu"},
        sigmoid=True,
        windows_listed=True,
    ),
    ModelFamily(
        architecture="granitemoe",
        model_type="granitemoe",
        class_name="GraniteMoeForCausalLM",
        fields=(*_COMMON, MetadataField("num_local_experts", EXPERT_KEY, aliases=("num_experts",)), *_GRANITE),
        layer_modules=(
            *_NORMS,
            *_ATTENTION,
            "block_sparse_moe.router",
            *(f"block_sparse_moe.experts.{part}" for part in ("gate_proj", "up_proj", "down_proj")),
        ),
        implied={"hidden_act": "silu", "attention_bias": False},
        permuted=True,
    ),
    ModelFamily(
        architecture="granite",
        model_type="granite",
        class_name="GraniteForCausalLM",
        fields=(*_DENSE, *_GRANITE),
        layer_modules=(*_NORMS, *_ATTENTION, *_MLP),
        implied={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
        permuted=True,
    ),
    ModelFamily(
        architecture="ernie4_5",
        model_type="ernie4_5",
        class_name="Ernie4_5ForCausalLM",
        fields=(*_DENSE, _WIDTH, _HEAD_DIM),
        layer_modules=(*_NORMS, *_ATTENTION, *_MLP),
        implied={"hidden_act": "silu", "use_bias": False},
    ),
    ModelFamily(
        architecture="seed_oss",
        model_type="seed_oss",
        class_name="SeedOssForCausalLM",
        fields=(*_DENSE, _WIDTH, _HEAD_DIM),
        layer_modules=(*_NORMS, *_ATTENTION, *_MLP),
        implied={"hidden_act": "silu", "attention_bias": True, "attention_out_bias": False, "mlp_bias": False},
    ),
    ModelFamily(
        architecture="hunyuan-dense",
        model_type="hunyuan_v1_dense",
        class_name="HunYuanDenseV1ForCausalLM",
        fields=(*_DENSE, _WIDTH, _HEAD_DIM),
        layer_modules=(*_NORMS, *_ATTENTION, *_HUNYUAN_NORMS, *_MLP),
        implied={"hidden_act": "silu", "attention_bias": False},
    ),
    ModelFamily(
        architecture="qwen3",
        model_type="qwen3",
        class_name="Qwen3ForCausalLM",
        fields=(*_DENSE, _WIDTH, _HEAD_DIM),
        layer_modules=(*_NORMS, *_ATTENTION, *_QK_NORMS, *_MLP),
        implied={"hidden_act": "silu", "attention_bias": False},
    ),
    ModelFamily(
        architecture="qwen2",
        model_type="qwen2",
        class_name="Qwen2ForCausalLM",
        fields=(*_DENSE, _WIDTH),
        layer_modules=(*_NORMS, *_ATTENTION, *_MLP),
        implied={"hidden_act": "silu"},
    ),
    ModelFamily(
        architecture="llama",
        model_type="llama",
        class_name="LlamaForCausalLM",
        fields=(*_DENSE, _WIDTH, _HEAD_DIM),
        layer_modules=(*_NORMS, *_ATTENTION, *_MLP),
        implied={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
        permuted=True,
        rope_factors=True,
    ),
)
MODEL_MODULES = ("model.embed_tokens", "model.norm", "lm_head")


def family_of_metadata(metadata: Mapping[str, Any], source: str) -> ModelFamily:
    """Return the family of a GGUF file.

    Raises CheckpointError if the architecture is missing or unknown, or if the way that experts are scored is unknown.
    """
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise CheckpointError(f"{source}: metadata key general.architecture is missing")
    candidates = [family for family in FAMILIES if family.architecture == architecture]
    if not candidates:
        check_architecture(architecture, source)
        known = ", ".join(dict.fromkeys(family.architecture for family in FAMILIES))
        raise CheckpointError(f"{source}: GGUF architecture {architecture!r} is not supported; known: {known}")
    routed = bool(metadata.get(f"{architecture}.{EXPERT_KEY}"))
    gating = metadata_count(metadata, key := f"{architecture}.expert_gating_func", source)
    sigmoid = gating == SIGMOID
    over_chosen = gating == _SOFTMAX_OF_CHOSEN and any(family.softmax_of_chosen for family in candidates)
    if (gating > SIGMOID and not over_chosen) or (sigmoid and not any(family.sigmoid for family in candidates)):
        raise CheckpointError(f"{source}: {key} {gating} is not supported")
    matching = (family for family in candidates if (family.has_experts, family.sigmoid) == (routed, sigmoid))
    return next(matching, candidates[0])


def family_of_model_type(model_type: str, source: str) -> ModelFamily:
    """Return the family of a transformers `model_type`. Raises CheckpointError that lists the known types."""
    for family in FAMILIES:
        if family.model_type == model_type:
            return family
    known = ", ".join(family.model_type for family in FAMILIES)
    raise CheckpointError(f"{source}: there is no GGUF architecture for model_type {model_type!r}; known: {known}")
