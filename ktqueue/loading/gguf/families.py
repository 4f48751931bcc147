"""Finds the family of a GGUF file, or of a model that becomes one. Knows nothing of tensors or tokenizers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ktqueue.core.errors import CheckpointError
from ktqueue.core.short_repr import short_repr
from ktqueue.families.family import EXPERT_KEY, Family
from ktqueue.families.table import FAMILIES, family_of_type
from ktqueue.loading.gguf.header import ModelMetadata
from ktqueue.loading.gguf.latent import SIGMOID
from ktqueue.loading.installed import FAMILIES as ENTRIES
from ktqueue.loading.installed import describe
from ktqueue.loading.packaged_families import packaged_families, packaged_family
from ktqueue.loading.unsupported import check_architecture

_SOFTMAX_OF_CHOSEN = 3  # value of `expert_gating_func` (llama.cpp)
_IN_FILES = tuple(family for family in FAMILIES if family.gguf is not None)


def family_of_metadata(metadata: Mapping[str, Any], source: str) -> Family:
    """Return the family that reads a GGUF file, with the layout of that file.

    Raises CheckpointError if the architecture is missing or unknown, or if the way that experts are scored is unknown.
    """
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise CheckpointError(f"{source}: metadata key general.architecture is missing")
    candidates = [family for family in _IN_FILES if architecture in _architectures(family)]
    candidates = candidates or _packaged(architecture)
    if not candidates:
        check_architecture(architecture, source)
        known = ", ".join(sorted({name for family in _IN_FILES for name in _architectures(family)}))
        raise CheckpointError(
            f"{source}: GGUF architecture {short_repr(architecture)} is not supported; known: {known}"
        )
    layouts = [family.layout for family in candidates]
    stated = ModelMetadata(architecture, metadata, source)
    routed, gating = bool(stated.get(EXPERT_KEY)), stated.count("expert_gating_func")
    sigmoid = gating == SIGMOID
    over_chosen = gating == _SOFTMAX_OF_CHOSEN and any(layout.softmax_of_chosen for layout in layouts)
    if (gating > SIGMOID and not over_chosen) or (sigmoid and not any(layout.sigmoid for layout in layouts)):
        raise stated.error("expert_gating_func", f"{gating} is not supported")
    fit = ((layout.has_experts, layout.sigmoid) == (routed, sigmoid) for layout in layouts)
    found = next((family for family, fits in zip(candidates, fit, strict=True) if fits), candidates[0])
    if found.layout.architecture == architecture and not found.layout.loaded_as:
        return found
    reader = family_of_type(found.layout.loaded_as or found.model_type)
    names = reader.layout.names or reader.layout.architecture
    layout = replace(reader.layout, architecture=architecture, names=names, tiled=found.layout.tiled)
    return replace(reader, gguf=layout)


def _architectures(family: Family) -> tuple[str, ...]:
    return family.layout.architecture, *family.layout.also


def family_of_model_type(model_type: str, source: str) -> Family:
    """Return the family of a transformers `model_type`, which has a layout. Raises CheckpointError that lists the known
    types."""
    for family in (family_of_type(model_type), packaged_family(model_type)):
        if family is not None and family.gguf is not None:
            return family
    known = ", ".join(family.model_type for family in _IN_FILES)
    raise CheckpointError(f"{source}: there is no GGUF architecture for model_type {model_type!r}; known: {known}")


def _packaged(architecture: str) -> list[Family]:
    """Return the families of packages that GGUF files of an architecture hold.

    If there are none, raises CheckpointError for a package that cannot be used or has an architecture of ktqueue.
    """
    found: list[Family] = []
    taken: list[str] = []
    ours = {name for family in _IN_FILES for name in _architectures(family)}
    try:
        for family in packaged_families():
            if family.gguf is None:
                continue
            if family.gguf.architecture == architecture:
                found.append(family)
            elif family.gguf.architecture in ours:
                where = describe(ENTRIES, family.model_type)
                taken.append(f"{where}: ktqueue has a GGUF architecture {family.gguf.architecture} already")
    except CheckpointError:
        if not found:
            raise
    if taken and not found:
        raise CheckpointError(taken[0])
    return found
