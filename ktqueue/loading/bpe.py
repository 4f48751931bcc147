"""What a tokenizer is made of, as plain data: tokens, kinds, merges or scores, and how text is split.

Reads it from a Hugging Face folder's tokenizer.json or from GGUF metadata, and writes it as GGUF
metadata. Knows no tokenizer library; building and running one is tokenizer.py's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ktqueue.core.errors import CheckpointError
from ktqueue.loading.gguf_file import TOKEN_CONTROL, TOKEN_NORMAL, TOKEN_UNUSED, TOKEN_USER_DEFINED
from ktqueue.loading.pre_tokenizers import PRE_TOKENIZERS
from ktqueue.loading.safetensors_file import read_json

_IDS = {"bos": "bos", "eos": "eos", "eot": "eot", "eom": "eom", "unknown": "unk", "padding": "pad"}


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyData:
    """`model`: `gpt2` (byte-level BPE: merges) or `llama` (SentencePiece BPE: scores). `pre`: a name of
    pre_tokenizers.PRE_TOKENIZERS. `kinds`: gguf token types, one a token. `ids`: special token ids by role."""

    model: str
    pre: str
    tokens: list[str]
    kinds: list[int]
    merges: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    ids: dict[str, int] = field(default_factory=dict)
    add_bos: bool = False
    add_eos: bool = False
    add_space_prefix: bool = True
    chat_template: str | None = None


def from_metadata(metadata: Mapping[str, Any], source: str) -> VocabularyData:
    """The vocabulary of a GGUF file. Raises CheckpointError naming the key that is missing or wrong."""

    def get(key: str, kind: type, default: Any = None) -> Any:
        value = metadata.get(f"tokenizer.ggml.{key}", default)
        if not isinstance(value, kind):
            raise CheckpointError(f"{source}: metadata key tokenizer.ggml.{key} is missing or no {kind.__name__}")
        return value

    def strings(key: str, default: Any = None) -> list[str]:
        values: list[str] = get(key, list, default)
        if not all(isinstance(value, str) for value in values):
            raise CheckpointError(f"{source}: metadata key tokenizer.ggml.{key} must be a list of strings")
        return values

    model = get("model", str)
    if model not in ("gpt2", "llama"):
        raise CheckpointError(f"{source}: tokenizer.ggml.model {model!r} is not supported; known: gpt2, llama")
    tokens = strings("tokens")
    kinds = get("token_type", list, [TOKEN_NORMAL] * len(tokens))
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
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(token_id, int) and 0 <= token_id < len(tokens):
            ids[role] = token_id
    template = metadata.get("tokenizer.chat_template")
    return VocabularyData(
        model=model,
        pre=get("pre", str, "default"),
        tokens=tokens,
        kinds=kinds,
        merges=strings("merges", [] if model == "llama" else None),
        scores=scores,
        ids=ids,
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", model == "llama")),
        add_eos=bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
        add_space_prefix=bool(metadata.get("tokenizer.ggml.add_space_prefix", True)),
        chat_template=template if isinstance(template, str) else None,
    )


def to_metadata(data: VocabularyData) -> dict[str, Any]:
    """The vocabulary as GGUF metadata, such that `from_metadata` gives it back."""
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": data.model,
        "tokenizer.ggml.pre": data.pre,
        "tokenizer.ggml.tokens": data.tokens,
        "tokenizer.ggml.token_type": data.kinds,
        "tokenizer.ggml.merges": data.merges,
        "tokenizer.ggml.add_bos_token": data.add_bos,
        "tokenizer.ggml.add_eos_token": data.add_eos,
    }
    for key, role in _IDS.items():
        if role in data.ids:
            metadata[f"tokenizer.ggml.{key}_token_id"] = data.ids[role]
    if data.chat_template:
        metadata["tokenizer.chat_template"] = data.chat_template
    return metadata


def from_folder(folder: Path, vocab_size: int) -> VocabularyData:
    """The byte-level BPE vocabulary of a Hugging Face folder, filled up to `vocab_size` tokens.

    Raises CheckpointError for other tokenizers and for an unknown pre-tokenizer.
    """
    path = folder / "tokenizer.json"
    document = read_json(path)
    settings = read_json(folder / "tokenizer_config.json")
    model = document.get("model") or {}
    if model.get("type") != "BPE" or '"ByteLevel"' not in path.read_text(encoding="utf-8"):
        raise CheckpointError(f"{path}: only byte-level BPE tokenizers can be converted, this is {model.get('type')!r}")
    added = document.get("added_tokens") or []
    by_id = {token_id: token for token, token_id in model["vocab"].items()}
    by_id.update({entry["id"]: entry["content"] for entry in added})
    if max(by_id) >= vocab_size:
        raise CheckpointError(f"{path}: token id {max(by_id)} is outside the model's vocabulary of {vocab_size}")
    kinds = {entry["id"]: TOKEN_CONTROL if entry["special"] else TOKEN_USER_DEFINED for entry in added}
    tokens = [by_id.get(i, f"[UNUSED{i}]") for i in range(vocab_size)]
    token_ids = {token: token_id for token_id, token in by_id.items()}
    return VocabularyData(
        model="gpt2",
        pre=_recognise(path, document),
        tokens=tokens,
        kinds=[kinds.get(i, TOKEN_NORMAL if i in by_id else TOKEN_UNUSED) for i in range(vocab_size)],
        merges=[merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]],
        ids=_ids(folder, settings, token_ids),
        add_bos=bool(settings.get("add_bos_token", False)),
        add_eos=bool(settings.get("add_eos_token", False)),
        chat_template=_template(folder, settings),
    )


def _recognise(path: Path, document: Mapping[str, Any]) -> str:
    """The name of the pre-tokenizer whose patterns the file spells out."""
    steps = (document.get("pre_tokenizer") or {}).get("pretokenizers", [document.get("pre_tokenizer")])
    patterns = tuple(step["pattern"]["Regex"] for step in steps if step and step["type"] == "Split")
    normalizes = (document.get("normalizer") or {}).get("type") == "NFC"
    for name, pre in PRE_TOKENIZERS.items():
        if pre.patterns == patterns and pre.nfc == normalizes:
            return name
    if not patterns and not normalizes and steps and steps[0] and steps[0].get("use_regex"):
        return "gpt-2"
    raise CheckpointError(f"{path}: unknown pre-tokenizer; known: {', '.join(PRE_TOKENIZERS)}")


def _ids(folder: Path, settings: Mapping[str, Any], token_ids: Mapping[str, int]) -> dict[str, int]:
    ids = {}
    for role in ("bos", "eos", "unk", "pad"):
        token = settings.get(f"{role}_token")
        content = token.get("content") if isinstance(token, dict) else token
        if content in token_ids:
            ids[role] = token_ids[content]
    config = read_json(folder / "config.json")
    for role in ("bos", "eos", "pad"):
        token_id = config.get(f"{role}_token_id")
        first = token_id[0] if isinstance(token_id, list) and token_id else token_id
        if role not in ids and isinstance(first, int) and (role != "bos" or settings.get("add_bos_token")):
            ids[role] = first
    return ids


def _template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    return template if isinstance(template, str) else None
