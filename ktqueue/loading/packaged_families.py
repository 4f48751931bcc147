"""The model families of installed packages, checked when they are first used: see docs/guides/families.md."""

from collections.abc import Iterator
from dataclasses import fields

from ktqueue.core.errors import CheckpointError
from ktqueue.families.family import Family
from ktqueue.families.table import FAMILIES, family_of_type, register
from ktqueue.loading.installed import FAMILIES as ENTRIES
from ktqueue.loading.installed import describe, load_entry, usable_entries

_STATED = ("name", "model_type", "class_name", "gguf", "config", "model", "decoded")
_FACTS = ("partly_rotated", "interleaved", "norm_after_rotary", "windows_rotated")
"""What a package may say of a family. All other fields are for families of ktqueue."""
_PLAIN = Family("", "", "")


def packaged_family(model_type: str) -> Family | None:
    """Return the family of a package for a model_type, or None, and make its class known to the decoders.

    Raises CheckpointError that names the package and what is wrong.
    """
    family = load_entry(ENTRIES, model_type, Family)
    if family is not None and (wrong := _problem(family, model_type)):
        raise CheckpointError(f"{describe(ENTRIES, model_type)}: {wrong}")
    return family


def packaged_families() -> Iterator[Family]:
    """Yield all families of packages that can be used: see usable_entries."""
    return usable_entries(ENTRIES, packaged_family)


def _problem(family: Family, model_type: str) -> str | None:
    """Return why a family cannot be used, or None. Registers its class with the decoders."""
    for part, found in (("config", family.config), ("model", family.model)):
        if not isinstance(found, type) or found.__module__.startswith("transformers."):
            return f"{part} must be a class of the package, got {found!r}"
    for owner, stated in (("the config's", getattr(family.config, "model_type", None)), ("its", family.model_type)):
        if stated != model_type:
            return f"{owner} model_type is {stated!r}, which must be the name of the entry point"
    if (name := getattr(family.model, "__name__", "")) != family.class_name:
        return f"class_name is {family.class_name}, but the model class is {name}"
    if any(known.class_name == name for known in FAMILIES):
        return f"ktqueue has a model class {name} already"
    for entry in fields(Family):
        if entry.name not in (*_STATED, *_FACTS) and getattr(family, entry.name) != getattr(_PLAIN, entry.name):
            return f"{entry.name} is only for families of ktqueue"
    if (layout := family.gguf) and layout.loaded_as and family_of_type(layout.loaded_as).gguf is None:
        return f"loaded_as is {layout.loaded_as!r}, which is no model_type of ktqueue that GGUF files hold"
    if family.decoded:
        try:
            register(family)
        except ValueError as error:
            return str(error)
    return None
