"""The sampling parameters that a model's files recommend, for requests that leave them out."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ktqueue.core.errors import InvalidRequest
from ktqueue.core.request import SamplingParams
from ktqueue.loading.gguf.checkpoint import read_parts
from ktqueue.loading.json_file import optional_json
from ktqueue.loading.model_path import SYNTHETIC_PREFIX, resolve

# Fields of SamplingParams, with their keys in GGUF metadata. Source of the keys: gguf.constants.Keys.General.
# generation_config.json calls them as we do.
_GGUF_KEYS = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}

log = logging.getLogger(__name__)


def sampling_defaults(model: str) -> dict[str, float]:
    """The recommended values by field of SamplingParams. Values that are wrong are logged and left out.

    Raises CheckpointError if the files cannot be read.
    """
    if model.startswith(SYNTHETIC_PREFIX):
        return {}
    path = resolve(model)
    if not path.is_dir():
        metadata = read_parts(path)[0].metadata
        return _valid(path, {name: metadata.get(key) for name, key in _GGUF_KEYS.items()})
    file = path / "generation_config.json"
    return _valid(file, optional_json(file))


def _valid(path: Path, values: Mapping[str, Any]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name in _GGUF_KEYS:
        value = values.get(name)
        if value is None:
            continue
        if name == "top_k" and isinstance(value, float) and value.is_integer():
            value = int(value)
        field: dict[str, Any] = {name: value}
        try:
            SamplingParams(**field)
        except InvalidRequest as error:
            log.warning("%s: the recommended value is ignored: %s", path, error.message)
        else:
            found[name] = value
    return found
