"""Folders with a lone tokenizer.model: ids equal the rules of SentencePiece, and what is not computed is refused.

The ids of the sentencepiece package itself are equal on 1,500 strings for each of six vocabularies that it trained.
"""

import json
import random
import struct
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from ktqueue.core.errors import CheckpointError, InvalidRequest
from ktqueue.loading.convert import convert
from ktqueue.loading.gguf.vocabulary import TokenKind
from ktqueue.loading.tokenizer import library
from ktqueue.loading.tokenizer.files import vocabulary_of_folder
from ktqueue.loading.tokenizer.tokenizer import Tokenizer, load_tokenizer

WORDS = ("\u2581the", "\u2581th", "\u2581t", "th", "he", "er", "ther", "\u2581he", "\u2581\u2581", "e\u2581", "hee")
LETTERS = ("\u2581", "t", "h", "e", "r", "\n", "\xe9")
SPECIAL = {"<unk>": TokenKind.UNKNOWN, "<s>": TokenKind.CONTROL, "</s>": TokenKind.CONTROL}
SPELLED = {f"<0x{byte:02X}>": TokenKind.BYTE for byte in range(256)}
KINDS = {**SPECIAL, **SPELLED, **dict.fromkeys((*WORDS, *LETTERS), TokenKind.NORMAL), "<sep>": TokenKind.USER_DEFINED}
Entry = tuple[str, float, TokenKind]
ENTRIES = [(piece, -float(place) if place > 258 else 0.0, kind) for place, (piece, kind) in enumerate(KINDS.items())]
TEXTS = ("", " ", "the there", "  the\n\nthe ", "t\xe9h\u65e5 \U0001f98a", "he<sep>the <sep>t", "</s>the")


def varint(value: int) -> bytes:
    low, value = value & 127, value >> 7
    return bytes([low]) if not value else bytes([low | 128]) + varint(value)


def field(number: int, value: float | bytes | dict[int, Any]) -> bytes:
    """Encode one field of a message."""
    match value:
        case float():
            return varint(number << 3 | 5) + struct.pack("<f", value)
        case int():
            return varint(number << 3) + varint(value & (1 << 64) - 1)
        case bytes():
            return varint(number << 3 | 2) + varint(len(value)) + value
    return field(number, b"".join(field(key, entry) for key, entry in value.items()))


def model_file(
    trainer: dict[int, Any], normalizer: dict[int, Any] | None = None, entries: Sequence[Entry] = ENTRIES
) -> bytes:
    pieces = b"".join(field(1, {1: piece.encode(), 2: score, 3: int(kind)}) for piece, score, kind in entries)
    return (
        pieces
        + field(2, {40: 0, 41: 1, 42: 2, 43: -1, **trainer})
        + field(3, {2: b"", 3: 1, 4: 0, **(normalizer or {})})
    )


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., Tokenizer]:
    def make(trainer: dict[int, Any], normalizer: dict[int, Any] | None = None, **settings: Any) -> Tokenizer:
        (tmp_path / "tokenizer.model").write_bytes(model_file(trainer, normalizer))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        (tmp_path / "config.json").write_text(json.dumps({"vocab_size": len(ENTRIES) + 4}))
        return load_tokenizer(str(tmp_path))

    return make


def joined(parts: list[str]) -> list[str]:
    """Join the neighbours with the best score until none are a piece, as the bpe model does."""
    scores = {piece: score for piece, score, kind in ENTRIES if kind == TokenKind.NORMAL}
    while pairs := [(-scores[a + b], place) for place, (a, b) in enumerate(pairwise(parts)) if a + b in scores]:
        place = min(pairs)[1]
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return parts


def likeliest(text: list[str]) -> list[str]:
    """Return the pieces of the highest sum of scores, as the unigram model does. Unknown characters cost 10 more."""
    scores = {piece: score for piece, score, kind in ENTRIES if kind == TokenKind.NORMAL}
    unknown = min(scores.values()) - 10
    best: list[tuple[float, list[str]]] = [(0.0, [])]
    for end in range(1, len(text) + 1):
        ways = [("".join(text[start:end]), *best[start]) for start in range(end)]
        known = [(total + scores.get(piece, unknown), [*path, piece]) for piece, total, path in ways
                 if piece in scores or len(piece) == 1]  # fmt: skip
        best.append(max(known, key=lambda way: way[0]))
    return best[-1][1]


def spelled(pieces: list[str]) -> list[int]:
    """Return the ids of pieces. Characters without a piece become bytes."""
    ids = {piece: place for place, (piece, *_) in enumerate(ENTRIES)}
    return [i for piece in pieces for i in ([ids[piece]] if piece in ids else [3 + byte for byte in piece.encode()])]


@pytest.mark.parametrize(("kind", "rule"), [(1, likeliest), (2, joined)])
def test_ids_follow_the_rules_of_sentencepiece(
    kind: int, rule: Callable[[list[str]], list[str]], load: Callable[..., Tokenizer]
) -> None:
    tokenizer = load({3: kind, 35: 1}, tokenizer_class="LlamaTokenizer", eos_token="</s>")
    draw = random.Random(5)
    for text in (*TEXTS[:5], *("".join(draw.choices((*"ther \n", "\xe9", "\u65e5"), k=k)) for k in range(1, 60))):
        expected = spelled(rule(list(("\u2581" + text).replace(" ", "\u2581")))) if text else []
        assert tokenizer.encode_plain(text) == expected, text
        assert tokenizer.encode(text) == [1, *expected]
        assert b"".join(map(tokenizer.token_bytes, expected)).decode() == (" " + text if text else "")
    assert (tokenizer.size, tokenizer.eos_token_ids) == (len(ENTRIES) + 4, frozenset({2}))


@pytest.mark.parametrize(("kind", "rule"), [(1, likeliest), (2, joined)])
@pytest.mark.parametrize("text", ["t<0x0A>e", f"t[UNUSED{len(ENTRIES)}]e", "t<unk>e"])
def test_names_of_tokens_that_are_no_text_are_read_as_text(
    text: str, kind: int, rule: Callable[[list[str]], list[str]], load: Callable[..., Tokenizer]
) -> None:
    assert load({3: kind, 35: 1}).encode_plain(text) == spelled(rule(list("\u2581" + text)))


def test_no_prefix_follows_a_symbol_but_it_follows_a_special_token(load: Callable[..., Tokenizer]) -> None:
    ids = {piece: place for place, (piece, *_) in enumerate(ENTRIES)}
    encode = load({3: 2, 35: 1}).encode_plain
    assert encode("he<sep>t") == [ids["\u2581he"], ids["<sep>"], ids["t"]]
    assert encode("he</s>t") == [ids["\u2581he"], ids["</s>"], ids["\u2581t"]]
    encode = load({3: 2, 35: 1}, legacy=False).encode_plain
    assert encode("he</s>t") == [ids["\u2581he"], ids["</s>"], ids["t"]]
    encode = load({3: 2, 35: 1}, {3: 0}).encode_plain
    assert encode("he t") == [ids["he"], ids["\u2581t"]]
    encode = load({3: 2, 35: 1}, {4: 1}).encode_plain
    assert encode("  he   t ") == [ids["\u2581he"], ids["\u2581t"]]
    assert encode(" \nt\n ") == spelled(joined(list("\u2581\nt\n")))
    added = {str(len(ENTRIES) + 1): {"content": "<turn>", "special": True}}
    tokenizer = load({3: 2, 35: 1}, added_tokens_decoder=added, chat_template="{{ bos_token }}", bos_token="<s>")
    assert tokenizer.encode_plain("he<turn>t") == [ids["\u2581he"], len(ENTRIES) + 1, ids["\u2581t"]]
    assert tokenizer.template is not None and tokenizer.template.special["bos_token"] == "<s>"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\x0a\xff", "not a vocabulary of SentencePiece"),
        (b"\x0a\x7fab", "a field of 127 bytes is cut off"),
        (b"\x0f", "unknown kind 7 of a field"),
        (b"\x12\x00", "the 0 pieces of the vocabulary must be different texts"),
        (model_file({3: 4}), "model_type CHAR is not supported"),
        (model_file({3: 1, 24: 1}), "treat_whitespace_as_suffix is not supported"),
        (model_file({3: 1}, {5: 0}), "escape_whitespaces false is not supported"),
    ],
)
def test_what_is_not_computed_is_refused(data: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(data)
    with pytest.raises(CheckpointError, match=words):
        load_tokenizer(str(tmp_path))


def test_an_id_far_behind_the_vocabulary_is_refused(load: Callable[..., Tokenizer], tmp_path: Path) -> None:
    added = {"16777215": {"content": "<turn>"}}
    with pytest.raises(CheckpointError, match=f"must be below {len(ENTRIES) + 4 + 4096}, got 16777215"):
        load({3: 2, 35: 1}, added_tokens_decoder=added)
    (tmp_path / "config.json").write_text('{"vocab_size": 2000000000}')
    with pytest.raises(CheckpointError, match="vocab_size must be at most 2097152, got 2000000000"):
        load_tokenizer(str(tmp_path))


def test_an_added_token_is_special_if_a_setting_names_it(load: Callable[..., Tokenizer], tmp_path: Path) -> None:
    names = ("<call>", "<turn>", "<image>")
    ids = {name: len(ENTRIES) + place for place, name in enumerate(names)}
    (tmp_path / "added_tokens.json").write_text(json.dumps({**ids, "</s>": 2}))
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "<turn>"}}')
    tokenizer = load({3: 2, 35: 1}, additional_special_tokens=["<image>"])
    assert [tokenizer.token_bytes(ids[name]) for name in names] == [b"<call>", b"", b""]
    assert set(tokenizer.special_tokens) == {"<s>", "</s>", "<turn>", "<image>"}
    assert tokenizer.encode_plain("<call>") == [ids["<call>"]]


def test_a_text_is_no_truth_value(load: Callable[..., Tokenizer]) -> None:
    with pytest.raises(CheckpointError, match=r"add_bos_token must be true or false, got 'false'"):
        load({}, add_bos_token="false")


def test_a_damaged_map_of_characters_is_refused(load: Callable[..., Tokenizer]) -> None:
    with pytest.raises(CheckpointError, match="the vocabulary is corrupt: index out of bounds"):
        load({3: 2, 35: 1}, {2: struct.pack("<III", 8, 0x7FFFFF00, 0x7FFFFF00) + b"x\0"})


def test_a_panic_of_the_library_is_an_error_of_the_request() -> None:
    damaged = tokenizers.Tokenizer(tokenizers.models.BPE())
    damaged.normalizer = tokenizers.normalizers.Precompiled(struct.pack("<III", 8, 0x7FFFFF00, 0x7FFFFF00) + b"x\0")
    with pytest.raises(InvalidRequest, match="the tokenizer failed on the text: index out of bounds"):
        library.encode(damaged, "t", add_special_tokens=False)


def test_a_vocabulary_of_sentencepiece_is_converted(make_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).symlink_to(make_model() / name)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    without_symbols = model_file({3: 2, 35: 1}, entries=ENTRIES[:-1])
    (folder / "tokenizer.model").write_bytes(without_symbols)
    convert(folder, file := tmp_path / "file.gguf", experts="f32")
    for text in TEXTS[:5]:
        assert load_tokenizer(str(file)).encode(text) == load_tokenizer(str(folder)).encode(text)
    (folder / "tokenizer_config.json").write_text('{"legacy": false}')
    with pytest.raises(CheckpointError, match="the vocabulary puts no space behind some tokens"):
        vocabulary_of_folder(folder, 1000)
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "tokenizer.model").write_bytes(model_file({3: 2, 35: 1}))
    with pytest.raises(CheckpointError, match="the vocabulary puts no space behind some tokens"):
        vocabulary_of_folder(folder, 1000)
    (folder / "tokenizer_config.json").write_text('{"add_prefix_space": false}')
    assert vocabulary_of_folder(folder, 1000).symbols == {"<sep>"}
    (folder / "tokenizer.model").write_bytes(model_file({3: 1, 35: 1}))
    with pytest.raises(CheckpointError, match="the vocabulary is of the type UNIGRAM, which cannot be written"):
        convert(folder, file, experts="f32")
