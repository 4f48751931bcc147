"""Refuses models of unsupported families by their names in config.json or in a GGUF file.

Knows no config classes and no tensors, so that a model is refused before any weight is read. A package that brings such
a family has precedence.
"""

from collections.abc import Mapping
from typing import Any

from ktqueue.core.errors import CheckpointError
from ktqueue.families.family import UnsupportedFamily
from ktqueue.families.unsupported import UNSUPPORTED
from ktqueue.loading.installed import FAMILIES, package_of

_BY_MODEL_TYPE = {model_type: family for family in UNSUPPORTED for model_type in family.model_types}
_BY_ARCHITECTURE = {architecture: family for family in UNSUPPORTED for architecture in family.architectures}


def check_model_type(config: Mapping[str, Any], source: str) -> None:
    """Raise CheckpointError if config.json is of an unsupported family, or if its language model is.

    config: the values of config.json. source: the beginning of the message.
    """
    text_config = config.get("text_config")
    for values in (config, text_config if isinstance(text_config, Mapping) else {}):
        model_type = values.get("model_type")
        if not isinstance(model_type, str) or package_of(FAMILIES, model_type) is None:
            _refuse(_BY_MODEL_TYPE, "model_type", model_type, source)


def check_architecture(architecture: str, source: str) -> None:
    """Raise CheckpointError if a GGUF file is of an unsupported family. source: the beginning of the message."""
    _refuse(_BY_ARCHITECTURE, "GGUF architecture", architecture, source)


def _refuse(families: Mapping[str, UnsupportedFamily], key: str, value: Any, source: str) -> None:
    if isinstance(value, str) and (family := families.get(value)):
        raise CheckpointError(f"{source}: {family.name} is not supported: it has {family.part} ({key} {value!r})")
