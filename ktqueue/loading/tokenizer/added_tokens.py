"""Tokens that a folder adds to the vocabulary of its tiktoken.model or tokenizer.model. Knows no tokenizer library."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ktqueue.core.errors import CheckpointError
from ktqueue.loading.json_file import optional_json

FILE = "added_tokens.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
_MAX_GAP = 4096  # ids without a token between a vocabulary and a token that is added; each of them gets a text
_NAMES = frozenset(("<unk>", "<s>", "</s>"))  # special tokens of transformers' LlamaTokenizer that no setting must name


class AddedToken(NamedTuple):
    """One token. special: plain text never makes it, and it is no text of an answer."""

    id: int
    text: str
    special: bool


def read_added_tokens(folder: Path, settings: Mapping[str, Any]) -> list[AddedToken]:
    """Return the tokens of `added_tokens_decoder` in `settings` (tokenizer_config.json) and of added_tokens.json.

    They are in the order of their ids. As in transformers, those of added_tokens.json are special if a setting names
    them, `bos_token` to `additional_special_tokens` of tokenizer_config.json or special_tokens_map.json. Raises
    CheckpointError.
    """
    texts = optional_json(folder / FILE)
    special = _NAMES | _named(settings) | _named(optional_json(folder / SPECIAL_TOKENS_FILE))
    decoder = settings.get("added_tokens_decoder") or {}
    try:
        found = {int(i): AddedToken(int(i), str(text), text in special) for text, i in texts.items()}
        found |= {
            int(key): AddedToken(int(key), str(entry["content"]), bool(entry.get("special", True)))
            for key, entry in decoder.items()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{folder}: added_tokens_decoder of tokenizer_config.json is damaged: {error!r}"
        ) from error
    if wrong := [token_id for token_id in found if token_id < 0]:
        raise CheckpointError(f"{folder}: a token id of added_tokens_decoder must not be negative, got {wrong[0]}")
    return [found[token_id] for token_id in sorted(found)]


def check_added_tokens(folder: Path, added: Sequence[AddedToken], size: int) -> None:
    """Check that no added id is far behind the `size` ids of a vocabulary. Raises CheckpointError."""
    if added and (last := added[-1].id) >= size + _MAX_GAP:
        raise CheckpointError(
            f"{folder}: an id of added_tokens_decoder or {FILE} must be below {size + _MAX_GAP}, got {last}"
        )


def _named(settings: Mapping[str, Any]) -> set[str]:
    """The texts of the special tokens that settings name."""
    entries: list[Any] = [value for name, value in settings.items() if name.endswith("_token")]
    for name in ("additional_special_tokens", "extra_special_tokens"):  # the latter is its name since transformers 5
        more = settings.get(name)
        entries += more if isinstance(more, list) else []
    texts = [entry.get("content") if isinstance(entry, dict) else entry for entry in entries]
    return {text for text in texts if isinstance(text, str)}
