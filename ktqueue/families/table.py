"""All families, found by their names in transformers. Tests compare every one of them with transformers."""

from dataclasses import replace

from ktqueue.families.deepseek import DEEPSEEK
from ktqueue.families.family import Family
from ktqueue.families.gemma import GEMMA
from ktqueue.families.glm import GLM
from ktqueue.families.llama import LLAMA
from ktqueue.families.others import OTHERS
from ktqueue.families.qwen import QWEN

FAMILIES = tuple(sorted((*DEEPSEEK, *GEMMA, *GLM, *LLAMA, *OTHERS, *QWEN), key=lambda family: family.class_name))
_BY_TYPE = {family.model_type: family for family in FAMILIES}
_BY_TYPE |= {name: replace(family, **changes) for family in FAMILIES for name, changes in family.aliases.items()}
_UNKNOWN = Family("", "", "")

BY_CLASS = {family.class_name: family for family in FAMILIES if family.decoded is not False}
"""The families that our decoders compute, by the class of the model. Those of packages are added as they are loaded."""
SUPPORTED = {
    "CpuDecoder": tuple(BY_CLASS),
    "GpuDecoder": tuple(BY_CLASS),
    "LatentAttention": tuple(family.attention_class for family in FAMILIES if family.latent),
}
"""The classes that an operator replaces, by the operator's name: `class: supported` in rules."""


def family_of_type(model_type: object) -> Family:
    """Return our family of that model type or alias. For any other type, it is one without names and particulars."""
    return _BY_TYPE.get(model_type, _UNKNOWN) if isinstance(model_type, str) else _UNKNOWN


def register(family: Family) -> None:
    """Let the decoders compute a package's family for the rest of the process. Adding it again has no effect.

    Raises ValueError if there is another family with its class, whose modules rules could not tell apart.
    """
    name = family.class_name
    if BY_CLASS.setdefault(name, family) != family:
        raise ValueError(f"there is another model class {name}")
    for operator in ("CpuDecoder", "GpuDecoder"):
        if name not in SUPPORTED[operator]:
            SUPPORTED[operator] = (*SUPPORTED[operator], name)
