"""Turns text files into training data: a tokenizer, token streams, passages as answers in a chat. Knows no models."""

import json
import lzma
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ktqueue.loading.tokenizer.library import Model as Tokenizer
from ktqueue.loading.tokenizer.library import train_byte_level

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + "
    "'\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
PIECE_CHARACTERS = 200_000  # text is cut into documents of about this length
MIN_PASSAGE, MAX_PASSAGE = 400, 1600  # characters of a chat answer
_NOUN = re.compile(r"\b(?:a|an|the|old|little|poor|young) ([a-z]{3,12})\b")

Tokens = npt.NDArray[np.int32]
Windows = npt.NDArray[np.int64]


def read_text(path: Path) -> str:
    """Read a text file, plain or .xz, as UTF-8. Raises OSError, lzma.LZMAError, UnicodeDecodeError."""
    raw = path.read_bytes()
    if path.suffix == ".xz":
        raw = lzma.decompress(raw)
    return raw.decode("utf-8").replace("\r\n", "\n")


def documents(texts: Sequence[str]) -> list[str]:
    """Split texts into documents of whole paragraphs with about PIECE_CHARACTERS each."""
    pieces = []
    for text in texts:
        current: list[str] = []
        size = 0
        for paragraph in text.split("\n\n"):
            current.append(paragraph)
            size += len(paragraph)
            if size >= PIECE_CHARACTERS:
                pieces.append("\n\n".join(current))
                current, size = [], 0
        if current:
            pieces.append("\n\n".join(current))
    return pieces


def train_tokenizer(pieces: Sequence[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE with `vocab_size` ids, or fewer if the text has fewer merges.

    The three special tokens come last.
    """
    return train_byte_level(pieces, vocab_size, "qwen2", [END_OF_TEXT, TURN_START, TURN_END])


def save_tokenizer(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    """Write tokenizer.json and tokenizer_config.json, as transformers reads them."""
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "model_max_length": context,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")


def text_stream(tokenizer: Tokenizer, pieces: Sequence[str]) -> Tokens:
    """Return all documents as one stream, with an end-of-text token after each."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    parts = [np.array([*encoding.ids, end], np.int32) for encoding in tokenizer.encode_batch(list(pieces))]
    return np.concatenate(parts)


def chat_stream(tokenizer: Tokenizer, texts: Sequence[str]) -> Tokens:
    """Return passages as answers to "Tell me a story about a fox and a crow."; empty for a short text."""
    rows = [
        f"{TURN_START}user\n{prompt}{TURN_END}\n{TURN_START}assistant\n{passage}{TURN_END}\n"
        for prompt, passage in _conversations(texts)
    ]
    if not rows:
        return np.zeros(0, np.int32)
    return np.concatenate([np.array(encoding.ids, np.int32) for encoding in tokenizer.encode_batch(rows)])


def _conversations(texts: Sequence[str]) -> Iterator[tuple[str, str]]:
    passages = [passage for text in texts for passage in _passages(text)]
    seen_in = Counter(word for passage in passages for word in set(_NOUN.findall(passage)))
    for passage in passages:
        counts = Counter(_NOUN.findall(passage))
        telling = sorted(counts, key=lambda word: (-counts[word] / seen_in[word] ** 0.5, word))[:2]
        if len(telling) == 2:
            yield f"Tell me a story about {_with_article(telling[0])} and {_with_article(telling[1])}.", passage


def _passages(text: str) -> Iterator[str]:
    current = ""
    for paragraph in text.split("\n\n"):
        current = f"{current}\n\n{paragraph}" if current else paragraph
        if len(current) >= MIN_PASSAGE:
            if len(current) <= MAX_PASSAGE:
                yield current
            current = ""


def _with_article(word: str) -> str:
    return f"{'an' if word[0] in 'aeiou' else 'a'} {word}"
