"""Vocabularies that are trained here and written as GGUF by the gguf package, compared with other tokenizers."""

import base64
import itertools
import json
import random
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import regex  # type: ignore[import-untyped]  # a dependency of transformers
from checkpoint_files import finish
from gguf import GGUFWriter, TokenType
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import GemmaTokenizer, Qwen2Tokenizer

from ktqueue.core.errors import CheckpointError
from ktqueue.loading.gguf.vocabulary import byte_alphabet, from_metadata, to_metadata
from ktqueue.loading.tokenizer import library
from ktqueue.loading.tokenizer.files import vocabulary_of_folder
from ktqueue.loading.tokenizer.pre_tokenizers import PRE_TOKENIZERS
from ktqueue.loading.tokenizer.tiktoken_file import read_tiktoken
from ktqueue.loading.tokenizer.tokenizer import load_tokenizer

CORPUS = [
    "Once upon a time there was a fox and a crow; the fox was hungry, and the crow had cheese.",
    "It's true that they'll meet again: 'We've 12345 reasons', said the crow.\n\n\tThe end.",
    "Ein Käse für die Krähe. Une corneille, du fromage. 日本語のカラス。 Лиса и ворона.",
] * 3
TEXTS = [
    *CORPUS[:3],
    "",
    " ",
    "  two  spaces   and\ttabs\r\n\r\n end ",
    "e\u0301 A\u030a \u1e9b\u0323 \N{LLAMA}\N{ROCKET} \u200b\x00",
    "HE'LL isn't 007 3.14159 \u00bd\u00b2 x1y2",
    "\uc5b4 \u0627\u0644 \u0e44\u0e17\u0e22 (a[b]{c}) <|x|>!!!\n",
]
PIECES = [
    *map(chr, range(32, 127)), *"\n\r\t\u00e9\u00c0\u00df\u0436\u0416\u65e5\u672c\u8a9e\u3042\ud55c\u0639\u0e44",
    *"\u0939\u093f\u0967\u01c5\u02b0\u0301\u0300\u200d\u2019\u2026\u3000\u0130\u017f", "\U0001f389\U0001f3fd",
    "'ll", "'S", "HELLO", "camelCase", "123456", "  ", "\n\n", "\r\n", " \n", "don't",
]  # fmt: skip
Ids = Callable[[str], list[int]]


def trained() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges of a byte-level BPE, split as the library does it by itself."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=420, show_progress=False, initial_alphabet=alphabet)
    )
    vocabulary = tokenizer.get_vocab()
    made: list[tuple[str, str]] = []
    for token in sorted(vocabulary, key=vocabulary.__getitem__):  # the halves of a token have lower ids
        if len(token) > 1:
            halves = [(token[:i], token[i:]) for i in range(1, len(token))]
            made.append(
                next(pair for pair in halves if all(vocabulary.get(half, 999) < vocabulary[token] for half in pair))
            )
    return vocabulary, made


def write_byte_level(path: Path, pre: str, vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> None:
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.NORMAL] * len(tokens))
    writer.add_token_merges([" ".join(pair) for pair in merges])
    finish(writer)


def gpt2(vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> Ids:
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return lambda text: tokenizer.encode(text).ids


def qwen2(vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> Ids:
    tokenizer = Qwen2Tokenizer(vocabulary, merges)  # type: ignore[arg-type]  # it takes pairs too
    return lambda text: tokenizer(text)["input_ids"]


@pytest.mark.parametrize(("pre", "make"), [("gpt-2", gpt2), ("qwen2", qwen2)])
def test_byte_level_vocabularies_equal_the_library(pre: str, make: Callable[..., Ids], tmp_path: Path) -> None:
    vocabulary, merges = trained()
    assert len(merges) > 100
    write_byte_level(tmp_path / "vocabulary.gguf", pre, vocabulary, merges)
    ours, theirs = load_tokenizer(str(tmp_path / "vocabulary.gguf")), make(vocabulary, merges)
    for text in TEXTS:
        assert ours.encode(text) == theirs(text), repr(text)


def sentence_piece(text: str, pieces: dict[str, tuple[int, float]]) -> list[int]:
    """SentencePiece's BPE by its definition: of all neighbours, join those whose joint piece scores best; first the
    leftmost. What is no piece is spelled in bytes."""
    parts = list(("\u2581" + text.replace(" ", "\u2581")) if text else "")
    while True:
        joins = [
            (-pieces[left + right][1], place)
            for place, (left, right) in enumerate(itertools.pairwise(parts))
            if left + right in pieces
        ]
        if not joins:
            break
        _, place = min(joins)
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return [
        token_id
        for part in parts
        for token_id in ([pieces[part][0]] if part in pieces else [3 + byte for byte in part.encode()])
    ]


def test_a_sentence_piece_vocabulary_equals_its_definition(tmp_path: Path) -> None:
    words = " ".join(CORPUS[:2]).split()
    grown = {f"\u2581{word[:length]}" for word in words for length in range(2, len(word) + 1)}
    grown |= {word[place : place + 2] for word in words for place in range(len(word) - 1)}
    letters = sorted({letter for word in words for letter in word} | {"\u2581"})
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *sorted(grown, key=len), *letters]
    scores = [0.0 if place < 259 else 259.0 - place for place in range(len(tokens))]
    special = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.BYTE] * 256]
    writer = GGUFWriter(tmp_path / "vocabulary.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types([*special, *[TokenType.NORMAL] * (len(tokens) - len(special))])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    finish(writer)
    ours = load_tokenizer(str(tmp_path / "vocabulary.gguf"))
    pieces = {token: (place, scores[place]) for place, token in enumerate(tokens) if place >= 259}
    for text in TEXTS:
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == sentence_piece(text, pieces), repr(text)
        assert b"".join(ours.token_bytes(token_id) for token_id in ids) == (b" " if text else b"") + text.encode()
    assert ours.encode("Hello") == [1, *ours.encode("Hello", add_special_tokens=False)]
    assert ours.eos_token_ids == {2} and ours.chat_template is None


def test_digits_of_trinity_are_split_by_three_from_the_right() -> None:
    tokenizer = Tokenizer(models.BPE())
    library.split_as(tokenizer, PRE_TOKENIZERS["afmoe"])
    pieces = [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str("x1 12 1234567 89b")]
    assert pieces == ["x", "1", "Ġ", "12", "Ġ", "1", "234", "567", "Ġ", "89", "b"]
    assert PRE_TOKENIZERS["glm5"] == PRE_TOKENIZERS["glm4"]


@pytest.mark.parametrize("name", sorted({split: name for name, split in PRE_TOKENIZERS.items()}.values()))
def test_text_is_split_as_by_another_library(name: str) -> None:
    splits = PRE_TOKENIZERS[name]
    alphabet = {byte: character for character, byte in byte_alphabet().items()}
    tokenizer = Tokenizer(models.BPE())
    library.split_as(tokenizer, splits)
    draw = random.Random(name)
    for text in [*TEXTS, *("".join(draw.choices(PIECES, k=draw.randint(1, 30))) for _ in range(60))]:
        expected = [unicodedata.normalize("NFC", text) if splits.nfc else text]
        for pattern in splits.patterns:
            expected = [piece for part in expected for piece in isolated(pattern, part)]
        normalised = tokenizer.normalizer.normalize_str(text) if tokenizer.normalizer else text
        found = [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(normalised)]
        assert found == ["".join(alphabet[byte] for byte in piece.encode()) for piece in expected], text


def isolated(pattern: str, text: str) -> list[str]:
    """The matches of a pattern and the text between them."""
    pieces, end = [], 0
    for match in regex.finditer(pattern, text, flags=regex.VERSION1):
        pieces += [text[end : match.start()], match[0]]
        end = match.end()
    return [piece for piece in [*pieces, text[end:]] if piece]


def by_ranks(ranks: dict[bytes, int], pattern: str, text: str) -> list[int]:
    """Ids by the rule of tiktoken: a word that is a token, else pairs are joined, the one of the lowest rank first."""
    ids: list[int] = []
    for word in isolated(pattern, text):
        parts = [bytes([byte]) for byte in word.encode()]
        while word.encode() not in ranks:
            pairs = [(ranks[a + b], place) for place, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in ranks]
            if not pairs:
                break
            _, place = min(pairs)
            parts[place : place + 2] = [parts[place] + parts[place + 1]]
        ids += [ranks[word.encode()]] if word.encode() in ranks else [ranks[part] for part in parts]
    return ids


def test_a_vocabulary_of_ranks_equals_the_rule_of_tiktoken(tmp_path: Path) -> None:
    vocabulary, _ = trained()
    alphabet = byte_alphabet()
    spelled = sorted(vocabulary, key=vocabulary.__getitem__)
    ranks = {bytes(alphabet[character] for character in token): rank for rank, token in enumerate(spelled)}
    lines = [base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()]
    (tmp_path / "tiktoken.model").write_bytes(b"".join(lines))
    settings = {
        "tokenizer_class": "TikTokenTokenizer", "eos_token": "[EOS]",
        "added_tokens_decoder": {"420": {"content": "[BOS]", "special": True}, "421": {"content": "[EOS]"}},
    }  # fmt: skip
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 500}}')
    tokenizer = load_tokenizer(str(tmp_path))
    file = tmp_path / "kimi.gguf"
    writer = GGUFWriter(file, "deepseek2")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("kimi-k2")
    writer.add_token_list(spelled)
    finish(writer)
    without_merges = load_tokenizer(str(file))
    (pattern,) = PRE_TOKENIZERS["kimi-k2"].patterns
    draw = random.Random(5)
    for text in [*TEXTS, *("".join(draw.choices(PIECES, k=draw.randint(1, 40))) for _ in range(100))]:
        expected = by_ranks(ranks, pattern, text)
        assert tokenizer.encode_plain(text) == without_merges.encode_plain(text) == expected, text
        assert b"".join(map(tokenizer.token_bytes, expected)).decode() == text
    assert (tokenizer.size, tokenizer.eos_token_ids) == (500, frozenset({421}))
    assert tokenizer.encode_plain("[EOS]a") == [421, vocabulary["a"]]
    assert vocabulary_of_folder(tmp_path, 500).merges == read_tiktoken(tmp_path, settings, ()).merges


def tekken(**changes: object) -> dict[str, object]:
    """A tekken.json of the trained vocabulary with five special tokens, of which it names three."""
    vocabulary, _ = trained()
    alphabet = byte_alphabet()
    spelled = sorted(vocabulary, key=vocabulary.__getitem__)
    texts = [bytes(alphabet[character] for character in token) for token in spelled]
    (pattern,) = PRE_TOKENIZERS["tekken"].patterns
    size = len(texts) + 2  # the last three of the list have no id
    config = {"pattern": pattern, "default_vocab_size": size, "default_num_special_tokens": 5, "version": "v11"}
    return {
        "config": config,
        "vocab": [{"rank": i, "token_bytes": base64.b64encode(text).decode()} for i, text in enumerate(texts)],
        "special_tokens": [{"rank": i, "token_str": text} for i, text in enumerate(("<unk>", "<s>", "</s>"))],
        **changes,
    }


def test_a_vocabulary_of_tekken_has_its_special_tokens_first(tmp_path: Path) -> None:
    document = tekken()
    (tmp_path / "tekken.json").write_text(json.dumps(document))
    (tmp_path / "config.json").write_text('{"vocab_size": 422}')
    tokenizer = load_tokenizer(str(tmp_path))
    entries: Any = document["vocab"]
    ranks = {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in entries[:-3]}
    (pattern,) = PRE_TOKENIZERS["tekken"].patterns
    draw = random.Random(6)
    for text in [*TEXTS, *("".join(draw.choices(PIECES, k=draw.randint(1, 40))) for _ in range(100))]:
        ids = [5 + rank for rank in by_ranks(ranks, pattern, text)]
        assert tokenizer.encode_plain(text) == ids, text
        assert tokenizer.encode(text) == [1, *ids]
    assert (tokenizer.size, tokenizer.eos_token_ids) == (422, frozenset({2}))
    assert tokenizer.encode_plain("a</s><SPECIAL_4>")[1:] == [2, 4]
    assert vocabulary_of_folder(tmp_path, 422).ids == {"unk": 0, "bos": 1, "eos": 2}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"config": {}}, "not a vocabulary of Tekken: KeyError"),
        ({"vocab": [{"rank": 0, "token_bytes": "?"}]}, "not a vocabulary of Tekken"),
        ({"vocab": [{"rank": 1, "token_bytes": "QQ=="}]}, "the ranks of 1 different tokens must run from 0"),
        ({"config": {"default_num_special_tokens": 10**12, "default_vocab_size": 10**12}}, "special tokens of"),
        ({"special_tokens": [5]}, "not a vocabulary of Tekken"),
    ],
)
def test_a_damaged_tekken_is_refused(changes: dict[str, object], words: str, tmp_path: Path) -> None:
    (tmp_path / "tekken.json").write_text(json.dumps(tekken(**changes)))
    (tmp_path / "config.json").write_text('{"vocab_size": 422}')
    with pytest.raises(CheckpointError, match=words):
        load_tokenizer(str(tmp_path))


ALL_BYTES = b"".join(base64.b64encode(bytes([byte])) + b" %d\n" % byte for byte in range(256))


@pytest.mark.parametrize(
    ("lines", "kind", "words"),
    [
        (b"QQ== 0\n", "QwenTokenizer", "tokenizer_class whose way to split text is known .* got 'QwenTokenizer'"),
        (b"QQ== 0\nQg 1\n", "TikTokenTokenizer", "line 2 is not a token in base64 and its rank"),
        (b"QQ== 1\n", "TikTokenTokenizer", "the ranks of 1 different tokens must run from 0"),
        (b"QQ== 0\n", "TikTokenTokenizer", "each byte must be a token"),
        (ALL_BYTES + b"QUFB" * 100_000 + b" 256\n", "TikTokenTokenizer", "must have at most 1024 bytes, got 300000"),
    ],
)
def test_a_damaged_vocabulary_of_ranks_is_refused(lines: bytes, kind: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "tiktoken.model").write_bytes(lines)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind}))
    with pytest.raises(CheckpointError, match=words):
        load_tokenizer(str(tmp_path))


def test_a_vocabulary_of_gemma_4_equals_transformers(tmp_path: Path) -> None:
    """It is a BPE of characters with merges, and unknown ones are spelled in bytes."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *(f"<0x{byte:02X}>" for byte in range(256))]
    text = " ".join(CORPUS[:2]).replace(" ", "\u2581")
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special, show_progress=False)
    trained_model = Tokenizer(models.BPE())
    trained_model.train_from_iterator([text], trainer)
    vocabulary = trained_model.get_vocab()
    merges = [tuple(pair) for pair in json.loads(trained_model.to_str())["model"]["merges"]]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    writer = GGUFWriter(tmp_path / "vocabulary.gguf", "gemma4")
    writer.add_tokenizer_model("gemma4")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL] * 5 + [TokenType.BYTE] * 256 + [TokenType.NORMAL] * (len(tokens) - 261))
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(2)
    writer.add_unk_token_id(3)
    finish(writer)
    ours = load_tokenizer(str(tmp_path / "vocabulary.gguf"))
    theirs = GemmaTokenizer(vocabulary, merges)  # type: ignore[arg-type]  # it takes pairs too
    theirs.save_pretrained(tmp_path)
    written = to_metadata(vocabulary_of_folder(tmp_path, len(tokens)))
    read = library.build(from_metadata(written, "file"), "file")
    assert len(ours.encode(CORPUS[0])) < len(CORPUS[0]) // 2
    for text in [*TEXTS, CORPUS[0], "\n\n \n a  b \u65e5"]:
        expected = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text) == [2, *expected], repr(text)
        assert library.encode(read, text, add_special_tokens=False) == expected, repr(text)
