"""Loads what a worker drafts with: a small model with the same vocabulary, or the model's own layer for it."""

from dataclasses import replace

from ktqueue.core.config import EngineConfig
from ktqueue.core.errors import CheckpointError, ConfigError
from ktqueue.core.vocabulary import Vocabulary
from ktqueue.engine.draft_model import DraftSource
from ktqueue.engine.next_token_drafts import NextTokenSource
from ktqueue.loading.load import LoadedModel, load_model
from ktqueue.loading.model_path import resolve_model
from ktqueue.loading.model_report import ABSORBED, ModelReport, ReportRow, report_model
from ktqueue.loading.next_token_layer import load_next_token_layer, next_token_layer_size
from ktqueue.loading.tokenizer.tokenizer import load_tokenizer
from ktqueue.operators.next_token_layer import NextTokenLayer


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
        raise _no_layer(error) from error
    return NextTokenSource(layer, replace(layout, layers=1), model.card_facts.max_position_embeddings)


def report_with_drafts(report: ModelReport, config: EngineConfig) -> ModelReport:
    """Return the report of a model with the weights and the cache of what drafts for it. Raises ConfigError."""
    check_draft_model(config)
    if config.draft_model is not None:
        draft = report_model(config.draft_model)
        rows = [replace(row, name=f"draft model: {row.name}") for row in draft.rows]
        token_bytes = draft.cache_token_bytes
    elif config.speculation == "mtp":
        try:
            absorbed = max((row.largest_bytes for row in report.rows if row.name.endswith(ABSORBED)), default=0)
            size = next_token_layer_size(resolve_model(config.model), report.layers, absorbed)
        except CheckpointError as error:
            raise _no_layer(error) from error
        rows = [
            ReportRow(
                name=f"model.layers.{report.layers}",
                count=1,
                class_name=NextTokenLayer.__name__,
                operator=report.rows[-1].operator,
                device="cpu",
                quants=size.quants,
                file_bytes=size.file_bytes,
                device_bytes=size.loaded_bytes,
                largest_bytes=size.loaded_bytes,
            )
        ]
        token_bytes = report.cache_token_bytes // report.layers + 4 * report.hidden  # its cache, and the model's output
    else:
        return report
    held = report.device_bytes.get("cpu", 0) + sum(row.device_bytes for row in rows)
    return replace(
        report,
        rows=[*report.rows, *rows],
        device_bytes=report.device_bytes | {"cpu": held},
        cache_token_bytes=report.cache_token_bytes + token_bytes,
    )


def _no_layer(error: CheckpointError) -> ConfigError:
    return _wrong("speculation", "mtp", f"off, lookup or model for this model: {error}")


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
