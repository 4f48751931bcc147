"""What tensors are called in the files of a Hugging Face folder, which for some models is not what transformers'
modules are called: renamed as transformers renames them. Knows no files."""

from collections.abc import Callable, Mapping
from typing import Any

from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def to_modules(config: Mapping[str, Any]) -> Callable[[str], str]:
    """The function from a tensor's name in a file to its name in the causal language model of that config.

    What transformers makes of several tensors is not looked at: experts are put together as they are read, and a tensor
    that nobody has a place for is refused later.
    """
    model_type = config.get("model_type")
    class_name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type) if isinstance(model_type, str) else None
    found: list[Any] | None = None
    for key in (class_name, model_type):  # in transformers' order
        if isinstance(key, str) and found is None:
            found = get_checkpoint_conversion_mapping(key)  # type: ignore[no-untyped-call]
    steps = [one for one in found or () if isinstance(one, WeightRenaming)]

    def rename(name: str) -> str:
        for step in steps:
            name, _ = step.rename_source_key(name)
        return name

    return rename
