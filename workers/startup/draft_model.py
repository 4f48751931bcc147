"""Loads what a worker drafts with: a small model with the same vocabulary, or the model's own layer for it."""

from dataclasses import replace

from ktqueue.core.config import EngineConfig
from ktqueue.core.errors import CheckpointError, ConfigError
from ktqueue.core.vocabulary import Vocabulary
from ktqueue.engine.draft_model import DraftSource
from ktqueue.engine.next_token_drafts import NextTokenSource
from ktqueue.loading.load import LoadedModel, load_model
from ktqueue.loading.model_path import resolve_model
from ktqueue.loading.next_token_layer import load_next_token_layer
from ktqueue.loading.tokenizer.tokenizer import load_tokenizer


def check_draft_model(config: EngineConfig) -> None:
    """Check that the settings of drafts fit each other. Raises ConfigError."""
    wants = config.speculation == "model"
    if wants and config.draft_model is None:
        raise _wrong("speculation", "model", "model only with engine.draft_model (--draft-model)")
    if not wants and config.draft_model is not None:
        raise _wrong("draft_model", config.draft_model, "left out unless engine.speculation is model")
    if config.speculation in ("model", "mtp") and config.on_gpu:
        raise _wrong("speculation", config.speculation, f"off or lookup on device {config.device}")


def load_draft_model(config: EngineConfig, vocabulary: Vocabulary) -> DraftSource | None:
    """Load the draft model, if there is one.

    Raises ConfigError if a token of it differs from that of `vocabulary`, or if it has states or changing angles.
    """
    path = config.draft_model
    if path is None:
        return None
    _check_same(load_tokenizer(path), vocabulary, path)
    model = load_model(path)
    layout = model.kv_layout(config.page_size)
    if layout.linear or layout.original_length:
        raise _wrong("draft_model", path, "a model without linear attention and longrope")
    if model.card_facts.vocab_size < vocabulary.size:
        raise _wrong("draft_model", path, f"a model with logits of {vocabulary.size} tokens")
    return DraftSource(model.module, layout, model.card_facts.max_position_embeddings)


def next_token_source(config: EngineConfig, model: LoadedModel) -> NextTokenSource:
    """Load the layer of a model that predicts the token after the next. Raises ConfigError if it has none."""
    layout = model.kv_layout(config.page_size)
    if layout.linear or layout.original_length or layout.index or layout.by_layer:
        raise _wrong("speculation", "mtp", "off or lookup for this model, whose layers differ or have states")
    try:
        layer = load_next_token_layer(model, resolve_model(config.model))
    except CheckpointError as error:
        raise _wrong("speculation", "mtp", f"off, lookup or model for this model: {error}") from error
    return NextTokenSource(layer, replace(layout, layers=1), model.card_facts.max_position_embeddings)


def _check_same(draft: Vocabulary, vocabulary: Vocabulary, path: str) -> None:
    for token_id in range(min(draft.size, vocabulary.size)):
        ours, theirs = vocabulary.special_token_bytes(token_id), draft.special_token_bytes(token_id)
        if ours != theirs:
            difference = f"token {token_id} is {ours!r}, not {theirs!r}"
            raise _wrong("draft_model", path, f"a model with the same vocabulary, where {difference}")
    if draft.size != vocabulary.size:
        raise _wrong(
            "draft_model", path, f"a model with the same vocabulary, of {vocabulary.size} tokens; it has {draft.size}"
        )


def _wrong(name: str, value: str, wanted: str) -> ConfigError:
    param = f"engine.{name}"
    return ConfigError(f"{param} must be {wanted}, got {value!r}", param=param, limit=wanted, value=value)
