"""Llama 4 in GGUF files: what the architecture fixes, or implies by other keys.

Source: llama.cpp's conversion/llama4.py and models/llama4.cpp. Every fourth layer has no rotary embeddings and sees all
keys, the others see chunks of 8,192 keys. Queries and keys have norms unless there are 128 experts (Maverick).
"""

from collections.abc import Mapping
from typing import Any

from ktqueue.core.errors import CheckpointError
from ktqueue.loading.gguf.header import ModelMetadata

_INTERVAL = 4
_EXPERTS_WITHOUT_NORMS = 128
_WINDOW = "attention.sliding_window"
_CHUNK_KEYS = (_WINDOW, "attention.chunk_size")  # llama.cpp ignores their values, except a window of 0


def llama4_config(metadata: ModelMetadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config keys that only this family has. `config` holds the keys that were read or implied before.

    Raises CheckpointError for files that say that chunks have another size, or that there are none (MobileLLM).
    """
    chunk = int(config["attention_chunk_size"])
    for name in _CHUNK_KEYS:
        if name in metadata and (stated := metadata.count(name)) != chunk:
            raise metadata.error(name, f"must be {chunk}, got {stated}", limit=chunk, value=stated)
    return {"use_qk_norm": config["num_local_experts"] != _EXPERTS_WITHOUT_NORMS}


def check_llama4(prefix: str, config: Mapping[str, Any], source: str) -> None:
    """Check that a config has what GGUF implies. Raises CheckpointError."""
    layers, step = int(config["num_hidden_layers"]), int(config["interleave_moe_layer_step"])
    rotated = [int((i + 1) % _INTERVAL != 0) for i in range(layers)]
    implied = {
        "use_qk_norm": config["num_local_experts"] != _EXPERTS_WITHOUT_NORMS,
        "no_rope_layer_interval": _INTERVAL,
        "no_rope_layers": rotated,
        "layer_types": ["chunked_attention" if turned else "full_attention" for turned in rotated],
        "moe_layers": [*range(step - 1, layers, step)],
    }
    for key, value in implied.items():
        stated = config.get(key, True if key == "use_qk_norm" else None)
        if stated not in (None, []) and stated != value:  # an empty list is transformers' default
            raise CheckpointError(f"{source}: {key} is {stated!r}; GGUF's {prefix} implies {value!r}", param=key)
