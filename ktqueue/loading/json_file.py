"""Reads JSON objects from the files of a Hugging Face folder."""

from pathlib import Path
from typing import Any

from ktqueue.core.codec import CodecError, loads
from ktqueue.core.errors import CheckpointError
from ktqueue.loading.mapped_file import read_file


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file. Raises CheckpointError."""
    try:
        value = loads(read_file(path))
    except CodecError as error:
        raise CheckpointError(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object")
    return value


def optional_json(path: Path) -> dict[str, Any]:
    """Read a JSON object, which is empty if the file does not exist. Raises CheckpointError if it is damaged."""
    return read_json(path) if path.exists() else {}
