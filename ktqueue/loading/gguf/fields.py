"""Metadata keys and names of modules that several families of GGUF files share. Knows no family."""

from ktqueue.loading.family import EXPERT_KEY, MetadataField

ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
NORMS = ("input_layernorm", "post_attention_layernorm")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
EXPERTS = ("mlp.gate", "mlp.experts.gate_proj", "mlp.experts.up_proj", "mlp.experts.down_proj")
SHARED = tuple(f"mlp.shared_expert{part}" for part in (".gate_proj", ".up_proj", ".down_proj", "_gate"))
DENSE = (
    MetadataField("max_position_embeddings", "context_length"),
    MetadataField("hidden_size", "embedding_length"),
    MetadataField("num_hidden_layers", "block_count"),
    MetadataField("num_attention_heads", "attention.head_count"),
    MetadataField("num_key_value_heads", "attention.head_count_kv"),
    MetadataField("rms_norm_eps", "attention.layer_norm_rms_epsilon", float),
)
COMMON = (*DENSE, MetadataField("num_experts_per_tok", "expert_used_count"))
EXPERT_COUNT = MetadataField("num_experts", EXPERT_KEY, aliases=("num_local_experts",))
EXPERT_WIDTH = MetadataField("moe_intermediate_size", "expert_feed_forward_length")
WIDTH = MetadataField("intermediate_size", "feed_forward_length")
ANY_WIDTH = MetadataField("intermediate_size", "feed_forward_length", required=False)
SHARED_WIDTH = MetadataField("shared_expert_intermediate_size", "expert_shared_feed_forward_length")
HEAD_DIM = MetadataField("head_dim", "attention.key_length", required=False)
LATENT = (
    *(entry for entry in COMMON if entry.config != "num_key_value_heads"),
    MetadataField("n_routed_experts", EXPERT_KEY, aliases=("num_experts", "num_local_experts")),
    EXPERT_WIDTH,
    WIDTH,
    MetadataField("n_shared_experts", "expert_shared_count"),
    MetadataField("routed_scaling_factor", "expert_weights_scale", float, required=False),
    MetadataField("kv_lora_rank", "attention.kv_lora_rank"),
)
INDEXER = (
    MetadataField("index_n_heads", "attention.indexer.head_count"),
    MetadataField("index_head_dim", "attention.indexer.key_length"),
    MetadataField("index_topk", "attention.indexer.top_k"),
)
SIGMOID_FIELDS = (
    *COMMON,
    MetadataField("n_routed_experts", EXPERT_KEY, aliases=("num_experts", "num_local_experts")),
    EXPERT_WIDTH,
    WIDTH,
    HEAD_DIM,
    MetadataField("n_shared_experts", "expert_shared_count"),
    MetadataField("first_k_dense_replace", "leading_dense_block_count", least=0),
    MetadataField("routed_scaling_factor", "expert_weights_scale", float, required=False, absent=1.0),
    MetadataField("norm_topk_prob", "expert_weights_norm", bool, required=False, absent=False),
    MetadataField("n_group", "expert_group_count", required=False, absent=1),
    MetadataField("topk_group", "expert_group_used_count", required=False, absent=1),
)
EXAONE = (
    *(entry for entry in SIGMOID_FIELDS if entry.config not in ("n_routed_experts", "n_shared_experts")),
    EXPERT_COUNT,
    MetadataField("num_shared_experts", "expert_shared_count"),
    MetadataField("sliding_window", "attention.sliding_window"),
)
LOCAL_EXPERTS = (
    *COMMON,
    MetadataField("num_local_experts", EXPERT_KEY, aliases=("num_experts",)),
    ANY_WIDTH,  # llama.cpp reads both keys, and takes this one for the width of experts in some families
    MetadataField("intermediate_size", "expert_feed_forward_length"),
    HEAD_DIM,
)
ERNIE = (
    *DENSE,
    MetadataField("moe_num_experts", EXPERT_KEY, aliases=("num_experts", "num_local_experts")),
    MetadataField("moe_k", "expert_used_count", aliases=("num_experts_per_tok",)),
    EXPERT_WIDTH,
    WIDTH,
    HEAD_DIM,
    MetadataField("moe_num_shared_experts", "expert_shared_count", least=0, required=False, absent=0),
    MetadataField("moe_layer_start_index", "leading_dense_block_count", least=0),
    MetadataField("moe_layer_interval", "interleave_moe_layer_step", required=False, absent=1),
)
GRANITE = (
    WIDTH,
    MetadataField("attention_multiplier", "attention.scale", float),
    MetadataField("embedding_multiplier", "embedding_scale", float),
    MetadataField("residual_multiplier", "residual_scale", float),
    MetadataField("logits_scaling", "logit_scale", float),
)
HUNYUAN = (
    *DENSE,
    MetadataField("num_experts", EXPERT_KEY, aliases=("num_local_experts",)),
    MetadataField("moe_topk", "expert_used_count", aliases=("num_experts_per_tok",)),
    ANY_WIDTH,  # llama.cpp reads both keys, and takes this one for the width of experts in some families
    MetadataField("intermediate_size", "expert_feed_forward_length"),
    HEAD_DIM,
)
QK_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
HUNYUAN_NORMS = ("self_attn.query_layernorm", "self_attn.key_layernorm")
SHARED_EXPERTS = tuple(f"mlp.shared_experts.{part}" for part in ("gate_proj", "up_proj", "down_proj"))
LATENT_MODULES = (
    *NORMS,
    *(f"self_attn.{part}" for part in ("q_proj", "q_a_proj", "q_a_layernorm", "q_b_proj", "o_proj")),
    *(f"self_attn.{part}" for part in ("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj")),
    *EXPERTS,
    *SHARED_EXPERTS,
    *MLP,
)
INDEXER_MODULES = tuple(f"self_attn.indexer.{part}" for part in ("wq_b", "wk", "weights_proj", "k_norm"))

LINEAR = (
    MetadataField("linear_conv_kernel_dim", "ssm.conv_kernel"),
    MetadataField("linear_key_head_dim", "ssm.state_size"),
    MetadataField("linear_num_key_heads", "ssm.group_count"),
    MetadataField("linear_num_value_heads", "ssm.time_step_rank"),
)
LINEAR_NAMES = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "conv1d", "norm", "out_proj")
LINEAR_MODULES = tuple(f"linear_attn.{name}" for name in LINEAR_NAMES)


GEMMA = (
    *DENSE,
    WIDTH,
    HEAD_DIM,
    MetadataField("sliding_window", "attention.sliding_window", required=False),
    MetadataField("final_logit_softcapping", "final_logit_softcapping", float, required=False),
)
