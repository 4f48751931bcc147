"""Reads tiktoken.model, the vocabulary of Kimi-K2: a line for each token, its bytes in base64 and its rank.

A token's rank is its id, and of two pairs of tokens the one that makes the token of the lower rank is joined first. The
special tokens are in tokenizer_config.json. Knows no tokenizer library.
Source of the format: https://github.com/openai/tiktoken
"""

import base64
import binascii
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ktqueue.core.errors import CheckpointError
from ktqueue.loading.gguf.vocabulary import TokenKind, VocabularyData, byte_alphabet
from ktqueue.loading.mapped_file import read_file
from ktqueue.loading.tokenizer.added_tokens import AddedToken, check_added_tokens

FILE = "tiktoken.model"
# The file does not say how text is split into words before tokens are joined; the class of the tokenizer does.
_SPLITS: Mapping[str, str] = {"TikTokenTokenizer": "kimi-k2"}
_SPELLING = {byte: character for character, byte in byte_alphabet().items()}
_LONGEST = 1024  # bytes of a token; those of published vocabularies have up to 128


def read_tiktoken(
    folder: Path, settings: Mapping[str, Any], added: Sequence[AddedToken], vocab_size: int = 0
) -> VocabularyData:
    """The vocabulary of `folder`/tiktoken.model, with `settings` from tokenizer_config.json. Raises CheckpointError.

    added: tokens that the file lacks. vocab_size: that of the model.
    """
    path = folder / FILE
    kind = str(settings.get("tokenizer_class"))
    if kind not in _SPLITS:
        raise CheckpointError(
            f"{path}: tokenizer_config.json must name a tokenizer_class whose way to split text is known "
            f"({', '.join(_SPLITS)}), got {kind!r}"
        )
    by_id = {rank: spelled(token) for token, rank in _ranks(path)}
    try:
        merges = merges_of_ranks([by_id[rank] for rank in range(len(by_id))])
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    kinds = dict.fromkeys(by_id, TokenKind.NORMAL)
    check_added_tokens(folder, added, max(len(by_id), vocab_size))
    for token_id, text, special in added:
        by_id[token_id] = text
        kinds[token_id] = TokenKind.CONTROL if special else TokenKind.USER_DEFINED
    size = max(by_id) + 1
    tokens = [by_id.get(token_id, f"[UNUSED{token_id}]") for token_id in range(size)]
    return VocabularyData(
        model="gpt2",
        pre=_SPLITS[kind],
        tokens=tokens,
        kinds=[kinds.get(token_id, TokenKind.UNUSED) for token_id in range(size)],
        merges=merges,
    )


def spelled(token: bytes) -> str:
    """The bytes of a token in GPT-2's byte alphabet."""
    return "".join(map(_SPELLING.__getitem__, token))


def merges_of_ranks(tokens: Sequence[str]) -> list[str]:
    """The merges of a vocabulary that has none, because the id of a token is its rank.

    A token can be made of each pair of tokens that spells it. Pairs are joined in the order of what they make. Raises
    ValueError for a token that is too long, since the time grows with the square of its length.
    """
    if (longest := max(map(len, tokens), default=0)) > _LONGEST:
        raise ValueError(f"a token must have at most {_LONGEST} bytes, got {longest}")
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    merges = []
    for token in tokens:
        halves = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        pairs = [pair for pair in halves if pair[0] in ids and pair[1] in ids]
        pairs.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        merges += [" ".join(pair) for pair in pairs]
    return merges


def _ranks(path: Path) -> list[tuple[bytes, int]]:
    """The tokens and their ranks, which run from 0. Raises CheckpointError that names the line."""
    found: dict[int, bytes] = {}
    for number, line in enumerate(read_file(path).splitlines(), 1):
        if not line:
            continue
        try:
            encoded, rank = line.split()
            found[int(rank)] = base64.b64decode(encoded, validate=True)
        except (ValueError, binascii.Error) as error:
            raise CheckpointError(f"{path}: line {number} is not a token in base64 and its rank") from error
    return checked_ranks(path, found)


def checked_ranks(path: Path, found: Mapping[int, bytes]) -> list[tuple[bytes, int]]:
    """The tokens by rank, which run from 0 and spell every byte. Raises CheckpointError."""
    if not found or sorted(found) != list(range(len(found))) or len(set(found.values())) != len(found):
        raise CheckpointError(f"{path}: the ranks of {len(found)} different tokens must run from 0")
    if not {bytes([byte]) for byte in range(256)} <= set(found.values()):
        raise CheckpointError(f"{path}: each byte must be a token")
    return [(token, rank) for rank, token in sorted(found.items())]
