"""Model families that GGUF files can hold: one table entry describes one family.

Knows nothing of tensor contents or tokenizers.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ktqueue.core.errors import CheckpointError
from ktqueue.loading.family import EXPERT_KEY, MetadataField, ModelFamily, packaged_families, packaged_family
from ktqueue.loading.gguf.fields import (
    ANY_WIDTH,
    ATTENTION,
    COMMON,
    DENSE,
    ERNIE,
    EXAONE,
    EXPERT_COUNT,
    EXPERT_WIDTH,
    EXPERTS,
    GEMMA,
    GRANITE,
    HEAD_DIM,
    HUNYUAN,
    HUNYUAN_NORMS,
    INDEXER,
    INDEXER_MODULES,
    LATENT,
    LATENT_MODULES,
    LINEAR,
    LINEAR_MODULES,
    LOCAL_EXPERTS,
    MLP,
    NORMS,
    QK_NORMS,
    SHARED,
    SHARED_EXPERTS,
    SHARED_WIDTH,
    SIGMOID_FIELDS,
    WIDTH,
)
from ktqueue.loading.gguf.header import metadata_count
from ktqueue.loading.gguf.latent import SIGMOID
from ktqueue.loading.installed import FAMILIES as ENTRIES
from ktqueue.loading.installed import describe
from ktqueue.loading.unsupported import check_architecture

_SOFTMAX_OF_CHOSEN = 3  # value of `expert_gating_func` (llama.cpp)


def _gemma_family(
    version: str, model_type: str, fields: tuple[MetadataField, ...], norms: tuple[str, ...]
) -> ModelFamily:
    """Gemma 2 or 3."""
    return ModelFamily(
        architecture=version,
        model_type=model_type,
        class_name=f"{version.capitalize()}ForCausalLM",
        fields=fields,
        layer_modules=(*NORMS, *norms, "pre_feedforward_layernorm", "post_feedforward_layernorm", *ATTENTION, *MLP),
        implied={"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False},
        gemma=True,
    )


def _indexed_family(architecture: str, model_type: str, class_name: str) -> ModelFamily:
    """DeepSeek-V3.2 or GLM-5."""
    return ModelFamily(
        architecture=architecture,
        model_type=model_type,
        class_name=class_name,
        fields=(*LATENT, *INDEXER),
        layer_modules=(*LATENT_MODULES, *INDEXER_MODULES),
        layer_tensors=("mlp.gate.e_score_correction_bias",),
        implied={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
        latent=True,
        indexed=True,
        sigmoid=True,
        next_tokens=True,
        names="glm-dsa",  # the library does not know deepseek32, whose names are the same
    )


def _linear_family(architecture: str, *, dense: bool = False) -> ModelFamily:
    """Qwen3.5, dense or with experts, or Qwen3-Next, whose arithmetic and projections in files are those of
    Qwen3.5-MoE."""
    fields = (*DENSE, WIDTH) if dense else (*COMMON, EXPERT_COUNT, EXPERT_WIDTH, SHARED_WIDTH)
    return ModelFamily(
        architecture=architecture,
        model_type="qwen3_5_text" if dense else "qwen3_5_moe_text",
        class_name="Qwen3_5ForCausalLM" if dense else "Qwen3_5MoeForCausalLM",
        fields=(*fields, HEAD_DIM, *LINEAR),
        layer_modules=(*NORMS, *ATTENTION, *QK_NORMS, *(MLP if dense else (*EXPERTS, *SHARED)), *LINEAR_MODULES),
        layer_tensors=("linear_attn.A_log", "linear_attn.dt_bias"),
        implied={"hidden_act": "silu", "attention_bias": False},
        linear=True,
        next_tokens=True,
        names="qwen35" if dense else "qwen35moe",
    )


FAMILIES = (
    ModelFamily(
        architecture="qwen3moe",
        model_type="qwen3_moe",
        class_name="Qwen3MoeForCausalLM",
        fields=(*COMMON, EXPERT_COUNT, EXPERT_WIDTH, HEAD_DIM, ANY_WIDTH),
        layer_modules=(*NORMS, *ATTENTION, *QK_NORMS, *EXPERTS, *MLP),
        implied={"norm_topk_prob": True, "hidden_act": "silu", "attention_bias": False},
    ),
    ModelFamily(
        architecture="qwen2moe",
        model_type="qwen2_moe",
        class_name="Qwen2MoeForCausalLM",
        fields=(*COMMON, EXPERT_COUNT, EXPERT_WIDTH, ANY_WIDTH, SHARED_WIDTH),
        layer_modules=(*NORMS, *ATTENTION, *EXPERTS, *SHARED, *MLP),
        implied={"norm_topk_prob": False, "hidden_act": "silu", "qkv_bias": True},
    ),
    ModelFamily(
        architecture="llama",
        model_type="mixtral",
        class_name="MixtralForCausalLM",
        fields=(
            *COMMON,
            MetadataField("num_local_experts", EXPERT_KEY, aliases=("num_experts",)),
            WIDTH,
            HEAD_DIM,
        ),
        layer_modules=(*NORMS, *ATTENTION, *EXPERTS),
        implied={"hidden_act": "silu", "sliding_window": None},
        permuted=True,
    ),
    ModelFamily(
        architecture="olmoe",
        model_type="olmoe",
        class_name="OlmoeForCausalLM",
        fields=(*COMMON, EXPERT_COUNT, WIDTH),
        layer_modules=(*NORMS, *ATTENTION, *QK_NORMS, *EXPERTS),
        implied={"norm_topk_prob": False, "hidden_act": "silu", "attention_bias": False, "clip_qkv": None},
    ),
    ModelFamily(
        architecture="deepseek2",
        model_type="deepseek_v2",
        class_name="DeepseekV2ForCausalLM",
        fields=LATENT,
        layer_modules=LATENT_MODULES,
        implied={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "norm_topk_prob": False},
        latent=True,
    ),
    ModelFamily(
        architecture="deepseek2",
        model_type="deepseek_v3",
        class_name="DeepseekV3ForCausalLM",
        fields=LATENT,
        layer_modules=LATENT_MODULES,
        layer_tensors=("mlp.gate.e_score_correction_bias",),
        implied={"hidden_act": "silu", "attention_bias": False, "rope_interleave": True},
        latent=True,
        sigmoid=True,
        next_tokens=True,
    ),
    ModelFamily(  # read as DeepSeek-V3, whose arithmetic is the same
        architecture="deepseek2",
        model_type="glm4_moe_lite",
        class_name="Glm4MoeLiteForCausalLM",
        fields=LATENT,
        layer_modules=LATENT_MODULES,
        layer_tensors=("mlp.gate.e_score_correction_bias",),
        implied={"hidden_act": "silu", "attention_bias": False, "rope_interleave": True},
        latent=True,
        sigmoid=True,
        next_tokens=True,
    ),
    _indexed_family("deepseek32", "deepseek_v32", "DeepseekV32ForCausalLM"),
    _indexed_family("glm-dsa", "glm_moe_dsa", "GlmMoeDsaForCausalLM"),
    ModelFamily(
        architecture="mistral4",
        model_type="mistral4",
        class_name="Mistral4ForCausalLM",
        fields=LATENT,
        layer_modules=LATENT_MODULES,
        implied={"hidden_act": "silu", "attention_bias": False, "rope_interleave": True},
        latent=True,
        growing=True,
    ),
    ModelFamily(
        architecture="glm4moe",
        model_type="glm4_moe",
        class_name="Glm4MoeForCausalLM",
        fields=SIGMOID_FIELDS,
        layer_modules=(*NORMS, *ATTENTION, *QK_NORMS, *EXPERTS, *SHARED_EXPERTS, *MLP),
        layer_tensors=("mlp.gate.e_score_correction_bias",),
        by_tensor={
            "attention_bias": "model.layers.0.self_attn.q_proj.bias",
            "use_qk_norm": "model.layers.0.self_attn.q_norm.weight",
        },
        implied={"hidden_act": "silu"},
        sigmoid=True,
        next_tokens=True,
    ),
    ModelFamily(
        architecture="dots1",
        model_type="dots1",
        class_name="Dots1ForCausalLM",
        fields=SIGMOID_FIELDS,
        layer_modules=(*NORMS, *ATTENTION, *QK_NORMS, *EXPERTS, *SHARED_EXPERTS, *MLP),
        layer_tensors=("mlp.gate.e_score_correction_bias",),
        implied={"hidden_act": "silu", "attention_bias": False, "sliding_window": None},
        sigmoid=True,
    ),
    ModelFamily(
        architecture="minimax-m2",
        model_type="minimax_m2",
        class_name="MiniMaxM2ForCausalLM",
        fields=LOCAL_EXPERTS,
        layer_modules=(*NORMS, *ATTENTION, *QK_NORMS, *EXPERTS),
        layer_tensors=("mlp.e_score_correction_bias",),
        implied={"hidden_act": "silu"},
        sigmoid=True,
    ),
    ModelFamily(
        architecture="gpt-oss",
        model_type="gpt_oss",
        class_name="GptOssForCausalLM",
        fields=(*LOCAL_EXPERTS, MetadataField("sliding_window", "attention.sliding_window")),
        layer_modules=(*NORMS, *ATTENTION, "mlp.router", *EXPERTS[1:]),
        layer_tensors=("self_attn.sinks",),
        implied={"hidden_act": "silu", "attention_bias": True},
        rope={"truncate": False},
        alternating=True,
        softmax_of_chosen=True,
    ),
    _linear_family("qwen35moe"),
    _linear_family("qwen35", dense=True),
    _linear_family("qwen3next"),
    replace(  # whose files are read by the entry above
        _linear_family("qwen3next"),
        model_type="qwen3_next",
        class_name="Qwen3NextForCausalLM",
        implied={"hidden_act": "silu", "attention_bias": False, "norm_topk_prob": True},
        names="",
    ),
    ModelFamily(
        architecture="hunyuan-moe",
        model_type="hunyuan_v1_moe",
        class_name="HunYuanMoEV1ForCausalLM",
        fields=HUNYUAN,
        layer_modules=(
            *NORMS,
            *ATTENTION,
            *HUNYUAN_NORMS,
            "mlp.gate.wg",
            *EXPERTS[1:],
            *(f"mlp.shared_mlp.{part}" for part in ("gate_proj", "up_proj", "down_proj")),
        ),
        implied={"hidden_act": "silu", "attention_bias": False},
    ),
    ModelFamily(
        architecture="ernie4_5-moe",
        model_type="ernie4_5_moe",
        class_name="Ernie4_5_MoeForCausalLM",
        fields=ERNIE,
        layer_modules=(*NORMS, *ATTENTION, *EXPERTS, *SHARED_EXPERTS, *MLP),
        layer_tensors=("mlp.gate.moe_statics.e_score_correction_bias",),
        implied={"hidden_act": "silu", "use_bias": False},
    ),
    ModelFamily(
        architecture="exaone-moe",
        model_type="exaone_moe",
        class_name="ExaoneMoeForCausalLM",
        fields=EXAONE,
        layer_modules=(*NORMS, *ATTENTION, *QK_NORMS, *EXPERTS, *SHARED_EXPERTS, *MLP),
        layer_tensors=("mlp.gate.e_score_correction_bias",),
        implied={"hidden_act": "silu"},
        sigmoid=True,
        next_tokens=True,
        windows_listed=True,
    ),
    ModelFamily(
        architecture="granitemoe",
        model_type="granitemoe",
        class_name="GraniteMoeForCausalLM",
        fields=(*COMMON, MetadataField("num_local_experts", EXPERT_KEY, aliases=("num_experts",)), *GRANITE),
        layer_modules=(
            *NORMS,
            *ATTENTION,
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
        fields=(*DENSE, *GRANITE),
        layer_modules=(*NORMS, *ATTENTION, *MLP),
        implied={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
        permuted=True,
    ),
    ModelFamily(
        architecture="ernie4_5",
        model_type="ernie4_5",
        class_name="Ernie4_5ForCausalLM",
        fields=(*DENSE, WIDTH, HEAD_DIM),
        layer_modules=(*NORMS, *ATTENTION, *MLP),
        implied={"hidden_act": "silu", "use_bias": False},
    ),
    ModelFamily(
        architecture="seed_oss",
        model_type="seed_oss",
        class_name="SeedOssForCausalLM",
        fields=(*DENSE, WIDTH, HEAD_DIM),
        layer_modules=(*NORMS, *ATTENTION, *MLP),
        implied={"hidden_act": "silu", "attention_bias": True, "attention_out_bias": False, "mlp_bias": False},
    ),
    ModelFamily(
        architecture="hunyuan-dense",
        model_type="hunyuan_v1_dense",
        class_name="HunYuanDenseV1ForCausalLM",
        fields=(*DENSE, WIDTH, HEAD_DIM),
        layer_modules=(*NORMS, *ATTENTION, *HUNYUAN_NORMS, *MLP),
        implied={"hidden_act": "silu", "attention_bias": False},
    ),
    ModelFamily(
        architecture="qwen3",
        model_type="qwen3",
        class_name="Qwen3ForCausalLM",
        fields=(*DENSE, WIDTH, HEAD_DIM),
        layer_modules=(*NORMS, *ATTENTION, *QK_NORMS, *MLP),
        implied={"hidden_act": "silu", "attention_bias": False},
    ),
    ModelFamily(
        architecture="qwen2",
        model_type="qwen2",
        class_name="Qwen2ForCausalLM",
        fields=(*DENSE, WIDTH),
        layer_modules=(*NORMS, *ATTENTION, *MLP),
        implied={"hidden_act": "silu"},
    ),
    ModelFamily(
        architecture="llama",
        model_type="llama",
        class_name="LlamaForCausalLM",
        fields=(*DENSE, WIDTH, HEAD_DIM),
        layer_modules=(*NORMS, *ATTENTION, *MLP),
        implied={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
        permuted=True,
        rope_factors=True,
    ),
    _gemma_family("gemma3", "gemma3_text", GEMMA, QK_NORMS),
    _gemma_family(
        "gemma2",
        "gemma2",
        (*GEMMA, MetadataField("attn_logit_softcapping", "attn_logit_softcapping", float, required=False)),
        (),
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
    candidates = candidates or _packaged_rows(architecture)
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
    if (packaged := packaged_family(model_type)) is not None and packaged.gguf is not None:
        return packaged.gguf
    known = ", ".join(family.model_type for family in FAMILIES)
    raise CheckpointError(f"{source}: there is no GGUF architecture for model_type {model_type!r}; known: {known}")


def _packaged_rows(architecture: str) -> list[ModelFamily]:
    """Return how GGUF files of an architecture hold the families of packages.

    If there are none, raises CheckpointError for a package that cannot be used or has an architecture of ktqueue.
    """
    found: list[ModelFamily] = []
    taken: list[str] = []
    try:
        for model_type, family in packaged_families():
            if (row := family.gguf) is None:
                continue
            if row.architecture == architecture:
                found.append(row)
            elif any(known.architecture == row.architecture for known in FAMILIES):
                where = describe(ENTRIES, model_type)
                taken.append(f"{where}: ktqueue has a GGUF architecture {row.architecture} already")
    except CheckpointError:
        if not found:
            raise
    if taken and not found:
        raise CheckpointError(taken[0])
    return found
