"""The families that are served, each with a tiny random model: those of the decoders, and some that run by modules."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import decoder_families
import latent_families
from tiny_tokenizer import write_tokenizer

from ktqueue.families.family import GgufLayout
from ktqueue.families.table import FAMILIES
from ktqueue.loading.huggingface.causal_models import CAUSAL_MODELS

VOCAB = 384
COMMON = {**decoder_families.COMMON, "vocab_size": VOCAB, "initializer_range": 0.3}  # answers differ more
WINDOWS = {"sliding_window": 7, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}
BY_MODULES: dict[str, dict[str, Any]] = {
    "apertus": {},
    "arcee": {},
    "bitnet": {},
    "exaone4": WINDOWS,
    "glm4": {"head_dim": 16, "pad_token_id": 0},
    "gpt_neox": {},
    "granitemoehybrid": {"layer_types": ["attention"] * 3, "num_local_experts": 0, "shared_intermediate_size": 96},
}
"""Sizes by model type. No decoder computes these families: their modules are those of transformers."""
LLAMA4: dict[str, Any] = {
    "num_hidden_layers": 4,
    "attention_chunk_size": 8192,
    "no_rope_layers": None,
    "floor_scale": 8192,
    "attn_scale": 0.1,
    "moe_layers": None,
}
FILE_SIZES: dict[str, dict[str, Any]] = {
    "afmoe": {"layer_types": ["sliding_attention"] * 3},
    "deepseek_v2": {"q_lora_rank": 64},  # llama.cpp knows the model without it by its number of layers
    "deepseek_v32": {"index_head_dim": 64},  # llama.cpp turns the indexer's keys by a Hadamard matrix
    "dots1": {"sliding_window": None, "num_key_value_heads": 4},
    "ernie4_5_moe": {"use_bias": False},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3_text": {"query_pre_attn_scalar": 16, "layer_types": ["sliding_attention"] * 3},
    "glm_moe_dsa": {"index_head_dim": 64},
    "gpt_oss": {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}},
    "llama": {"attention_bias": False, "mlp_bias": False},
    "llama4_text": LLAMA4,
    "ministral3": {"rope_parameters": {**latent_families.GROWING, "mscale": 1.0, "mscale_all_dim": 1.0}},
    "mistral4": {  # llama.cpp takes the factors of yarn for 1
        "rope_parameters": {
            **latent_families.YARN,
            "original_max_position_embeddings": 8,
            "llama_4_scaling_beta": 0.5,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        }
    },
    "mixtral": {"sliding_window": None},
    "olmoe": {"clip_qkv": None, "num_key_value_heads": 4},
    "phi3": {"sliding_window": None},  # llama.cpp ignores the window of Phi-3
    "phimoe": {"router_jitter_noise": 0.01},  # see page.UNLIKE_LLAMA
    "qwen3_5_moe_text": {"linear_value_head_dim": 16},
    "qwen3_5_text": {"linear_value_head_dim": 16},  # llama.cpp's keys and values have the same size
    "qwen3_next": {"linear_value_head_dim": 16},
}
"""What else a model must be like to be written as a GGUF file that llama.cpp reads, by model type."""


@dataclass(frozen=True, slots=True)
class ServedFamily:
    """One family. `file`: how GGUF files hold it; None if there are none that we read."""

    class_name: str
    model_type: str
    sizes: dict[str, Any]
    by_modules: bool
    file: GgufLayout | None

    @property
    def has_file_sizes(self) -> bool:
        """Whether the model that is written as a GGUF file differs."""
        return self.model_type in FILE_SIZES

    def save(self, folder: Path, *, for_file: bool = False) -> None:
        """Save the random model as transformers does, in float32, with a tokenizer. for_file: the one that is
        written as a GGUF file."""
        sizes = {**COMMON, **self.sizes, **(FILE_SIZES.get(self.model_type, {}) if for_file else {})}
        decoder_families.random_model(self.model_type, sizes).save_pretrained(folder)
        write_tokenizer(folder, VOCAB)


def served_families() -> Iterator[ServedFamily]:
    """Yield our families in the order of their classes, then the families that run by modules."""
    models = list({**decoder_families.FAMILIES, **latent_families.LATENT_FAMILIES}.values())
    for family in FAMILIES:
        sizes = next(sizes for model_type, sizes in models if model_type == family.model_type)
        yield ServedFamily(family.class_name, family.model_type, sizes, False, family.gguf)
    for model_type, sizes in BY_MODULES.items():
        yield ServedFamily(str(CAUSAL_MODELS[model_type]), model_type, sizes, True, None)
