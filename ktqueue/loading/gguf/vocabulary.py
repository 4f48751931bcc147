"""The vocabulary of a GGUF file as plain data: tokens, kinds, merges or scores, and how text is split.

Reads it from metadata and writes it. Knows no tokenizer library: tokenizer/library.py builds the tokenizer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from ktqueue.core.errors import CheckpointError
from ktqueue.core.short_repr import short_repr

_IDS = {
    "bos": "bos", "eos": "eos", "eot": "eot", "eom": "eom", "unknown": "unk", "padding": "pad",
    "fim_pre": "fim_pre", "fim_suf": "fim_suf", "fim_mid": "fim_mid",
}  # fmt: skip

_KINDS = {str: "a text", list: "a list", int: "an integer", bool: "true or false"}

WITHOUT_MERGES = "kimi-k2"  # files of this pre-tokenizer may leave the merges out: the ids are ranks


class TokenKind(IntEnum):
    """Values of `tokenizer.ggml.token_type`, as in ggml's llama_token_type."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyData:
    """The data of one tokenizer.

    `model` is `gpt2` (byte-level BPE with merges), `llama` (SentencePiece BPE with scores), `gemma4` (the same with
    merges) or `t5` (SentencePiece
    unigram with scores; not from files). `pre` is a name in pre_tokenizers.PRE_TOKENIZERS. `kinds` has a TokenKind per
    token. `ids` maps the role of a special token to its id.

    The others are of SentencePiece. `byte_fallback`: unknown characters become tokens of their bytes. `charsmap`: its
    compiled map of characters, or empty. `symbols`: texts of tokens that are found after normalisation, so that the
    text behind them gets no space as prefix; other added tokens divide a text into texts of their own.
    `collapse_spaces`: only one of several spaces stays, and none at the ends. `prefix_once`: no space is put behind
    special tokens.
    """

    model: str
    pre: str
    tokens: list[str]
    kinds: Sequence[int]
    merges: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    ids: dict[str, int] = field(default_factory=dict)
    add_bos: bool = False
    add_eos: bool = False
    add_space_prefix: bool = True
    byte_fallback: bool = True
    charsmap: bytes = b""
    symbols: frozenset[str] = frozenset()
    collapse_spaces: bool = False
    prefix_once: bool = False
    chat_template: str | None = None


def from_metadata(metadata: Mapping[str, Any], source: str) -> VocabularyData:
    """Read the vocabulary from GGUF metadata. Raises CheckpointError that names the missing or invalid key."""

    def get(key: str, kind: type, default: Any = None) -> Any:
        name = f"tokenizer.ggml.{key}"
        if (value := metadata.get(name, default)) is None:
            raise CheckpointError(f"{source}: metadata key {name} is missing", param=name)
        if type(value) is not kind:
            problem = f"must be {_KINDS[kind]}, got {short_repr(value)}"
            raise CheckpointError(f"{source}: metadata key {name} {problem}", param=name)
        return value

    def strings(key: str, default: Any = None) -> list[str]:
        values: list[str] = get(key, list, default)
        if not all(isinstance(value, str) for value in values):
            raise CheckpointError(f"{source}: metadata key tokenizer.ggml.{key} must be a list of strings")
        return values

    model = get("model", str)
    if model not in (known := ("gpt2", "llama", "gemma4")):
        raise CheckpointError(
            f"{source}: tokenizer.ggml.model {short_repr(model)} is not supported; known: {', '.join(known)}"
        )
    tokens = strings("tokens")
    kinds = get("token_type", list, [TokenKind.NORMAL] * len(tokens))
    scores = get("scores", list, [])
    if len(kinds) != len(tokens) or not all(isinstance(kind, int) for kind in kinds):
        raise CheckpointError(
            f"{source}: tokenizer.ggml.token_type must hold a number for each of {len(tokens)} tokens"
        )
    if model == "llama" and (len(scores) != len(tokens) or not all(isinstance(s, float) for s in scores)):
        raise CheckpointError(f"{source}: tokenizer.ggml.scores must hold a number for each of {len(tokens)} tokens")
    if not tokens:
        raise CheckpointError(f"{source}: tokenizer.ggml.tokens is empty")
    ids = {}
    for key, role in _IDS.items():
        token_id = get(f"{key}_token_id", int, -1)
        if 0 <= token_id < len(tokens):
            ids[role] = token_id
    templates = (metadata.get(f"tokenizer.chat_template{name}") for name in ("", ".tool_use"))
    pre = get("pre", str, "default")
    return VocabularyData(
        model=model,
        pre=pre,
        tokens=tokens,
        kinds=kinds,
        merges=strings("merges", [] if model == "llama" or pre == WITHOUT_MERGES else None),
        scores=scores,
        ids=ids,
        add_bos=get("add_bos_token", bool, model != "gpt2"),
        add_eos=get("add_eos_token", bool, False),
        add_space_prefix=get("add_space_prefix", bool, model != "gemma4"),
        chat_template=joined_templates(*templates),
    )


def joined_templates(default: object, tool_use: object) -> str | None:
    """Return one chat template of two, of which the second is for requests with tools. Either may be missing."""
    found = [template for template in (tool_use, default) if isinstance(template, str)]
    if len(found) < 2:
        return found[0] if found and found[0] is default else None
    return f"{{% if tools %}}{found[0]}{{% else %}}{found[1]}{{% endif %}}"


def to_metadata(data: VocabularyData) -> dict[str, Any]:
    """Return the vocabulary as GGUF metadata. `from_metadata` is the inverse."""
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": data.model,
        "tokenizer.ggml.pre": data.pre,
        "tokenizer.ggml.tokens": data.tokens,
        "tokenizer.ggml.token_type": list(data.kinds),
        "tokenizer.ggml.merges": data.merges,
        "tokenizer.ggml.add_bos_token": data.add_bos,
        "tokenizer.ggml.add_eos_token": data.add_eos,
    }
    if data.model == "llama":
        metadata |= {
            "tokenizer.ggml.scores": [float(score) for score in data.scores],
            "tokenizer.ggml.add_space_prefix": data.add_space_prefix,
        }
    if data.model == "gemma4":
        metadata["tokenizer.ggml.add_space_prefix"] = data.add_space_prefix
    for key, role in _IDS.items():
        if role in data.ids:
            metadata[f"tokenizer.ggml.{key}_token_id"] = data.ids[role]
    if data.chat_template:
        metadata["tokenizer.chat_template"] = data.chat_template
    return metadata


def byte_alphabet() -> dict[str, int]:
    """Map each character of GPT-2's byte alphabet to its byte.

    A printable byte stands for itself, any other byte is the next free character from U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
