"""Metadata keys, modules of a layer and layouts that several families share."""

from ktqueue.families.family import EXPERT_KEY, GgufLayout, MetadataField

_MLP = ("gate_proj", "up_proj", "down_proj")


def below(module: str, *names: str) -> tuple[str, ...]:
    """Return the names of modules below another one."""
    return tuple(f"{module}.{name}" for name in names)


def expert_count(config: str) -> MetadataField:
    """Return the field of the number of experts, which families call differently."""
    return MetadataField(config, EXPERT_KEY, aliases=("num_experts", "num_local_experts"))


def chosen_count(config: str) -> MetadataField:
    """Return the field of the number of experts for each token."""
    return MetadataField(config, "expert_used_count", aliases=("num_experts_per_tok",))


NORMS = ("input_layernorm", "post_attention_layernorm")
LAYER = (*NORMS, *below("self_attn", "q_proj", "k_proj", "v_proj", "o_proj"))
QKV = "self_attn.qkv_proj"
MLP = below("mlp", *_MLP)
EXPERT_STACKS = below("mlp.experts", *_MLP)
EXPERTS = ("mlp.gate", *EXPERT_STACKS)
SHARED = (*below("mlp.shared_expert", *_MLP), "mlp.shared_expert_gate")
SHARED_EXPERTS = below("mlp.shared_experts", *_MLP)
QK_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
CORRECTION = ("mlp.gate.e_score_correction_bias",)

SILU = {"hidden_act": "silu"}
UNBIASED = {**SILU, "attention_bias": False}

SIZES = (
    MetadataField("max_position_embeddings", "context_length"),
    MetadataField("hidden_size", "embedding_length"),
    MetadataField("num_hidden_layers", "block_count"),
    MetadataField("num_attention_heads", "attention.head_count"),
    MetadataField("num_key_value_heads", "attention.head_count_kv"),
    MetadataField("rms_norm_eps", "attention.layer_norm_rms_epsilon", float),
)
ROUTED = (*SIZES, chosen_count("num_experts_per_tok"))
EXPERT_WIDTH = MetadataField("moe_intermediate_size", "expert_feed_forward_length")
WIDTH = MetadataField("intermediate_size", "feed_forward_length")
ANY_WIDTH = MetadataField("intermediate_size", "feed_forward_length", required=False)
# llama.cpp reads both keys, and takes the first for the width of experts in some families.
ONE_WIDTH = (ANY_WIDTH, MetadataField("intermediate_size", "expert_feed_forward_length"))
SHARED_WIDTH = MetadataField("shared_expert_intermediate_size", "expert_shared_feed_forward_length")
HEAD_DIM = MetadataField("head_dim", "attention.key_length", required=False)
DENSE = (*SIZES, WIDTH, HEAD_DIM)
LOCAL_EXPERTS = (*ROUTED, expert_count("num_local_experts"), *ONE_WIDTH, HEAD_DIM)
WINDOW = MetadataField("sliding_window", "attention.sliding_window")
SIGMOID_SIZES = (
    *ROUTED,
    EXPERT_WIDTH,
    WIDTH,
    HEAD_DIM,
    MetadataField("first_k_dense_replace", "leading_dense_block_count", least=0),
    MetadataField("routed_scaling_factor", "expert_weights_scale", float, required=False, absent=1.0),
    MetadataField("norm_topk_prob", "expert_weights_norm", bool, required=False, absent=False),
    MetadataField("n_group", "expert_group_count", required=False, absent=1),
    MetadataField("topk_group", "expert_group_used_count", required=False, absent=1),
)

SIGMOID_LAYOUT = GgufLayout(
    "",
    (*SIGMOID_SIZES, expert_count("n_routed_experts"), MetadataField("n_shared_experts", "expert_shared_count")),
    (*LAYER, *QK_NORMS, *EXPERTS, *SHARED_EXPERTS, *MLP),
    tensors=CORRECTION,
    implied=SILU,
    sigmoid=True,
)
"""Experts that are scored by sigmoid, as in GLM-4.5 and its kin. The architecture is missing."""
