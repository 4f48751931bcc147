"""The text model of a folder that also holds an encoder of images or sounds: its config and the names of its tensors.

Requests have text only, so the other parts are never read. Knows no tensors.
"""

from collections.abc import Callable
from typing import Any

TEXT_TYPES = (
    *("deepseek_v3", "gemma3_text", "kimi_k2", "llama", "mistral", "mistral4"),
    *("qwen3_5_moe_text", "qwen3_5_text"),
)
"""Model types of text models that compute the same alone. Others may need more than a position for each token."""
_STATED_OUTSIDE = ("quantization_config", "tie_word_embeddings")
_PREFIXES = (("model.language_model.", "model."), ("language_model.", ""), ("lm_head.", "lm_head."), ("mtp.", "mtp."))
"""Beginnings of names in the folder, and in the text model."""

Rename = Callable[[str], str | None]


def text_part(config: dict[str, Any]) -> tuple[dict[str, Any], Rename]:
    """Return the config of the text model, and a function for tensors' names: None for those of other parts.

    A folder of one model, or with a text model that is not one of TEXT_TYPES, is returned as it is.
    """
    text = config.get("text_config")
    if not isinstance(text, dict) or text.get("model_type") not in TEXT_TYPES or "num_hidden_layers" in config:
        return config, lambda name: name
    outside = {name: config[name] for name in _STATED_OUTSIDE if name in config}
    return {**text, **outside}, _name_in_text_model  # what the whole states counts, as in transformers


def _name_in_text_model(name: str) -> str | None:
    found = next(((old, new) for old, new in _PREFIXES if name.startswith(old)), None)
    return None if found is None else found[1] + name.removeprefix(found[0])
