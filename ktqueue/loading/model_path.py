"""Where a model's files are: a path, the built-in demo, or a name on the Hugging Face hub, which is downloaded.

Needs no torch, so that `ktqueue up` finds a wrong name before it starts anything.
"""

import difflib
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ktqueue.core.config import EngineConfig
from ktqueue.core.errors import CheckpointError
from ktqueue.core.hub_model import PREFIX, parse

DEMO = "demo"
SYNTHETIC_PREFIX = "synthetic:"
EXPECTED = f"--model takes a .gguf file, a Hugging Face folder, {PREFIX}OWNER/NAME[:QUANT] to download, or {DEMO}"
MAX_LISTED = 6  # files near a path that is not there
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(?::[\w.-]+)?", re.ASCII)
_HUB_PAGE = re.compile(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)")


def resolve(path: str) -> Path:
    """`demo` to the built-in model's file; any other path as it is.

    Raises CheckpointError, which says what to type instead, where nothing is there.
    """
    if path == DEMO:
        return _built_in()
    if not Path(path).exists():
        raise _missing(path, "no such file or folder")
    return Path(path)


def resolve_model(path: str) -> Path:
    """The same, of which a folder must have a config.json. Raises CheckpointError."""
    place = resolve(path)
    if place.is_dir() and not (place / "config.json").exists():
        if files := sorted(place.glob("*.gguf")):
            listed = ", ".join(str(file) for file in files[:MAX_LISTED])
            raise _wrong(path, f"this folder has no config.json, but GGUF files; give one of them: {listed}")
        raise _missing(path, "this folder has no config.json")
    return place


def _built_in() -> Path:
    try:
        from ktqueue_kernels import DEMO_MODEL
    except ImportError:
        raise CheckpointError(
            "the built-in demo model comes with the kernels, which are not installed: pip install 'ktqueue[worker]'"
        ) from None
    return DEMO_MODEL


def on_this_machine(config: EngineConfig, say: Callable[[str], None]) -> EngineConfig:
    """The settings with a model whose files are here: `hf:` names are downloaded and replaced by the local path.

    A served name is set for them where none is. `say` is given a line for what takes long. Raises CheckpointError for
    a path without a model; all that `hub.download` raises.
    """
    if config.model.startswith(PREFIX):
        from ktqueue.loading.huggingface import hub  # here, since it takes a while to import

        model = parse(config.model)
        path = hub.download(model, say)
        return replace(config, model=str(path), served_model_name=config.served_model_name or model.served_name)
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
    """The error for a path that is none, with what was probably meant."""
    if page := _HUB_PAGE.match(path):
        return _wrong(path, f"{why}; to download it, give --model {PREFIX}{page[1]}")
    hints = []
    if _HUB_NAME.fullmatch(path) and not Path(path).parent.exists() and not path.startswith("."):
        hints.append(f"if it is a model of the Hugging Face hub, give --model {PREFIX}{path}")
    if difflib.get_close_matches(path.lower(), [DEMO], cutoff=0.7):
        hints.append(f"did you mean {DEMO}?")
    elif near := _near(Path(path)):
        hints.append(f"near it: {', '.join(near)}")
    return _wrong(path, "; ".join([why, *hints, EXPECTED]))


def _near(path: Path) -> list[str]:
    """Models in the folder that the path names, else in the last of its folders that exists; the most alike first."""
    folder = path.parent
    try:
        models = [
            place
            for place in folder.iterdir()
            if place.suffix == ".gguf" or (place.is_dir() and (place / "config.json").exists())
        ]
    except OSError:
        return []
    models.sort(key=lambda place: -difflib.SequenceMatcher(None, place.name, path.name).ratio())
    return [str(place) for place in models[:MAX_LISTED]]


def _wrong(path: str, text: str) -> CheckpointError:
    return CheckpointError(f"{path}: {text}", param="engine.model", value=path)
