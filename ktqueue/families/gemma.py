"""Gemma 2, 3 and 4."""

from ktqueue.families.family import Family, GemmaLayout, GgufLayout, MetadataField
from ktqueue.families.parts import DENSE, LAYER, MLP, QK_NORMS

_CAPS = tuple(
    MetadataField(name, name, float, required=False) for name in ("final_logit_softcapping", "attn_logit_softcapping")
)
_FIELDS = (*DENSE, MetadataField("sliding_window", "attention.sliding_window", required=False))
_MODULES = (*LAYER, *MLP, "pre_feedforward_layernorm", "post_feedforward_layernorm")
_IMPLIED = {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False}

GEMMA = (
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
    Family("Gemma 4, its text (26B-A4B, 31B)", "gemma4_text", "Gemma4ForCausalLM", text=True, heads_differ=True),
    Family("Gemma 4, its text (12B)", "gemma4_unified_text", "Gemma4UnifiedForCausalLM", text=True, heads_differ=True),
)  # fmt: skip
