"""Finds a model's files: a path, the built-in demo, or a name on the Hugging Face hub, which is downloaded.

Needs no torch, so `ktqueue up` detects a wrong name before it starts anything.
"""

import difflib
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ktqueue.core.config import EngineConfig
from ktqueue.core.errors import CheckpointError
from ktqueue.core.hub_model import PREFIX, parse

if TYPE_CHECKING:
    from ktqueue.loading.huggingface.hub import HubAccess

DEMO = "demo"
SYNTHETIC_PREFIX = "synthetic:"
EXPECTED = f"a model is a .gguf file, a Hugging Face folder, {PREFIX}OWNER/NAME[:QUANT] to download, or {DEMO}"
MAX_LISTED = 6  # suggestions for a path that does not exist
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(?::[\w.-]+)?", re.ASCII)
_HUB_PAGE = re.compile(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)")


def resolve(path: str) -> Path:
    """Return the file of `demo`, or any other path as it is.

    Raises CheckpointError, which says what to type instead, if there is no such file or folder.
    """
    if path == DEMO:
        return _built_in()
    if not Path(path).exists():
        raise _missing(path, "no such file or folder")
    return Path(path)


def resolve_model(path: str) -> Path:
    """Do what `resolve` does, and require that a folder has a config.json. Raises CheckpointError."""
    found = resolve(path)
    if found.is_dir() and not (found / "config.json").exists():
        if files := sorted(found.glob("*.gguf")):
            listed = ", ".join(str(file) for file in files[:MAX_LISTED])
            raise _wrong(path, f"this folder has no config.json, but it has GGUF files; give one of them: {listed}")
        raise _missing(path, "this folder has no config.json")
    return found


def _built_in() -> Path:
    try:
        from ktqueue_kernels import DEMO_MODEL
    except ImportError:
        raise CheckpointError(
            "the built-in demo model comes with the kernels, which are not installed: pip install 'ktqueue[worker]'"
        ) from None
    return DEMO_MODEL


def on_this_machine(
    config: EngineConfig, show_line: Callable[[str], None], access: "HubAccess | None" = None
) -> EngineConfig:
    """Return the settings with a model whose files are on this machine.

    An `hf:` name is downloaded and replaced by the local path; a served name is set if there is none. `show_line` gets
    a line before anything that takes long. `access` is the way to the hub; None is the one of the HF_* variables.
    Raises CheckpointError for a path without a model, and all that `hub.download` raises.
    """
    if config.model.startswith(PREFIX):
        from ktqueue.loading.huggingface import hub  # imported here, because that takes long

        model = parse(config.model)
        path = hub.download(model, show_line, access)
        return replace(config, model=str(path), served_model_name=config.served_model_name or (model.served_name,))
    if not config.model.startswith(SYNTHETIC_PREFIX):
        resolve_model(config.model)
    if config.tokenizer is not None and not Path(config.tokenizer).exists():
        raise CheckpointError(
            f"{config.tokenizer}: no such folder; --tokenizer takes one with a tokenizer.json, or a .gguf file",
            param="engine.tokenizer",
            value=config.tokenizer,
        )
    return config


def _missing(path: str, why: str) -> CheckpointError:
    """Return the error for a path that does not exist, with what was probably meant."""
    if page := _HUB_PAGE.match(path):
        return _wrong(path, f"{why}; to download it, give {PREFIX}{page[1]}")
    hints = []
    if _HUB_NAME.fullmatch(path) and not Path(path).parent.exists() and not path.startswith("."):
        hints.append(f"if it is a model of the Hugging Face hub, give {PREFIX}{path}")
    if difflib.get_close_matches(path.lower(), [DEMO], cutoff=0.7):
        hints.append(f"did you mean {DEMO}?")
    elif near := _near(Path(path)):
        hints.append(f"similar: {', '.join(near)}")
    return _wrong(path, "; ".join([why, *hints, EXPECTED]))


def _near(path: Path) -> list[str]:
    """Return models in the nearest existing folder of the path, the most similar names first."""
    folder = path.parent
    try:
        models = [
            entry
            for entry in folder.iterdir()
            if entry.suffix == ".gguf" or (entry.is_dir() and (entry / "config.json").exists())
        ]
    except OSError:
        return []
    models.sort(key=lambda entry: -difflib.SequenceMatcher(None, entry.name, path.name).ratio())
    return [str(entry) for entry in models[:MAX_LISTED]]


def _wrong(path: str, text: str) -> CheckpointError:
    return CheckpointError(f"{path}: {text}", param="engine.model", value=path)
