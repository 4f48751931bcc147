"""Reads the tokenizer files of a Hugging Face folder as plain data: tokenizer.json, its settings, the chat template.

Knows no tokenizer library.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ktqueue.core.errors import CheckpointError
from ktqueue.loading.gguf.vocabulary import TokenKind, VocabularyData, joined_templates
from ktqueue.loading.huggingface.hub_files import LEGACY_TEMPLATE, TOOL_TEMPLATE, VOCABULARIES
from ktqueue.loading.json_file import optional_json, read_json
from ktqueue.loading.mapped_file import read_file
from ktqueue.loading.tokenizer.added_tokens import read_added_tokens
from ktqueue.loading.tokenizer.pre_tokenizers import PRE_TOKENIZERS
from ktqueue.loading.tokenizer.sentencepiece_file import FILE as SENTENCEPIECE
from ktqueue.loading.tokenizer.sentencepiece_file import read_sentencepiece
from ktqueue.loading.tokenizer.tekken_file import FILE as TEKKEN
from ktqueue.loading.tokenizer.tekken_file import read_tekken
from ktqueue.loading.tokenizer.tiktoken_file import FILE as TIKTOKEN
from ktqueue.loading.tokenizer.tiktoken_file import read_tiktoken

_READERS = {TIKTOKEN: read_tiktoken, SENTENCEPIECE: read_sentencepiece, TEKKEN: read_tekken}
_BYTE_TOKENS = frozenset(f"<0x{byte:02X}>" for byte in range(256))
MAX_TOKENS = 1 << 21
_SPACE = "\u2581"  # SentencePiece's visible space


@dataclass(frozen=True, slots=True)
class TokenizerFile:
    """A tokenizer.json. `tokens` and `kinds` are indexed by id.

    An id without a token has an empty text and the kind UNUSED.
    """

    path: Path
    document: Mapping[str, Any]
    tokens: list[str]
    kinds: list[int]
    byte_level: bool


def read_tokenizer(folder: Path) -> TokenizerFile:
    """Read `folder`/tokenizer.json. Raises CheckpointError."""
    path = folder / "tokenizer.json"
    if not path.exists():
        raise CheckpointError(
            f"{path}: No such file, and no {' or '.join(VOCABULARIES[1:])}; a model in safetensors needs one; "
            "--tokenizer can name another folder that has it"
        )
    document = read_json(path)
    try:
        model, added = document["model"], document.get("added_tokens") or []
        entries = model["vocab"]
        listed = entries.items() if isinstance(entries, dict) else ((entry[0], i) for i, entry in enumerate(entries))
        by_id: dict[int, str] = {token_id: token for token, token_id in listed}
        fallback = bool(model.get("byte_fallback"))
        kinds = {i: TokenKind.BYTE for i, token in by_id.items() if fallback and token in _BYTE_TOKENS}
        if model.get("unk_token") is not None:
            kinds.update({i: TokenKind.UNKNOWN for i, token in by_id.items() if token == model["unk_token"]})
        for entry in added:
            by_id[entry["id"]] = entry["content"]
            kinds[entry["id"]] = TokenKind.CONTROL if entry["special"] else TokenKind.USER_DEFINED
        size = max(by_id, default=-1) + 1
        if not 0 < size < MAX_TOKENS or min(by_id) < 0:
            raise CheckpointError(f"{path}: token ids must run from 0, got {size} at most")
        tokens = [by_id.get(i, "") for i in range(size)]
        plain = [TokenKind.NORMAL if i in by_id else TokenKind.UNUSED for i in range(size)]
        byte_level = _has_byte_level(document.get("decoder")) or _has_byte_level(document.get("pre_tokenizer"))
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(f"{path}: not a tokenizer file: {error!r}") from error
    return TokenizerFile(path, document, tokens, [kinds.get(i, kind) for i, kind in enumerate(plain)], byte_level)


def chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """Return the chat template, from files of its own or from tokenizer_config.json. Raises CheckpointError."""
    template = settings.get("chat_template")
    named: dict[Any, Any] = {"default": template}
    if isinstance(template, list):
        named = {str(entry.get("name")): entry.get("template") for entry in template if isinstance(entry, dict)}
    elif template is None:
        named = {"default": optional_json(folder / LEGACY_TEMPLATE).get("chat_template")}
    for name, path in (("default", "chat_template.jinja"), ("tool_use", TOOL_TEMPLATE)):
        if (file := folder / path).exists():
            try:
                named[name] = read_file(file).decode()
            except UnicodeDecodeError as error:
                raise CheckpointError(f"{file}: {error}") from error
    return joined_templates(named.get("default"), named.get("tool_use"))


def special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Map `bos_token` and the like to their text, from tokenizer_config.json."""
    found = {}
    for name, value in settings.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def end_tokens(folder: Path, settings: Mapping[str, Any], tokens: Sequence[str], size: int) -> list[int]:
    """Return ids below `size` that end a choice, the model's own first.

    They come from generation_config.json, else from config.json. That of the tokenizer always ends a choice too, as
    with vLLM: models that were tuned for another chat template often keep the old ones. Raises CheckpointError.
    """
    token = special_tokens(settings).get("eos_token")
    own = [tokens.index(token)] if token in tokens[:size] else []
    for name in ("generation_config.json", "config.json"):
        stated = optional_json(folder / name).get("eos_token_id")
        ids = stated if isinstance(stated, list) else [stated]
        if found := [token_id for token_id in ids if type(token_id) is int and 0 <= token_id < size]:
            return [*found, *(token_id for token_id in own if token_id not in found)]
    return own


def plain_vocabulary(folder: Path, vocab_size: int) -> VocabularyData | None:
    """Return the vocabulary of a folder without a tokenizer.json, from its tiktoken.model, tokenizer.model or
    tekken.json.

    Unused ids fill it up to `vocab_size`. Returns None if the folder has a tokenizer.json or no vocabulary. Raises
    CheckpointError.
    """
    if vocab_size > MAX_TOKENS:
        raise CheckpointError(f"{folder / 'config.json'}: vocab_size must be at most {MAX_TOKENS}, got {vocab_size}")
    name = next((name for name in VOCABULARIES if (folder / name).exists()), VOCABULARIES[0])
    if name == VOCABULARIES[0]:
        return None
    settings = optional_json(folder / "tokenizer_config.json")
    added = read_added_tokens(folder, settings)
    data = _READERS[name](folder, settings, added, vocab_size)
    unused = range(len(data.tokens), vocab_size)
    tokens = [*data.tokens, *(f"[UNUSED{i}]" for i in unused)]
    return replace(
        data,
        tokens=tokens,
        kinds=[*data.kinds, *[TokenKind.UNUSED] * len(unused)],
        scores=[*data.scores, *[0.0] * len(unused)] if data.scores else [],
        ids=data.ids | _roles(folder, settings, tokens, max(vocab_size, len(tokens))),
        chat_template=chat_template(folder, settings),
    )


def _roles(folder: Path, settings: Mapping[str, Any], tokens: Sequence[str], size: int) -> dict[str, int]:
    """The ids of special tokens by role."""
    special = special_tokens(settings)
    named = {role: special.get(f"{role}_token") for role in ("bos", "unk", "pad")}
    ids = {role: tokens.index(token) for role, token in named.items() if token is not None and token in tokens}
    ids.update(zip(("eos", "eot", "eom"), end_tokens(folder, settings, tokens, size), strict=False))
    return ids


def vocabulary_of_folder(folder: Path, vocab_size: int) -> VocabularyData:
    """Return the BPE vocabulary of a folder, filled up to `vocab_size` tokens, to be written as GGUF.

    Raises CheckpointError for other tokenizers and for an unknown pre-tokenizer.
    """
    if (plain := plain_vocabulary(folder, vocab_size)) is not None:
        _check_writable(plain, folder)
        return plain
    file = read_tokenizer(folder)
    settings = optional_json(folder / "tokenizer_config.json")
    model = file.document["model"]
    characters = _is_of_characters(file)
    if model.get("type") != "BPE" or not (file.byte_level or characters):
        raise CheckpointError(
            f"{file.path}: only BPE tokenizers of bytes, or of characters as Gemma's, can be converted, not "
            f"{model.get('type')!r}"
        )
    if len(file.tokens) > vocab_size:
        raise CheckpointError(
            f"{file.path}: token id {len(file.tokens) - 1} is outside the model's vocabulary of {vocab_size}"
        )
    unused = vocab_size - len(file.tokens)
    kinds = [*file.kinds, *([TokenKind.UNUSED] * unused)]
    tokens = [token or f"[UNUSED{i}]" for i, token in enumerate([*file.tokens, *([""] * unused)])]
    ids = _roles(folder, settings, file.tokens, vocab_size)
    return VocabularyData(
        model="gemma4" if characters else "gpt2",
        pre="gemma4" if characters else _recognise(file),
        tokens=tokens,
        kinds=kinds,
        merges=[merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]],
        ids=ids,
        add_bos=_begins_with(file, special_tokens(settings).get("bos_token")),
        add_space_prefix=not characters,
        chat_template=chat_template(folder, settings),
    )


def _is_of_characters(file: TokenizerFile) -> bool:
    """Whether it is a BPE of characters with a visible space, whose unknown characters become bytes, as Gemma's is.

    It may be split at spaces, of which none are left.
    """
    normalizers = [(step.get("pattern"), step.get("content")) for step in _steps(file.document.get("normalizer"))]
    splits = [(step.get("type"), step.get("pattern")) for step in _steps(file.document.get("pre_tokenizer"))]
    return (
        bool(file.document["model"].get("byte_fallback"))
        and normalizers == [({"String": " "}, _SPACE)]
        and all(split == ("Split", {"String": " "}) for split in splits)
    )


def _check_writable(data: VocabularyData, folder: Path) -> None:
    """Check that GGUF can express a vocabulary. Raises CheckpointError."""
    if data.model == "gpt2":
        return
    problems = {
        "is of the type UNIGRAM": data.model != "llama",
        "has no tokens of bytes": not data.byte_fallback,
        "normalises text": bool(data.charsmap) or data.collapse_spaces,
        "puts no space behind some tokens": data.add_space_prefix and (data.prefix_once or bool(data.symbols)),
    }
    if problem := next((text for text, is_true in problems.items() if is_true), None):
        raise CheckpointError(f"{folder / SENTENCEPIECE}: the vocabulary {problem}, which cannot be written to GGUF")


def _steps(part: Any) -> list[Mapping[str, Any]]:
    """Return a pre-tokenizer, normaliser or decoder as a flat list of steps."""
    if not isinstance(part, dict):
        return []
    parts = part.get("pretokenizers") or part.get("normalizers") or part.get("decoders") or part.get("processors")
    return [step for step_part in parts for step in _steps(step_part)] if parts else [part]


def _has_byte_level(part: Any) -> bool:
    return any(step.get("type") == "ByteLevel" for step in _steps(part))


def _recognise(file: TokenizerFile) -> str:
    """Return the name of the pre-tokenizer that has the patterns of the file."""
    steps = _steps(file.document.get("pre_tokenizer"))
    patterns = tuple(step["pattern"].get("Regex") for step in steps if step["type"] == "Split")
    normalizers = [step["type"] for step in _steps(file.document.get("normalizer"))]
    if not patterns and not normalizers and any(step.get("use_regex") for step in steps):
        return "gpt-2"
    for name, pre in PRE_TOKENIZERS.items():
        if pre.patterns == patterns and normalizers == (["NFC"] if pre.nfc else []):
            return name
    raise CheckpointError(f"{file.path}: unknown pre-tokenizer {patterns}; known: {', '.join(PRE_TOKENIZERS)}")


def _begins_with(file: TokenizerFile, token: str | None) -> bool:
    """Whether every encoded text begins with the token."""
    for step in _steps(file.document.get("post_processor")):
        first = (step.get("single") or [{}])[0]
        if step.get("type") == "TemplateProcessing" and token and first.get("SpecialToken", {}).get("id") == token:
            return True
    return False
