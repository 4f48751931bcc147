"""Reads tokenizer.model, a vocabulary of SentencePiece, which is one message of protocol buffers.

Folders that were published for the `sentencepiece` package have one, and no tokenizer.json. Tokens that were added
later are in added_tokens.json and in tokenizer_config.json. Knows no tokenizer library.
Source of the format: sentencepiece_model.proto of https://github.com/google/sentencepiece; encoding of protocol
buffers: https://protobuf.dev/programming-guides/encoding
"""

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ktqueue.core.errors import CheckpointError
from ktqueue.core.short_repr import short_repr
from ktqueue.loading.gguf.vocabulary import TokenKind, VocabularyData
from ktqueue.loading.mapped_file import map_file
from ktqueue.loading.tokenizer.added_tokens import AddedToken, check_added_tokens

FILE = "tokenizer.model"
_MODELS = {1: "t5", 2: "llama"}  # of trainer_spec.model_type, as GGUF names them: unigram and BPE
_REFUSED_MODELS = {3: "WORD", 4: "CHAR"}
_ADDS_BOS = ("None", "LlamaTokenizer", "LlamaTokenizerFast")
"""Values of `tokenizer_class` whose prompts begin with the token `bos` unless add_bos_token says otherwise."""

_Value = int | float | bytes


@dataclass(frozen=True, slots=True)
class _Message:
    """The fields of a message by number, in the order of the file. The last value of a single field counts."""

    values: Mapping[int, Sequence[_Value]]

    def last(self, number: int, default: Any) -> Any:
        """Return the value of a single field. Raises ValueError if its type is not that of `default`."""
        value = self.values.get(number, [default])[-1]
        if type(value) is not type(default):
            raise ValueError(f"field {number} has the wrong type")
        return value

    def message(self, number: int) -> "_Message":
        """Return the message in a single field, which is empty if it is missing."""
        return _message(self.last(number, b""))


def read_sentencepiece(
    folder: Path, settings: Mapping[str, Any], added: Sequence[AddedToken], vocab_size: int = 0
) -> VocabularyData:
    """Return the vocabulary of `folder`/tokenizer.model.

    settings: those of tokenizer_config.json. added: tokens that the file lacks or that replace its own.
    vocab_size: that of the model. Raises CheckpointError for a damaged file and for what is not computed.
    """
    path = folder / FILE
    try:
        whole = _message(map_file(path).tobytes())
        pieces = [_message(piece) for piece in whole.values.get(1, ()) if isinstance(piece, bytes)]
        tokens = [piece.last(1, b"").decode() for piece in pieces]
        scores = [piece.last(2, 0.0) for piece in pieces]
        kinds = [TokenKind(piece.last(3, 1)) for piece in pieces]
        trainer, normalizer = whole.message(2), whole.message(3)
        model_type = trainer.last(3, 1)
        refused = {
            f"model_type {_REFUSED_MODELS.get(model_type, model_type)}": model_type not in _MODELS,
            "treat_whitespace_as_suffix": bool(trainer.last(24, 0)),
            "escape_whitespaces false": not normalizer.last(5, 1),
        }
        ids = {"unk": trainer.last(40, 0), "bos": trainer.last(41, 1), "eos": trainer.last(42, 2)}
        byte_fallback, charsmap = bool(trainer.last(35, 0)), normalizer.last(2, b"")
        prefix, is_collapsed = bool(normalizer.last(3, 1)), bool(normalizer.last(4, 1))
    except (ValueError, IndexError, struct.error) as error:
        raise CheckpointError(f"{path}: not a vocabulary of SentencePiece: {error}") from error
    if not tokens or len({*tokens}) != len(tokens):
        raise CheckpointError(f"{path}: the {len(tokens)} pieces of the vocabulary must be different texts")
    if reason := next((name for name, is_refused in refused.items() if is_refused), None):
        raise CheckpointError(f"{path}: {reason} is not supported; vocabularies are of the types UNIGRAM and BPE")
    symbols = {token for token, kind in zip(tokens, kinds, strict=True) if kind == TokenKind.USER_DEFINED}
    check_added_tokens(folder, added, max(len(tokens), vocab_size))
    for token in added:
        missing = token.id + 1 - len(tokens)
        tokens += [f"[UNUSED{i}]" for i in range(len(tokens), len(tokens) + missing)]
        kinds += [TokenKind.UNUSED] * missing
        scores += [0.0] * missing
        tokens[token.id] = token.text
        kinds[token.id] = TokenKind.CONTROL if token.special else TokenKind.USER_DEFINED
    return VocabularyData(
        model=_MODELS[model_type],
        pre="default",
        tokens=tokens,
        kinds=kinds,
        scores=scores,
        ids={role: token_id for role, token_id in ids.items() if 0 <= token_id < len(tokens)},
        add_bos=_flag(folder, settings, "add_bos_token", str(settings.get("tokenizer_class")) in _ADDS_BOS),
        add_eos=_flag(folder, settings, "add_eos_token", False),
        add_space_prefix=prefix and settings.get("add_prefix_space") is not False,
        byte_fallback=byte_fallback,
        charsmap=charsmap,
        symbols=frozenset(symbols),
        collapse_spaces=is_collapsed,
        prefix_once=settings.get("legacy") is False,
    )


def _flag(folder: Path, settings: Mapping[str, Any], key: str, default: bool) -> bool:
    value = settings.get(key, default)
    if not isinstance(value, bool | None):
        raise CheckpointError(
            f"{folder / 'tokenizer_config.json'}: {key} must be true or false, got {short_repr(value)}", param=key
        )
    return bool(value)


def _message(data: bytes) -> _Message:
    """Read one message. Raises ValueError, IndexError or struct.error if it is damaged."""
    values: dict[int, list[_Value]] = {}
    for number, value in _fields(data):
        values.setdefault(number, []).append(value)
    return _Message(values)


def _fields(data: bytes) -> Iterator[tuple[int, _Value]]:
    """Yield number and value of each field: an integer, a float of 32 bits, or bytes."""
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        match key & 7:
            case 0:
                value, position = _varint(data, position)
                # Negative numbers of 32 bits are stored as 64 bits.
                yield key >> 3, value - (1 << 64) if value >> 63 else value
            case 1:
                position += 8
            case 2:
                size, position = _varint(data, position)
                position += size
                if position > len(data):
                    raise ValueError(f"a field of {size} bytes is cut off")
                yield key >> 3, data[position - size : position]
            case 5:
                yield key >> 3, struct.unpack_from("<f", data, position)[0]
                position += 4
            case kind:
                raise ValueError(f"unknown kind {kind} of a field")


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """Return an integer, stored in groups of seven bits with the lowest first, and the position behind it."""
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, position
        if shift > 63:
            raise ValueError("an integer has more than 64 bits")
