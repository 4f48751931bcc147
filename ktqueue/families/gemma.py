"""Gemma 2, 3 and 4."""

from dataclasses import replace

from ktqueue.families.family import EXPERT_KEY, Family, GemmaLayout, GgufLayout, MetadataField
from ktqueue.families.parts import DENSE, LAYER, MLP, QK_NORMS, SIZES, WIDTH, WINDOW

_CAPS = tuple(
    MetadataField(name, name, float, required=False) for name in ("final_logit_softcapping", "attn_logit_softcapping")
)
_FIELDS = (*DENSE, MetadataField("sliding_window", "attention.sliding_window", required=False))
_MODULES = (*LAYER, *MLP, "pre_feedforward_layernorm", "post_feedforward_layernorm")
_IMPLIED = {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False}

_GEMMA4 = (
    *(entry for entry in SIZES if entry.config != "num_key_value_heads"),
    WIDTH,
    WINDOW,
    MetadataField("num_experts", EXPERT_KEY, required=False, least=0),
    MetadataField("top_k_experts", "expert_used_count", required=False, least=0),
    MetadataField("moe_intermediate_size", "expert_feed_forward_length", required=False, least=0),
)
_GEMMA4_EXPERTS = (
    *("router.proj", "experts.gate_proj", "experts.up_proj", "experts.down_proj"),
    *("pre_feedforward_layernorm_2", "post_feedforward_layernorm_1", "post_feedforward_layernorm_2"),
)
_GEMMA4_FILES = GgufLayout(
    "gemma4",
    (*_GEMMA4, _CAPS[0]),
    (*_MODULES, *QK_NORMS, *_GEMMA4_EXPERTS),
    tensors=("layer_scalar", "router.scale", "router.per_expert_scale"),
    implied=_IMPLIED,
)

GEMMA = (
    Family("Gemma", "gemma", "GemmaForCausalLM"),
    Family(
        "Gemma 2", "gemma2", "Gemma2ForCausalLM",
        GgufLayout("gemma2", (*_FIELDS, *_CAPS), _MODULES, implied=_IMPLIED, gemma=GemmaLayout(2, 46, capped=True)),
    ),
    Family(
        "Gemma 3, its text", "gemma3_text", "Gemma3ForCausalLM",
        GgufLayout(
            "gemma3", (*_FIELDS, _CAPS[0]), (*_MODULES, *QK_NORMS),
            implied=_IMPLIED, gemma=GemmaLayout(6, 62, local_rope=True),
        ),
        text=True,
    ),
    Family(
        "Gemma 4, its text (26B-A4B, 31B)", "gemma4_text", "Gemma4ForCausalLM",
        _GEMMA4_FILES,
        text=True, heads_differ=True,
    ),
    Family(  # in files there is no difference
        "Gemma 4, its text (12B)", "gemma4_unified_text", "Gemma4UnifiedForCausalLM",
        replace(_GEMMA4_FILES, loaded_as="gemma4_text"),
        text=True, heads_differ=True,
    ),
)  # fmt: skip
