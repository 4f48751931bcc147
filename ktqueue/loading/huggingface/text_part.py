"""The text model of a folder that also holds an encoder of images or sounds: its config and the names of its tensors.

Requests have text only, so the other parts are never read. Knows no tensors.
"""

from collections.abc import Callable
from typing import Any

from ktqueue.families.table import family_of_type

_STATED_OUTSIDE = ("quantization_config", "tie_word_embeddings")
_PREFIXES = (("model.language_model.", "model."), ("language_model.", ""), ("lm_head.", "lm_head."), ("mtp.", "mtp."))
"""Beginnings of names in the folder, and in the text model."""

Rename = Callable[[str], str | None]


def text_part(config: dict[str, Any]) -> tuple[dict[str, Any], Rename]:
    """Return the config of the text model, and a function for tensors' names: None for those of other parts.

    A folder of one model, or with a text model that is not known to compute the same alone, is returned as it is.
    """
    text = config.get("text_config")
    if not isinstance(text, dict) or not family_of_type(text.get("model_type")).text or "num_hidden_layers" in config:
        return config, lambda name: name
    outside = {name: config[name] for name in _STATED_OUTSIDE if name in config}
    return {**text, **outside}, _name_in_text_model  # what the whole states counts, as in transformers


def _name_in_text_model(name: str) -> str | None:
    found = next(((old, new) for old, new in _PREFIXES if name.startswith(old)), None)
    return None if found is None else found[1] + name.removeprefix(found[0])
