"""What describes one model family in GGUF files: metadata keys, tensors, and what its layers are made of.

Knows no particular family and no files.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

EXPERT_KEY = "expert_count"
"""The metadata key, after `{architecture}.`, that only models with routed experts have."""


@dataclass(frozen=True, slots=True)
class MetadataField:
    """A config key, and the GGUF key after `{architecture}.` that holds its value.

    `kind`: int, float or bool. `least`: of an int. `aliases` are other spellings in config files. If a file lacks a
    field that is not `required`, it has the value `absent`; None means transformers' default.
    """

    config: str
    key: str
    kind: type = int
    least: int = 1
    aliases: tuple[str, ...] = ()
    required: bool = True
    absent: float | bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """One model family.

    Families may share an architecture: one with experts and one without, or one that scores experts by softmax and one
    by sigmoid.

    `implied`: config values that the GGUF architecture fixes. `layer_modules`: modules of a layer that hold weights,
    with transformers' names. `layer_tensors`: tensors of a layer whose names end neither in weight nor in bias.
    `permuted`: the rows of q and k are in GGUF's rotary order. `rope_factors`: files may hold factors of the rotary
    frequencies. `latent`: the attention is multi-head latent attention. `sigmoid`: experts are scored by sigmoid.
    `by_tensor`: config values that are true if a file has that tensor. `rope`: rotary parameters that the architecture
    fixes. `alternating`: every second layer, from the first on, has a sliding window. `windows_listed`: files say which
    layers have one. `softmax_of_chosen`: files may say that experts are scored by the softmax over the chosen ones.
    `linear`: layers have linear attention. `gemma`: the model is a Gemma, see gguf/gemma.py. `names`: an architecture
    whose names of tensors the family has, if it is another.
    """

    architecture: str
    model_type: str
    class_name: str
    fields: tuple[MetadataField, ...]
    layer_modules: tuple[str, ...]
    implied: Mapping[str, Any] = field(default_factory=dict)
    permuted: bool = False
    rope_factors: bool = False
    latent: bool = False
    sigmoid: bool = False
    layer_tensors: tuple[str, ...] = ()
    by_tensor: Mapping[str, str] = field(default_factory=dict)
    rope: Mapping[str, Any] = field(default_factory=dict)
    alternating: bool = False
    windows_listed: bool = False
    softmax_of_chosen: bool = False
    linear: bool = False
    gemma: bool = False
    names: str = ""

    @property
    def has_experts(self) -> bool:
        """Whether its layers route tokens to experts."""
        return any(entry.key == EXPERT_KEY for entry in self.fields)
