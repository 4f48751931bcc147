"""Names of tensors in a folder whose whole is more than a causal language model, or less.

More: encoders of images or sounds are beside it. Less: the folder has a model without its head. Knows no tensors.
"""

from collections.abc import Callable, Iterable
from typing import Any

from ktqueue.families.table import family_of_type
from ktqueue.loading.huggingface.causal_models import base_prefix

OUTSIDE_BASE = ("lm_head.", "mtp.")
"""Beginnings of names that are outside the model without its head."""
_STATED_OUTSIDE = ("quantization_config", "tie_word_embeddings")
_PARTS = ("layers.", "embed_tokens.", "norm.")
_UNCHANGED = (*OUTSIDE_BASE, *_PARTS, *(f"model.{part}" for part in _PARTS))  # the last ones: Qwen2.5-VL
_PREFIXES = (("model.language_model.", "model."), ("language_model.", ""), *((name, name) for name in _UNCHANGED))
"""Beginnings of names in a folder that also has encoders of images or sounds, and in its text model."""


def text_part(config: dict[str, Any]) -> tuple[dict[str, Any], Callable[[str], str | None]]:
    """Return the config of the text model, and a function for tensors' names: None for those of other parts.

    Requests have text only, so encoders of images or sounds are never read. A folder of one model, or with a text
    model that is not known to compute the same alone, is returned as it is.
    """
    text = config.get("text_config")
    if text is None and "vision_config" in config and family_of_type(config.get("model_type")).text:  # Qwen2.5-VL
        return {name: value for name, value in config.items() if name != "vision_config"}, _name_in_text_model
    if not isinstance(text, dict) or not family_of_type(text.get("model_type")).text or "num_hidden_layers" in config:
        may_be_part = family_of_type(config.get("model_type")).text
        return config, lambda name: (may_be_part and _name_in_text_model(name)) or name
    outside = {name: config[name] for name in _STATED_OUTSIDE if name in config}
    return {**text, **outside}, _name_in_text_model  # what the whole states counts, as in transformers


def _name_in_text_model(name: str) -> str | None:
    found = next(((old, new) for old, new in _PREFIXES if name.startswith(old)), None)
    return None if found is None else found[1] + name.removeprefix(found[0])


def missing_prefix(names: Iterable[str], model_type: object) -> str:
    """Return what the names lack at the beginning, such as `model.`, if the folder has a model without its head.

    Raises CheckpointError if a package brings the family, and it cannot be used.
    """
    prefix = base_prefix(model_type)
    return "" if not prefix or any(name.startswith(f"{prefix}.") for name in names) else f"{prefix}."
