"""Vocabularies that are trained here and written as GGUF by the gguf package, compared with other tokenizers."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf import GGUFWriter, TokenType
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import Qwen2Tokenizer

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
    close(writer)


def close(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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
    close(writer)
    ours = load_tokenizer(str(tmp_path / "vocabulary.gguf"))
    pieces = {token: (place, scores[place]) for place, token in enumerate(tokens) if place >= 259}
    for text in TEXTS:
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == sentence_piece(text, pieces), repr(text)
        assert b"".join(ours.token_bytes(token_id) for token_id in ids) == (b" " if text else b"") + text.encode()
    assert ours.encode("Hello") == [1, *ours.encode("Hello", add_special_tokens=False)]
    assert ours.eos_token_ids == {2} and ours.chat_template is None
