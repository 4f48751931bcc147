"""What describes one model family: its classes, what the decoders must know, and how GGUF files hold it.

Knows no particular family and no files. Packages bring families of their own with entry points: see
docs/guides/families.md.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ktqueue.core.errors import CheckpointError
from ktqueue.loading.installed import FAMILIES, describe, entry_names, load_entry
from ktqueue.operators.model_classes import MODEL_CLASSES, ModelClass, register

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
    frequencies. `latent`: the attention is multi-head latent attention. `indexed`: an indexer chooses the keys of a
    token. `growing`: queries grow with their position. `sigmoid`: experts are scored by sigmoid.
    `by_tensor`: config values that are true if a file has that tensor. `rope`: rotary parameters that the architecture
    fixes. `alternating`: every second layer, from the first on, has a sliding window. `windows_listed`: files say which
    layers have one. `softmax_of_chosen`: files may say that experts are scored by the softmax over the chosen ones.
    `linear`: layers have linear attention. `next_tokens`: files may have layers behind the model's own that predict
    further tokens. `gemma`: the model is a Gemma, see gguf/gemma.py. `names`: an architecture
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
    indexed: bool = False
    growing: bool = False
    sigmoid: bool = False
    layer_tensors: tuple[str, ...] = ()
    by_tensor: Mapping[str, str] = field(default_factory=dict)
    rope: Mapping[str, Any] = field(default_factory=dict)
    alternating: bool = False
    windows_listed: bool = False
    softmax_of_chosen: bool = False
    linear: bool = False
    next_tokens: bool = False
    gemma: bool = False
    names: str = ""

    @property
    def two_parts(self) -> bool:
        """Whether files hold the matrix that makes keys and values from latents in two parts."""
        return self.indexed or self.growing

    @property
    def has_experts(self) -> bool:
        """Whether its layers route tokens to experts."""
        return any(entry.key == EXPERT_KEY for entry in self.fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model family of a package.

    `config`: a subclass of transformers.PretrainedConfig whose `model_type` is the name of the entry point. `model`: a
    causal language model, a subclass of transformers.PreTrainedModel. It attends through transformers' attention
    interface, and its layers are `model.layers.N`. `decoded`: what our decoders need to know about that class; None:
    they do not compute it, and it runs by its own modules. `gguf`: how GGUF files hold it; None: they do not.
    """

    config: type[Any]
    model: type[Any]
    decoded: ModelClass | None = None
    gguf: ModelFamily | None = None


def packaged_family(model_type: str) -> Family | None:
    """Return the family of a package for a model_type, or None, and make its class known to the decoders.

    Raises CheckpointError that names the package and what is wrong.
    """
    family = load_entry(FAMILIES, model_type, Family)
    if family is not None and (wrong := _problem(family, model_type)):
        raise CheckpointError(f"{describe(FAMILIES, model_type)}: {wrong}")
    return family


def packaged_families() -> Iterator[tuple[str, Family]]:
    """Yield all families of packages that can be used, with their model_type.

    After the last one it raises the first error of `packaged_family`: the broken package may have been the one.
    """
    errors: list[CheckpointError] = []
    for model_type in entry_names(FAMILIES):
        try:
            family = packaged_family(model_type)
        except CheckpointError as error:
            errors.append(error)
            continue
        if family is not None:
            yield model_type, family
    if errors:
        raise errors[0]


def _problem(family: Family, model_type: str) -> str | None:
    """Return why a family cannot be used, or None. Registers its class with the decoders."""
    for part, found in (("config", family.config), ("model", family.model)):
        if not isinstance(found, type) or found.__module__.startswith("transformers."):
            return f"{part} must be a class of the package, got {found!r}"
    if (stated := getattr(family.config, "model_type", None)) != model_type:
        return f"the config's model_type is {stated!r}, which must be the name of the entry point"
    name = family.model.__name__
    if any(entry.name == name for entry in MODEL_CLASSES):
        return f"ktqueue has a model class {name} already"
    decoded, gguf = family.decoded, family.gguf
    if decoded is not None:
        if decoded.name != name:
            return f"decoded is about {decoded.name}, but the model class is {name}"
        if decoded.latent:
            return "latent attention of packages is not supported: decoded.latent must be empty"
        try:
            register(decoded)
        except ValueError as error:
            return str(error)
    if gguf is not None and (gguf.model_type, gguf.class_name) != (model_type, name):
        return f"gguf is about {gguf.model_type} and {gguf.class_name}, not about {model_type} and {name}"
    return None
