"""Builds runnable tokenizers (the door to the tokenizers library) from plain vocabulary data or a tokenizer.json."""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from ktqueue.core.errors import CheckpointError
from ktqueue.loading.gguf.vocabulary import TokenKind, VocabularyData
from ktqueue.loading.tokenizer.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer

Model = tokenizers.Tokenizer
SPACE = "\u2581"  # SentencePiece's visible space
CUT_CHARACTERS = 64  # at the end of a beginning: what follows may compose with them (NFC)
MAX_PIECE = 512  # characters; longer pieces of a SentencePiece vocabulary are never built by merging


def from_json(path: Path) -> Model:
    """A tokenizer.json as it is, without truncation and padding. Raises CheckpointError."""
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{path}: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def encode(model: Model, text: str, *, add_special_tokens: bool) -> list[int]:
    """Token ids of `text`. Other threads run meanwhile: `Tokenizer.encode` would hold the interpreter's lock for the
    seconds that a text of megabytes takes, in which a worker neither steps nor beats."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # one text: a pool of threads is of no use, and of harm
    ids: list[int] = model.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
    return ids


def shrinkage(model: Model) -> int | None:
    """How many bytes of text one byte of a token may stand for at most; None where text may vanish or run together.

    Looks for what keeps text as it is; a kind of tokenizer that is not known here may do anything.
    """
    if type(model.model) is not models.BPE:
        return None
    if any(token.lstrip or token.rstrip for token in model.get_added_tokens_decoder().values()):
        return None  # such a token takes the white space beside it
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
    """How many tokens any text has at least that begins so, where `shrinkage` is known.

    Words at the cut are left out, since what follows may change them; a tokenizer without words says 0.
    """
    longest = max((len(token.content) for token in model.get_added_tokens_decoder().values()), default=0)
    end = len(beginning) - longest - CUT_CHARACTERS
    encoding = model.encode_batch([beginning], add_special_tokens=False)[0]
    words = [-1 if word is None else word for word in encoding.word_ids]
    at_cut = next((word for word, (_, stop) in zip(words, encoding.offsets, strict=True) if stop > end), 0)
    return sum(0 <= word < at_cut for word in words)


def _parts(step: Any) -> Iterator[dict[str, Any]]:
    """The parts of a normalizer or a pre-tokenizer, as its JSON has them."""
    waiting = [] if step is None else [json.loads(step.__getstate__())]
    while waiting:
        part = waiting.pop()
        waiting += part.get("normalizers", []) + part.get("pretokenizers", [])
        yield part


def _keeps_text(part: dict[str, Any]) -> bool:
    match part["type"]:
        case "Sequence" | "NFC" | "Prepend" | "ByteLevel" | "Metaspace" | "Digits":
            return True
        case "Split" | "Punctuation":
            return bool(part["behavior"] != "Removed")
        case "Replace":
            replaced = part["pattern"].get("String")
            return replaced is not None and len(part["content"].encode()) >= len(replaced.encode())
    return False


def build(data: VocabularyData, source: str) -> Model:
    """A tokenizer for `data`. Raises CheckpointError naming `source` where the data do not fit together."""
    try:
        tokenizer = _byte_level(data, source) if data.model == "gpt2" else _sentence_piece(data)
        kinds = list(zip(data.tokens, data.kinds, strict=True))  # the tokens keep their ids: all are in the vocabulary
        tokenizer.add_special_tokens(
            [AddedToken(token, special=True, normalized=False) for token, kind in kinds if kind == TokenKind.CONTROL]
        )
        tokenizer.add_tokens(
            [AddedToken(token, normalized=False) for token, kind in kinds if kind == TokenKind.USER_DEFINED]
        )
        _add_ends(tokenizer, data)
    except CheckpointError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{source}: the vocabulary is corrupt: {error}") from error
    return tokenizer


def train_byte_level(pieces: Iterable[str], vocab_size: int, pre: str, special: Sequence[str]) -> Model:
    """Learn a byte-level BPE from text; `special` tokens come last and count in `vocab_size`."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    _split_as(tokenizer, PRE_TOKENIZERS[pre])
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(special),
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(pieces, trainer)
    tokenizer.add_special_tokens(list(special))
    return tokenizer


def _byte_level(data: VocabularyData, source: str) -> Model:
    pre = PRE_TOKENIZERS.get(data.pre)
    if pre is None:
        known = ", ".join(PRE_TOKENIZERS)
        raise CheckpointError(f"{source}: tokenizer.ggml.pre {data.pre!r} is not supported; known: {known}")
    merges = []
    for merge in data.merges:
        left, _, right = merge.partition(" ")
        merges.append((left, right))
    tokenizer = tokenizers.Tokenizer(models.BPE(_vocabulary(data), merges, ignore_merges=pre.whole_words))
    _split_as(tokenizer, pre)
    return tokenizer


def _split_as(tokenizer: Model, pre: PreTokenizer) -> None:
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
    """SentencePiece BPE joins the neighbours whose joint piece scores best; as merges: every way to make a piece
    of two pieces, best piece first."""
    vocabulary = _vocabulary(data)
    ranked: list[tuple[float, int, tuple[str, str]]] = []
    for piece, token_id in vocabulary.items():
        halves = [(piece[:i], piece[i:]) for i in range(1, len(piece))] if len(piece) <= MAX_PIECE else []
        joins = [pair for pair in halves if pair[0] in vocabulary and pair[1] in vocabulary]
        joins.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        ranked.extend((-data.scores[token_id], token_id, join) for join in joins)
    ranked.sort(key=lambda entry: entry[:2])
    unknown = data.tokens[data.ids["unk"]] if "unk" in data.ids else None
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocabulary, [join for *_, join in ranked], unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    steps: list[normalizers.Normalizer] = [normalizers.Prepend(SPACE)] if data.add_space_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


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
            single=[*first, "$A", *last],
            special_tokens=[(ends[role], data.ids[role]) for role in ends],
        )
