"""Qwen."""

from dataclasses import replace

from ktqueue.families.family import Family, GgufLayout, MetadataField
from ktqueue.families.parts import (
    ANY_WIDTH,
    DENSE,
    EXPERT_WIDTH,
    EXPERTS,
    HEAD_DIM,
    LAYER,
    MLP,
    QK_NORMS,
    ROUTED,
    SHARED,
    SHARED_WIDTH,
    SILU,
    SIZES,
    UNBIASED,
    WIDTH,
    below,
    expert_count,
)

_NUM_EXPERTS = expert_count("num_experts")
_LINEAR_SIZES = (
    MetadataField("linear_conv_kernel_dim", "ssm.conv_kernel"),
    MetadataField("linear_key_head_dim", "ssm.state_size"),
    MetadataField("linear_num_key_heads", "ssm.group_count"),
    MetadataField("linear_num_value_heads", "ssm.time_step_rank"),
)
_LINEAR_NAMES = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "conv1d", "norm", "out_proj")
_LINEAR_LAYER = (*LAYER, *QK_NORMS, *below("linear_attn", *_LINEAR_NAMES))
_QWEN35 = GgufLayout(
    "qwen35", (*DENSE, *_LINEAR_SIZES), (*_LINEAR_LAYER, *MLP), tensors=("linear_attn.A_log", "linear_attn.dt_bias"),
    implied=UNBIASED, tiled=True, next_tokens=True,
)  # fmt: skip
_QWEN35_MOE = replace(
    _QWEN35,
    architecture="qwen35moe",
    fields=(*ROUTED, _NUM_EXPERTS, EXPERT_WIDTH, SHARED_WIDTH, HEAD_DIM, *_LINEAR_SIZES),
    modules=(*_LINEAR_LAYER, *EXPERTS, *SHARED),
)
QWEN3_MOE = Family(
    "Qwen3 MoE", "qwen3_moe", "Qwen3MoeForCausalLM",
    GgufLayout(
        "qwen3moe", (*ROUTED, _NUM_EXPERTS, EXPERT_WIDTH, HEAD_DIM, ANY_WIDTH), (*LAYER, *QK_NORMS, *EXPERTS, *MLP),
        implied={**UNBIASED, "norm_topk_prob": True}, also=("qwen3vlmoe",),
    ),
)  # fmt: skip
_VL_MOE = {"transposed_experts": True, "fixed": {"norm_topk_prob": True}}

QWEN = (
    Family(
        "Qwen2, Qwen2.5", "qwen2", "Qwen2ForCausalLM",
        GgufLayout("qwen2", (*SIZES, WIDTH), (*LAYER, *MLP), implied=SILU, also=("qwen2vl",)),
        text=True, aliases={name: {} for name in ("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text")},
    ),
    Family(
        "Qwen1.5-MoE, Qwen2-MoE", "qwen2_moe", "Qwen2MoeForCausalLM",
        GgufLayout(
            "qwen2moe",
            (*ROUTED, _NUM_EXPERTS, EXPERT_WIDTH, ANY_WIDTH, SHARED_WIDTH), (*LAYER, *EXPERTS, *SHARED, *MLP),
            implied={**SILU, "norm_topk_prob": False, "qkv_bias": True},
        ),
    ),
    Family(
        "Qwen3, dense", "qwen3", "Qwen3ForCausalLM",
        GgufLayout("qwen3", DENSE, (*LAYER, *QK_NORMS, *MLP), implied=UNBIASED, also=("qwen3vl",)),
        text=True, aliases={"qwen3_vl_text": {}},
    ),
    replace(QWEN3_MOE, text=True, aliases={"qwen3_vl_moe_text": _VL_MOE}),
    Family(
        "Qwen3-Next", "qwen3_next", "Qwen3NextForCausalLM",
        replace(
            _QWEN35_MOE, architecture="qwen3next", loaded_as="qwen3_5_moe_text",
            implied={**UNBIASED, "norm_topk_prob": True}, tiled=False,
        ),
        linear=True, partly_rotated=True, normed_further=True,
    ),
    Family(
        "Qwen3.5 and 3.6, dense, their text", "qwen3_5_text", "Qwen3_5ForCausalLM", _QWEN35,
        linear=True, partly_rotated=True, text=True, normed_further=True,
    ),
    Family(
        "Qwen3.5 MoE, its text", "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", _QWEN35_MOE,
        linear=True, partly_rotated=True, text=True, normed_further=True,
    ),
)  # fmt: skip
