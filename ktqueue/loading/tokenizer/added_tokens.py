"""Tokens that a folder adds to the vocabulary of its tiktoken.model or tokenizer.model. Knows no tokenizer library."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ktqueue.core.errors import CheckpointError
from ktqueue.loading.json_file import read_json

FILE = "added_tokens.json"
_MAX_TOKENS = 1 << 24


class AddedToken(NamedTuple):
    """One token. special: plain text never makes it, and it is no text of an answer."""

    id: int
    text: str
    special: bool


def read_added_tokens(folder: Path, settings: Mapping[str, Any]) -> list[AddedToken]:
    """Return the tokens of `added_tokens_decoder` in `settings` (tokenizer_config.json) and of added_tokens.json.

    They are in the order of their ids. Raises CheckpointError.
    """
    file = folder / FILE
    texts = read_json(file) if file.exists() else {}
    decoder = settings.get("added_tokens_decoder") or {}
    try:
        found = {int(i): AddedToken(int(i), str(text), True) for text, i in texts.items()}
        found |= {
            int(key): AddedToken(int(key), str(entry["content"]), bool(entry.get("special", True)))
            for key, entry in decoder.items()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{folder}: added_tokens_decoder of tokenizer_config.json is damaged: {error!r}"
        ) from error
    if wrong := [token_id for token_id in found if not 0 <= token_id < _MAX_TOKENS]:
        raise CheckpointError(f"{folder}: a token id must be between 0 and {_MAX_TOKENS - 1}, got {wrong[0]}")
    return [found[token_id] for token_id in sorted(found)]
