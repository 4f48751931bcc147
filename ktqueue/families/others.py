"""Families of makers with one or two of them, by name."""

from dataclasses import replace

from ktqueue.families.family import Family, GgufLayout, MetadataField
from ktqueue.families.parts import (
    CORRECTION,
    DENSE,
    EXPERT_STACKS,
    EXPERT_WIDTH,
    EXPERTS,
    HEAD_DIM,
    LAYER,
    LOCAL_EXPERTS,
    MLP,
    NORMS,
    ONE_WIDTH,
    QK_NORMS,
    QKV,
    ROUTED,
    SHARED_EXPERTS,
    SHARED_WIDTH,
    SIGMOID_LAYOUT,
    SIGMOID_SIZES,
    SILU,
    SIZES,
    UNBIASED,
    WIDTH,
    WINDOW,
    below,
    chosen_count,
    expert_count,
)

_ERNIE = {**SILU, "use_bias": False}
_GRANITE_SIZES = (
    WIDTH,
    MetadataField("attention_multiplier", "attention.scale", float),
    MetadataField("embedding_multiplier", "embedding_scale", float),
    MetadataField("residual_multiplier", "residual_scale", float),
    MetadataField("logits_scaling", "logit_scale", float),
)
_GRANITE_EXPERTS = tuple(name.replace("mlp", "block_sparse_moe") for name in ("mlp.router", *EXPERT_STACKS))
_HUNYUAN_LAYER = (*LAYER, "self_attn.query_layernorm", "self_attn.key_layernorm")
_WINDOW_OR_0 = replace(WINDOW, least=0, required=False, none=0)

OTHERS = (
    Family(
        "AFMoE (Arcee's Trinity)", "afmoe", "AfmoeForCausalLM",
        GgufLayout(
            "afmoe",
            (
                *ROUTED, expert_count("num_experts"), EXPERT_WIDTH, WIDTH, HEAD_DIM, WINDOW,
                MetadataField("num_shared_experts", "expert_shared_count", least=0),
                MetadataField("num_dense_layers", "leading_dense_block_count", least=0),
                MetadataField("route_scale", "expert_weights_scale", float),
            ),
            (
                *LAYER, *QK_NORMS, "self_attn.gate_proj", "pre_mlp_layernorm", "post_mlp_layernorm",
                "mlp.router.gate", *EXPERT_STACKS, *SHARED_EXPERTS, *MLP,
            ),
            tensors=("mlp.expert_bias",), implied={**UNBIASED, "mup_enabled": True, "global_attn_every_n_layers": 4},
            stated={"expert_weights_norm": True}, sigmoid=True, window_period=4,
        ),
    ),
    Family(
        "dots.llm1", "dots1", "Dots1ForCausalLM",
        replace(SIGMOID_LAYOUT, architecture="dots1", implied={**UNBIASED, "sliding_window": None}),
        group_score=2,
    ),
    Family(
        "ERNIE 4.5, dense", "ernie4_5", "Ernie4_5ForCausalLM",
        GgufLayout("ernie4_5", DENSE, (*LAYER, *MLP), implied=_ERNIE),
        interleaved=True,
    ),
    Family(
        "ERNIE 4.5", "ernie4_5_moe", "Ernie4_5_MoeForCausalLM",
        GgufLayout(
            "ernie4_5-moe",
            (
                *DENSE, expert_count("moe_num_experts"), chosen_count("moe_k"), EXPERT_WIDTH,
                MetadataField("moe_num_shared_experts", "expert_shared_count", least=0, required=False, absent=0),
                MetadataField("moe_layer_start_index", "leading_dense_block_count", least=0),
                MetadataField("moe_layer_interval", "interleave_moe_layer_step", required=False, absent=1),
            ),
            (*LAYER, *EXPERTS, *SHARED_EXPERTS, *MLP),
            tensors=("mlp.gate.moe_statics.e_score_correction_bias",), implied=_ERNIE,
        ),
        interleaved=True,
    ),
    Family(
        "K-EXAONE", "exaone_moe", "ExaoneMoeForCausalLM",
        replace(
            SIGMOID_LAYOUT, architecture="exaone-moe", windows_listed=True, next_tokens=True,
            fields=(
                *SIGMOID_SIZES, expert_count("num_experts"), WINDOW,
                MetadataField("num_shared_experts", "expert_shared_count"),
            ),
        ),
        windows_rotated=True, group_score=2,
    ),
    Family(
        "gpt-oss", "gpt_oss", "GptOssForCausalLM",
        GgufLayout(
            "gpt-oss", (*LOCAL_EXPERTS, WINDOW), (*LAYER, "mlp.router", *EXPERT_STACKS), tensors=("self_attn.sinks",),
            implied={**SILU, "attention_bias": True}, rope={"truncate": False},
            window_period=2, softmax_of_chosen=True,
        ),
        transposed_experts=True, experts_in_turns=True, quant_method="mxfp4",
    ),
    Family(
        "Granite, dense", "granite", "GraniteForCausalLM",
        GgufLayout(
            "granite", (*SIZES, *_GRANITE_SIZES), (*LAYER, *MLP),
            implied={**UNBIASED, "mlp_bias": False}, permuted=True,
        ),
    ),
    Family("Granite Swash", "granite_swa", "GraniteSWAForCausalLM"),
    Family(
        "Granite MoE", "granitemoe", "GraniteMoeForCausalLM",
        GgufLayout(
            "granitemoe", (*ROUTED, expert_count("num_local_experts"), *_GRANITE_SIZES), (*LAYER, *_GRANITE_EXPERTS),
            implied=UNBIASED, permuted=True,
        ),
    ),
    Family(
        "Hunyuan 3", "hy_v3", "HYV3ForCausalLM",
        GgufLayout(
            "hy_v3",
            (
                *ROUTED, expert_count("num_experts"), EXPERT_WIDTH, WIDTH, HEAD_DIM,
                MetadataField("num_shared_experts", "expert_shared_count", required=False, absent=1),
                MetadataField("router_scaling_factor", "expert_weights_scale", float),
            ),
            (*LAYER, *QK_NORMS, *EXPERTS, *SHARED_EXPERTS, *MLP), tensors=("mlp.e_score_correction_bias",),
            implied={**UNBIASED, "mlp_bias": False}, stated={"expert_weights_norm": True}, sigmoid=True, names="dots1",
            bare_tensors=True, mlp_kinds=True,
        ),
    ),
    Family(
        "Hunyuan, dense", "hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM",
        GgufLayout("hunyuan-dense", DENSE, (*_HUNYUAN_LAYER, *MLP), implied=UNBIASED),
        norm_after_rotary=True,
    ),
    Family(
        "Hunyuan-A13B", "hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM",
        GgufLayout(
            "hunyuan-moe",
            (*SIZES, expert_count("num_experts"), chosen_count("moe_topk"), *ONE_WIDTH, HEAD_DIM),
            (
                *_HUNYUAN_LAYER, "mlp.gate.wg", *EXPERT_STACKS,
                *below("mlp.shared_mlp", "gate_proj", "up_proj", "down_proj"),
            ),
            implied=UNBIASED,
        ),
        norm_after_rotary=True,
    ),
    Family(
        "Laguna", "laguna", "LagunaForCausalLM",
        GgufLayout(
            "laguna",
            (
                *(entry for entry in ROUTED if entry.config != "num_attention_heads"),
                expert_count("num_experts"), EXPERT_WIDTH, WIDTH, SHARED_WIDTH,
                MetadataField("moe_routed_scaling_factor", "expert_weights_scale", float),
            ),
            (*LAYER, *QK_NORMS, "self_attn.g_proj", *EXPERTS, *SHARED_EXPERTS, *MLP), tensors=CORRECTION,
            implied={**UNBIASED, "moe_router_logit_softcapping": 0.0}, stated={"expert_weights_norm": True},
            sigmoid=True, names="step35", mlp_kinds=True, heads_listed=True,
        ),
        partly_rotated=True,
    ),
    Family("Mellum 2", "mellum", "MellumForCausalLM"),
    Family(
        "MiMo-V2-Flash", "mimo_v2_flash", "MiMoV2FlashForCausalLM",
        GgufLayout(
            "mimo2",
            (
                *(entry for entry in ROUTED if entry.config != "num_key_value_heads"),
                expert_count("n_routed_experts"), EXPERT_WIDTH, WIDTH, WINDOW,
                MetadataField("attention_value_scale", "attention.value_scale", float, required=False),
            ),
            (*LAYER, *EXPERTS, *MLP), tensors=("self_attn.sinks", "mlp.gate.e_score_correction_bias"),
            implied={**UNBIASED, "norm_topk_prob": True}, sigmoid=True, mlp_kinds=True,
        ),
        partly_rotated=True, window_heads=2, group_score=2,
    ),
    Family(
        "MiniMax-M2", "minimax_m2", "MiniMaxM2ForCausalLM",
        GgufLayout(
            "minimax-m2", LOCAL_EXPERTS, (*LAYER, *QK_NORMS, *EXPERTS), tensors=("mlp.e_score_correction_bias",),
            implied=SILU, sigmoid=True,
        ),
        partly_rotated=True, rotated_key="rotary_dim",
    ),
    Family(
        "OLMoE", "olmoe", "OlmoeForCausalLM",
        GgufLayout(
            "olmoe", (*ROUTED, expert_count("num_experts"), WIDTH), (*LAYER, *QK_NORMS, *EXPERTS),
            implied={**UNBIASED, "norm_topk_prob": False, "clip_qkv": None},
        ),
        single_norms=True,
    ),
    Family(
        "Phi-3, Phi-4-mini", "phi3", "Phi3ForCausalLM",
        GgufLayout(
            "phi3", (*SIZES, WIDTH, _WINDOW_OR_0),
            (*NORMS, QKV, "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"),
            implied=SILU, rope_lists=("attention_factor",),
        ),
        partly_rotated=True,
    ),
    Family(
        "Phi-3.5-MoE", "phimoe", "PhimoeForCausalLM",
        GgufLayout(
            "phimoe", (*ROUTED, expert_count("num_local_experts"), WIDTH, _WINDOW_OR_0),
            (*LAYER, "mlp.router", *EXPERT_STACKS), implied={**SILU, "router_jitter_noise": 0.01},
            by_tensor={"attention_bias": "model.layers.0.self_attn.q_proj.bias", "lm_head_bias": "lm_head.bias"},
            rope_lists=("short_mscale", "long_mscale"),
        ),
    ),
    Family(
        "Step-3.5-Flash, and the text of Step-3.7-Flash", "step3p5", "Step3p5ForCausalLM",
        GgufLayout(
            "step35",
            (
                *(entry for entry in ROUTED if "head_count" not in entry.key),
                expert_count("n_routed_experts"), EXPERT_WIDTH, WIDTH, WINDOW,
                MetadataField("share_expert_dim", "expert_shared_feed_forward_length"),
                MetadataField("moe_router_scaling_factor", "expert_weights_scale", float, required=False, absent=1.0),
            ),
            (*LAYER, *QK_NORMS, "self_attn.g_proj", *EXPERTS, *SHARED_EXPERTS, *MLP), tensors=CORRECTION,
            implied=UNBIASED, stated={"expert_weights_norm": True}, sigmoid=True, mlp_kinds=True, limits=True,
        ),
        partly_rotated=True, text=True, queries_differ=True,
    ),
    Family(
        "Seed-OSS", "seed_oss", "SeedOssForCausalLM",
        GgufLayout(
            "seed_oss", DENSE, (*LAYER, *MLP),
            implied={**SILU, "attention_bias": True, "attention_out_bias": False, "mlp_bias": False},
        ),
    ),
)  # fmt: skip
