"""Builds and runs tokenizers of the tokenizers library, from plain vocabulary data or from a tokenizer.json."""

import base64
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from ktqueue.core.errors import CheckpointError, InvalidRequest
from ktqueue.core.short_repr import short_repr, short_text
from ktqueue.loading.gguf.vocabulary import TokenKind, VocabularyData
from ktqueue.loading.tokenizer.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from ktqueue.loading.tokenizer.tiktoken_file import merges_of_ranks

Model = tokenizers.Tokenizer
SPACE = "\u2581"  # SentencePiece's visible space
CUT_CHARACTERS = 64  # at the end of a beginning; the following text may compose with them (NFC)
MAX_GROWTH = 64  # times that a normaliser may make a text longer; the library aborts the process if memory is short
MAX_PIECE = 512  # characters; longer pieces of a SentencePiece vocabulary are never built by merging
_PROBE = "a \xe9 \u65e5"  # characters of one, two and three bytes
_FOUND_IN_TEXT = (TokenKind.NORMAL, TokenKind.USER_DEFINED)  # the kinds of pieces that SentencePiece finds in a text


def from_json(path: Path, document: Mapping[str, Any]) -> Model:
    """Load a tokenizer.json, whose content is `document`, without truncation and padding. Raises CheckpointError."""
    try:  # before the library, which normalises added tokens
        growth = math.prod(map(_growth, _flat(document.get("normalizer"))))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: the normalizer is damaged: {error!r}") from error
    if growth > MAX_GROWTH:
        raise CheckpointError(f"{path}: the normalizer may make a text {growth:.0f} times longer; at most {MAX_GROWTH}")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises Exception itself, and panics that are none
        raise CheckpointError(f"{path}: {short_text(error)}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    _try(tokenizer, str(path))
    return tokenizer


def _try(model: Model, source: str) -> None:
    """Encode a short text. Raises CheckpointError that names `source` if the library panics."""
    try:
        encode(model, _PROBE, add_special_tokens=True)
    except InvalidRequest as error:
        if isinstance(error.__cause__, Exception):  # such as characters that the vocabulary does not know
            return
        raise CheckpointError(f"{source}: the vocabulary is corrupt: {error.__cause__}") from error


def encode(model: Model, text: str, *, add_special_tokens: bool) -> list[int]:
    """Return the token ids of `text`. Other threads run meanwhile.

    `Tokenizer.encode` of the library would hold the interpreter's lock for the seconds that megabytes of text take.
    During that time the worker could neither run a step nor send a heartbeat. Raises InvalidRequest if the library
    fails, which it does with a panic if the normaliser's data are damaged.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # for a single text a thread pool only does harm
    try:
        ids: list[int] = model.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the library is no Exception, and would end the process
        raise InvalidRequest(f"the tokenizer failed on the text: {error}", param="prompt") from error
    return ids


def shrinkage(model: Model) -> int | None:
    """Return the largest number of bytes of text per byte of a token; None if text may vanish or be joined.

    Only steps that are known to keep text count as safe; an unknown kind of step may do anything.
    """
    if type(model.model) is not models.BPE:
        return None
    if any(token.lstrip or token.rstrip for token in model.get_added_tokens_decoder().values()):
        return None  # such a token removes the white space beside it
    parts = [*_parts(model.normalizer), *_parts(model.pre_tokenizer)]
    if not all(_keeps_text(part) for part in parts):
        return None
    kinds = {part["type"] for part in parts}
    bytes_as_tokens = pre_tokenizers.ByteLevel.alphabet()
    if "ByteLevel" not in kinds:
        if not model.model.byte_fallback:
            return None
        bytes_as_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    if any(model.token_to_id(token) is None for token in bytes_as_tokens):
        return None
    return 3 if "NFC" in kinds else 1  # composing makes UTF-8 at most three times shorter (Unicode FAQ, normalization)


def min_tokens(model: Model, beginning: str) -> int:
    """Return a lower bound for the tokens of any text with this beginning, if `shrinkage` is known.

    Words at the cut are not counted, since the following text may change them. Without words the bound is 0.
    """
    longest = max((len(token.content) for token in model.get_added_tokens_decoder().values()), default=0)
    end = len(beginning) - longest - CUT_CHARACTERS
    encoding = model.encode_batch([beginning], add_special_tokens=False)[0]
    words = [-1 if word is None else word for word in encoding.word_ids]
    at_cut = next((word for word, (_, stop) in zip(words, encoding.offsets, strict=True) if stop > end), 0)
    return sum(0 <= word < at_cut for word in words)


def _parts(step: Any) -> Iterator[dict[str, Any]]:
    """Yield the parts of a normaliser or pre-tokenizer, as in its JSON."""
    return _flat(None if step is None else json.loads(step.__getstate__()))


def _flat(step: Any) -> Iterator[dict[str, Any]]:
    pending = [] if step is None else [step]
    while pending:
        part = pending.pop()
        pending += part.get("normalizers", []) + part.get("pretokenizers", [])
        yield part


def _growth(part: dict[str, Any]) -> float:
    """Return how many times longer a part of a normaliser may make a text."""
    match part["type"]:
        case "Replace":
            replaced = part["pattern"].get("String", "")  # a regular expression may match an empty text
            return max(1.0, len(part["content"].encode()) / max(1, len(replaced.encode())))
        case "Prepend":
            return max(1.0, len(part["prepend"].encode()))
        case "Precompiled":
            _check_charsmap(base64.b64decode(part["precompiled_charsmap"]))
    return 1.0


def _check_charsmap(charsmap: bytes) -> None:
    """Check SentencePiece's compiled map of characters: the bytes of a trie, the trie, and texts that end with a zero.

    Raises ValueError: the library would allocate as much as it states, and abort the process if memory is short.
    """
    size = int.from_bytes(charsmap[:4], "little")
    if not 0 < size <= len(charsmap) - 4:
        raise ValueError(f"its charsmap of {len(charsmap)} bytes states a trie of {size}")
    if (longest := max(map(len, charsmap[4 + size :].split(b"\0")))) > MAX_GROWTH:
        raise ValueError(f"its charsmap has a text of {longest} bytes; at most {MAX_GROWTH}")


def _keeps_text(part: dict[str, Any]) -> bool:
    match part["type"]:
        case "Sequence" | "NFC" | "Prepend" | "ByteLevel" | "Metaspace" | "Digits":
            return True
        case "Split" | "Punctuation":
            return bool(part["behavior"] != "Removed")
        case "Replace":
            if part["pattern"].get("Regex", "").startswith(r"\A(?!"):  # the prefix of a space
                return True
            replaced = part["pattern"].get("String")
            return replaced is not None and len(part["content"].encode()) >= len(replaced.encode())
    return False


def build(data: VocabularyData, source: str) -> Model:
    """Build a tokenizer for `data`. Raises CheckpointError that names `source` if the data are inconsistent."""
    try:
        tokenizer = _byte_level(data, source) if data.model == "gpt2" else _sentence_piece(data)
        kinds = list(zip(data.tokens, data.kinds, strict=True))  # all are in the vocabulary, so they keep their ids
        tokenizer.add_special_tokens(
            [AddedToken(token, special=True, normalized=False) for token, kind in kinds if kind == TokenKind.CONTROL]
        )
        user_defined = [token for token, kind in kinds if kind == TokenKind.USER_DEFINED]
        tokenizer.add_tokens([AddedToken(token, normalized=token in data.symbols) for token in user_defined])
        _add_ends(tokenizer, data)
    except (CheckpointError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises Exception itself, and panics that are none
        raise CheckpointError(f"{source}: the vocabulary is corrupt: {error}") from error
    _try(tokenizer, source)
    return tokenizer


def train_byte_level(pieces: Iterable[str], vocab_size: int, pre: str, special: Sequence[str]) -> Model:
    """Train a byte-level BPE on text. The `special` tokens come last and are part of `vocab_size`."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    split_as(tokenizer, PRE_TOKENIZERS[pre])
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(special), show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(pieces, trainer)
    tokenizer.add_special_tokens(list(special))
    return tokenizer


def _byte_level(data: VocabularyData, source: str) -> Model:
    pre = PRE_TOKENIZERS.get(data.pre)
    if pre is None:
        known = ", ".join(PRE_TOKENIZERS)
        raise CheckpointError(f"{source}: tokenizer.ggml.pre {short_repr(data.pre)} is not supported; known: {known}")
    tokenizer = tokenizers.Tokenizer(models.BPE(_vocabulary(data), _merges(data), ignore_merges=pre.whole_words))
    split_as(tokenizer, pre)
    return tokenizer


def _merges(data: VocabularyData) -> list[tuple[str, str]]:
    plain = (token for token, kind in zip(data.tokens, data.kinds, strict=True) if kind == TokenKind.NORMAL)
    merges = []
    for merge in data.merges or merges_of_ranks(list(plain)):
        left, _, right = merge.partition(" ")
        merges.append((left, right))
    return merges


def split_as(tokenizer: Model, pre: PreTokenizer) -> None:
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    splits: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns
    ]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()


def _sentence_piece(data: VocabularyData) -> Model:
    unknown = data.ids.get("unk")
    if data.model == "t5":
        tokenizer = tokenizers.Tokenizer(
            models.Unigram(_unigram_pieces(data), unk_id=unknown, byte_fallback=data.byte_fallback)
        )
    else:
        tokenizer = tokenizers.Tokenizer(
            models.BPE(
                vocabulary := _vocabulary(data),
                _merges(data) if data.model == "gemma4" else _merges_of_scores(data, vocabulary),
                unk_token=None if unknown is None else data.tokens[unknown],
                fuse_unk=True,
                byte_fallback=data.byte_fallback,
            )
        )
    steps: list[normalizers.Normalizer] = []
    if data.charsmap:
        _check_charsmap(data.charsmap)
        steps.append(normalizers.Precompiled(data.charsmap))
    if data.collapse_spaces:
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    splits: list[pre_tokenizers.PreTokenizer] = []
    if data.prefix_once:
        scheme = "first" if data.add_space_prefix else "never"
        splits.append(pre_tokenizers.Metaspace(SPACE, prepend_scheme=scheme, split=False))
    else:
        steps.append(normalizers.Replace(" ", SPACE))
        steps += [_space_prefix(data.symbols)] if data.add_space_prefix else []
    if data.model == "t5" and data.byte_fallback:
        splits.append(pre_tokenizers.Split(Regex(r"(?<=<)(?=0x[0-9A-F]{2}>)"), "isolated"))
    if splits:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def _unigram_pieces(data: VocabularyData) -> list[tuple[str, float]]:
    """Return the pieces of a unigram model with their scores.

    Only pieces that are NORMAL or USER_DEFINED may be found in a text. The library would find all, so the unknown and
    the unused ones begin with a space here, of which the normaliser leaves none in a text. Those of bytes need their
    names, so a pre-tokenizer cuts such texts. A very low score would change that of an unknown character, which is 10
    below the lowest.
    """
    entries = list(zip(data.tokens, data.scores, data.kinds, strict=True))
    lowest = min((score for _, score, kind in entries if kind in _FOUND_IN_TEXT), default=0.0)
    return [
        (f" {token}" if kind in (TokenKind.UNKNOWN, TokenKind.UNUSED) else token,
         score if kind in _FOUND_IN_TEXT else lowest)
        for token, score, kind in entries
    ]  # fmt: skip


def _space_prefix(symbols: Iterable[str]) -> normalizers.Normalizer:
    """Return what puts a space in front of a text. The library also normalises `symbols`, which must not get one."""
    if not symbols:
        return normalizers.Prepend(SPACE)
    alone = "|".join(re.escape(symbol) for symbol in sorted(symbols))
    return normalizers.Replace(Regex(rf"\A(?!(?:{alone})\z)(?=[\s\S])"), SPACE)


def _merges_of_scores(data: VocabularyData, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Return the merges of a SentencePiece BPE.

    SentencePiece joins the neighbours whose joint piece has the best score. As merges, that is every way to make a
    piece of two pieces, the best piece first.
    """
    ranked: list[tuple[float, int, tuple[str, str]]] = []
    for piece, token_id in vocabulary.items():
        if data.kinds[token_id] not in _FOUND_IN_TEXT:
            continue
        halves = [(piece[:i], piece[i:]) for i in range(1, len(piece))] if len(piece) <= MAX_PIECE else []
        pairs = [pair for pair in halves if pair[0] in vocabulary and pair[1] in vocabulary]
        pairs.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        ranked.extend((-data.scores[token_id], token_id, join) for join in pairs)
    ranked.sort(key=lambda entry: entry[:2])
    return [join for *_, join in ranked]


def _vocabulary(data: VocabularyData) -> dict[str, int]:
    vocabulary: dict[str, int] = {}
    for token_id, token in enumerate(data.tokens):
        vocabulary.setdefault(token, token_id)
    return vocabulary


def _add_ends(tokenizer: Model, data: VocabularyData) -> None:
    ends = {role: data.tokens[data.ids[role]] for role in ("bos", "eos") if role in data.ids}
    first = [ends["bos"]] if data.add_bos and "bos" in ends else []
    last = [ends["eos"]] if data.add_eos and "eos" in ends else []
    if first or last:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*first, "$A", *last], special_tokens=[(ends[role], data.ids[role]) for role in ends]
        )
