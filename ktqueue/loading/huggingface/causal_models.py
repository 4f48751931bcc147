"""The causal language models of transformers by model type, those that it lists only as parts of others, and those of
packages."""

import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL_MODELS

from ktqueue.core.errors import CheckpointError
from ktqueue.core.short_repr import short_repr
from ktqueue.families.table import FAMILIES, family_of_type
from ktqueue.loading.huggingface.own_models import register_own_models
from ktqueue.loading.installed import FAMILIES as ENTRIES
from ktqueue.loading.installed import describe
from ktqueue.loading.packaged_families import packaged_family

__all__ = ["CAUSAL_MODELS", "base_prefix", "config_class_of"]

register_own_models()
for known in FAMILIES:  # Mistral 4 is missing; AutoModelForCausalLM reads the same table
    CAUSAL_MODELS.setdefault(known.model_type, known.class_name)


def config_class_of(model_type: object, source: str) -> type[transformers.PretrainedConfig]:
    """Return the config class of a causal language model, and register a package's classes with transformers.

    source: the beginning of the message. Raises CheckpointError for a type that neither transformers nor a package has,
    and for a package's family that cannot be used.
    """
    family = packaged_family(model_type) if isinstance(model_type, str) else None
    if not isinstance(model_type, str) or (family is None and model_type not in transformers.CONFIG_MAPPING):
        raise CheckpointError(
            f"{source}: model_type {short_repr(model_type)} is unknown to transformers {transformers.__version__}"
        )
    if family is None or family.config is None:
        if model_type not in CAUSAL_MODELS:
            raise CheckpointError(f"{source}: a model of type {model_type} is not a causal language model")
        return transformers.CONFIG_MAPPING[model_type]
    where = describe(ENTRIES, model_type)
    bases = {"config": transformers.PretrainedConfig, "model": transformers.PreTrainedModel}
    for part, base in bases.items():
        if not issubclass(found := getattr(family, part), base):
            raise CheckpointError(f"{where}: {part} must be a subclass of {base.__name__}, got {found.__name__}")
    if model_type in transformers.CONFIG_MAPPING and transformers.CONFIG_MAPPING[model_type] is not family.config:
        raise CheckpointError(f"{where}: transformers {transformers.__version__} has a model type {model_type} already")
    try:
        transformers.AutoConfig.register(model_type, family.config, exist_ok=True)
        transformers.AutoModelForCausalLM.register(family.config, family.model, exist_ok=True)
    except ValueError as error:  # the model names another config class
        raise CheckpointError(f"{where}: {error}") from error
    return family.config


def base_prefix(model_type: object) -> str:
    """Return the name of the module that has everything but the head, such as `model`; empty for an unknown type.

    Raises CheckpointError if a package brings the family, and it cannot be used.
    """
    if not isinstance(model_type, str):
        return ""
    if family_of_type(model_type).model_type:
        return "model"
    family = packaged_family(model_type)
    model = getattr(transformers, CAUSAL_MODELS.get(model_type, ""), None) if family is None else family.model
    return getattr(model, "base_model_prefix", "")
