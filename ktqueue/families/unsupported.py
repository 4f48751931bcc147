"""Model families that are refused by name, with what they have that no operator computes."""

from ktqueue.families.family import UnsupportedFamily

_STATE = "layers that keep a state instead of keys and values"
_SPARSE = "sparse attention, where an indexer chooses blocks of keys"
_OWN_CODE = "an architecture that transformers does not have"

UNSUPPORTED = (
    UnsupportedFamily("Arctic", "dense layers beside the routed ones", ("arctic",), ("arctic",)),
    UnsupportedFamily("A.X K2", "norms that multiply their results by a gate", ("axk2",)),
    UnsupportedFamily("Aria", "experts whose matrices are transposed", ("aria", "aria_text")),
    UnsupportedFamily("Bamba", f"{_STATE} (Mamba 2)", ("bamba",)),
    UnsupportedFamily("DBRX", "one matrix for query, key and value that is clamped", (), ("dbrx",)),
    UnsupportedFamily(
        "DeepSeek-V4", "attention to compressed keys, and experts that are chosen by token id",
        ("deepseek_v4",), ("deepseek4",),
    ),
    UnsupportedFamily("Falcon-H1", f"{_STATE} (Mamba 2)", ("falcon_h1",), ("falcon-h1",)),
    UnsupportedFamily("Falcon-Mamba", f"{_STATE} (Mamba)", ("falcon_mamba",)),
    UnsupportedFamily("Gemma 3n", "embeddings for each layer", (), ("gemma3n",)),
    UnsupportedFamily(
        "Gemma 4's assistant", "attention to the keys and values of another model",
        ("gemma4_assistant", "gemma4_unified_assistant"),
    ),
    UnsupportedFamily("GLM-5-Next", f"{_SPARSE}, and {_STATE}", ("glm5_next", "glm5_next_text")),
    UnsupportedFamily("Granite 4 hybrid", f"{_STATE} (Mamba 2)", (), ("granitehybrid",)),
    UnsupportedFamily("Grok", "a soft cap of attention scores and logits", (), ("grok",)),
    UnsupportedFamily("Hunyuan 4", "hyper-connections", ("hy_v4",)),
    UnsupportedFamily(
        "Inkling", "short convolutions and attention by relative position", ("inkling_mm_model", "inkling_text"),
    ),
    UnsupportedFamily("Jamba", f"{_STATE} (Mamba)", ("jamba",), ("jamba",)),
    UnsupportedFamily("JetMoE", "experts in attention", ("jetmoe",)),
    UnsupportedFamily("Kimi-Linear", f"{_STATE} (Kimi delta attention)", ("kimi_linear",), ("kimi-linear",)),
    UnsupportedFamily("LFM2", "layers with a short convolution", ("lfm2", "lfm2_moe"), ("lfm2", "lfm2moe")),
    UnsupportedFamily("Ling 1", _OWN_CODE, ("bailing_moe",), ("bailingmoe",)),
    UnsupportedFamily("Ling 2.5, Ring 2.5", f"{_STATE} (lightning attention)", ("bailing_hybrid",)),
    UnsupportedFamily(
        "LongCat", "two attention layers in each layer, and experts that copy their input", ("longcat_flash",),
    ),
    UnsupportedFamily("Mamba", _STATE, ("mamba", "mamba2"), ("mamba", "mamba2")),
    UnsupportedFamily(
        "MiniCPM3", "latent attention between scaled embeddings and residuals", ("minicpm3",), ("minicpm3",),
    ),
    UnsupportedFamily("MiniMax-M1", f"{_STATE} (lightning attention)", ("minimax",)),
    UnsupportedFamily(
        "MiniMax-M3", f"{_SPARSE}, and a gate with limits", ("minimax_m3", "minimax_m3_vl", "minimax_m3_vl_text"),
    ),
    UnsupportedFamily(
        "Nemotron-H", f"{_STATE} (Mamba 2), and experts without a gate",
        ("nemotron_h",), ("nemotron_h", "nemotron_h_moe"),
    ),
    UnsupportedFamily("OLMo hybrid", f"{_STATE} (gated delta rule)", ("olmo_hybrid",)),
    UnsupportedFamily("PLaMo 2", f"{_STATE} (Mamba)", ("plamo2",), ("plamo2",)),
    UnsupportedFamily("Qwen4-exp", f"{_SPARSE}, and {_STATE}", ("qwen4_exp", "qwen4_exp_text"), ("qwen4exp",)),
    UnsupportedFamily("RWKV", _STATE, ("rwkv7",), ("rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7")),
    UnsupportedFamily("SmallThinker", "a router in front of attention", ("smallthinker",), ("smallthinker",)),
    UnsupportedFamily("Zamba", f"{_STATE} (Mamba)", ("zamba", "zamba2")),
    UnsupportedFamily("Zaya", "convolutions in attention", ("zaya",)),
)  # fmt: skip
