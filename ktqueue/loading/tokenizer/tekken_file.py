"""Reads tekken.json, the vocabulary of folders that Mistral publishes without a tokenizer.json.

Special tokens have the first ids, and a token of rank r the id after them by r. Of two pairs of tokens the one that
makes the token of the lower rank is joined first. Knows no tokenizer library.
Source of the format: mistral-common's tokens/tokenizers/tekken.py.
"""

import base64
import binascii
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ktqueue.core.errors import CheckpointError
from ktqueue.loading.gguf.vocabulary import TokenKind, VocabularyData
from ktqueue.loading.json_file import read_json
from ktqueue.loading.tokenizer.added_tokens import AddedToken
from ktqueue.loading.tokenizer.pre_tokenizers import PRE_TOKENIZERS
from ktqueue.loading.tokenizer.tiktoken_file import checked_ranks, merges_of_ranks, spelled

FILE = "tekken.json"
_PRE = "tekken"
_MAX_TOKENS = 1 << 21
_ROLES = {"unk": "<unk>", "bos": "<s>", "eos": "</s>", "pad": "<pad>"}
# Of the first files, which do not list them.
_SPECIAL = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]",
    "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
)  # fmt: skip


def read_tekken(
    folder: Path, settings: Mapping[str, Any], added: Sequence[AddedToken], vocab_size: int = 0
) -> VocabularyData:
    """The vocabulary of `folder`/tekken.json. `settings`, `added` and `vocab_size` do not matter: the file says all.

    Raises CheckpointError.
    """
    path = folder / FILE
    document = read_json(path)
    try:
        config = document["config"]
        count, size = (int(config[name]) for name in ("default_num_special_tokens", "default_vocab_size"))
        if not 0 <= count <= size <= _MAX_TOKENS:
            raise ValueError(f"{count} special tokens of {size}")
        listed = document.get("special_tokens")
        entries = enumerate(_SPECIAL) if listed is None else ((entry["rank"], entry["token_str"]) for entry in listed)
        special = dict(entries)
        ranks = {
            entry["rank"]: base64.b64decode(entry["token_bytes"], validate=True)
            for entry in document["vocab"]
            if entry["rank"] < size - count
        }
        texts = [str(special.get(i, f"<SPECIAL_{i}>")) for i in range(count)]
    except (KeyError, TypeError, AttributeError, ValueError, binascii.Error) as error:
        raise CheckpointError(f"{path}: not a vocabulary of Tekken: {error!r}") from error
    if PRE_TOKENIZERS[_PRE].patterns != (config.get("pattern"),):
        raise CheckpointError(f"{path}: config.pattern splits texts in an unknown way")
    tokens = [spelled(token) for token, _ in checked_ranks(path, ranks)]
    try:
        merges = merges_of_ranks(tokens)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    return VocabularyData(
        model="gpt2",
        pre=_PRE,
        tokens=[*texts, *tokens],
        kinds=[*[TokenKind.CONTROL] * count, *[TokenKind.NORMAL] * len(tokens)],
        merges=merges,
        ids={role: texts.index(text) for role, text in _ROLES.items() if text in texts},
        add_bos=True,
    )
