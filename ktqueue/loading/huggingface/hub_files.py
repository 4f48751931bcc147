"""Decides which files of a Hugging Face repository a model's name means. Accesses no server and no disk."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from ktqueue.core.errors import ConfigError
from ktqueue.core.hub_model import PART, PREFIX, HubModel
from ktqueue.core.units import format_bytes

SAFETENSORS = "safetensors"
"""The name that selects the folder in a repository that also has GGUF files."""
MAX_CHOICES = 40
_QUANTISATION = re.compile(
    r"[-._](?P<quant>(?:UD-)?(?:I?Q\d(?:_\w+)?|TQ\d_\d|(?:MX|NV)FP4(?:_\w+)?|BF16|F16|F32))$", re.I | re.A
)
_NO_MODEL = re.compile(r"(?:^|[-._])(?:mmproj|imatrix)(?:[-._]|$)", re.I)
VOCABULARIES = ("tokenizer.json", "tiktoken.model", "tokenizer.model", "tekken.json")
"""The files that may hold a folder's vocabulary. The first one that exists counts."""
LEGACY_TEMPLATE, TOOL_TEMPLATE = "chat_template.json", "additional_chat_templates/tool_use.jinja"
"""The template of models with encoders in older folders, and the one for requests with tools."""
TOKENIZER_FILES = (
    *VOCABULARIES, "added_tokens.json", "special_tokens_map.json", "tokenizer_config.json", "generation_config.json",
    "chat_template.jinja", LEGACY_TEMPLATE, TOOL_TEMPLATE,
)  # fmt: skip
MODELOPT_FILE = "hf_quant_config.json"
"""What ModelOpt says of quantised weights, in older folders only there."""
_FOLDER_FILES = frozenset(("config.json", MODELOPT_FILE, *TOKENIZER_FILES))
_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_SHARD = re.compile(r"model(?:\.safetensors)?-\d+(?:-of-\d+)?\.safetensors")  # Kimi-K2: model-1-of-61; Qwen3.5: the dot


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository: its `path` in the repository and its `size` in bytes."""

    path: str
    size: int


@dataclass(frozen=True, slots=True)
class HubSelection:
    """The files of one model, small ones first. `entry` is the path of the GGUF file, or empty for the folder."""

    files: tuple[HubFile, ...]
    entry: str

    @property
    def size(self) -> int:
        """In bytes."""
        return sum(file.size for file in self.files)


def select(model: HubModel, files: Iterable[HubFile]) -> HubSelection:
    """Return the files that `model` means, out of all `files` of its repository.

    Raises ConfigError, which lists the choices with their sizes, if no model or more than one fits.
    """
    choices = _choices(sorted(files, key=lambda file: file.path))
    if model.variant is not None:
        fitting = {name: choice for name, choice in choices.items() if _fits(model.variant, name, choice)}
    else:
        fitting = choices
    if len(fitting) == 1:
        return _check_complete(model, next(iter(fitting.values())))
    if not choices:
        raise ConfigError(
            f"{model}: the repository has neither .gguf files nor a model in safetensors (pickled weights such as .bin "
            "and .pt are not read)",
            param="engine.model",
            value=str(model),
        )
    lines = [
        f"{PREFIX}{model.repository}:{name}  {format_bytes(choice.size)}"
        for name, choice in list(_short_names(fitting or choices).items())[:MAX_CHOICES]
    ]
    problem = "has more than one model; choose one" if fitting else f"has no model {model.variant!r}; there are"
    raise ConfigError(
        f"{PREFIX}{model.repository} {problem}:\n" + "\n".join(lines),
        param="engine.model",
        limit=", ".join(_short_names(choices)),
        value=str(model),
    )


def _choices(files: Sequence[HubFile]) -> dict[str, HubSelection]:
    """Return each model of a repository by name.

    The name is the path of its GGUF file without ending and part number, or SAFETENSORS for the folder.
    """
    by_stem: dict[str, list[HubFile]] = {}
    for file in files:
        if file.path.endswith(".gguf") and not _NO_MODEL.search(PurePosixPath(file.path).stem):
            by_stem.setdefault(PART.sub("", file.path.removesuffix(".gguf")), []).append(file)
    choices = {stem: HubSelection(tuple(parts), parts[0].path) for stem, parts in by_stem.items()}
    top = {file.path: file for file in files if "/" not in file.path}
    weights = [file for file in top.values() if _SHARD.fullmatch(file.path)]
    if _WHOLE in top:
        weights = [top[_WHOLE]]
    elif weights and _INDEX in top:
        weights.insert(0, top[_INDEX])
    else:
        weights = []
    if weights and "config.json" in top:
        small = [file for file in files if file.path in _FOLDER_FILES]
        choices[SAFETENSORS] = HubSelection((*small, *weights), "")
    return choices


def _fits(variant: str, name: str, choice: HubSelection) -> bool:
    """Whether a variant as typed means the choice: a quantisation in any case, or a file."""
    if variant in (choice.entry, PurePosixPath(choice.entry).name, name, PurePosixPath(name).name):
        return True
    return variant.lower() in (_quantisation(name).lower(), name.lower() if name == SAFETENSORS else None)


def _quantisation(name: str) -> str:
    """Return the last word of a file's name if it is a quantisation, else the empty string."""
    match = _QUANTISATION.search(PurePosixPath(name).name)
    return match["quant"] if match else ""


def _short_names(choices: dict[str, HubSelection]) -> dict[str, HubSelection]:
    """Return the choices by what a user types: the quantisation if only one choice has it, else the file."""
    quants = [_quantisation(name) for name in choices]
    return {
        quant if quant and quants.count(quant) == 1 else choice.entry or name: choice
        for quant, (name, choice) in zip(quants, choices.items(), strict=True)
    }


def _check_complete(model: HubModel, selection: HubSelection) -> HubSelection:
    """Return the selection. Raises ConfigError if parts, or the tokenizer of a folder, are missing."""
    parts: dict[int, set[int]] = {}
    for file in selection.files:
        if match := PART.search(PurePosixPath(file.path).stem):
            parts.setdefault(int(match["count"]), set()).add(int(match["number"]))
    for count, found in parts.items():
        if missing := set(range(1, count + 1)) - found:
            raise ConfigError(
                f"{model}: parts {sorted(missing)[:8]} of {count} are missing", param="engine.model", value=str(model)
            )
    if not selection.entry and not {*VOCABULARIES} & {file.path for file in selection.files}:
        raise ConfigError(
            f"{model}: the repository has no {' or '.join(VOCABULARIES)}, which a model in safetensors needs; "
            "look for a GGUF of it",
            param="engine.model",
            value=str(model),
        )
    return selection
