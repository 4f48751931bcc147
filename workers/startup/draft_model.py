"""Loads what a worker drafts with: a small model with the same vocabulary, or the model's own layer for it."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from ktqueue.core.config import EngineConfig
from ktqueue.core.errors import CheckpointError, ConfigError
from ktqueue.core.vocabulary import Vocabulary
from ktqueue.engine.draft_model import DraftSource
from ktqueue.engine.next_token_drafts import NextTokenSource
from ktqueue.loading.load import LoadedModel, load_model
from ktqueue.loading.model_path import SYNTHETIC_PREFIX, resolve_model
from ktqueue.loading.model_report import ABSORBED, ModelReport, ReportRow, report_model
from ktqueue.loading.next_token_layer import LayerSize, load_next_token_layer, next_token_layer_size
from ktqueue.loading.tokenizer.tokenizer import load_tokenizer
from ktqueue.operators.gpu.cache_bounds import cache_scales
from ktqueue.operators.gpu.decoder import GpuDecoder
from ktqueue.operators.gpu.next_token_layer import GpuNextTokenLayer
from ktqueue.operators.kv_cache import CacheScale
from ktqueue.operators.next_token_layer import NextTokenLayer
from ktqueue.workers.startup.gpu_memory import planner_of


def check_draft_model(config: EngineConfig) -> None:
    """Check that the settings of drafts fit each other. Raises ConfigError."""
    wants = config.speculation == "model"
    if wants and config.draft_model is None:
        raise _wrong("speculation", "model", "model only with engine.draft_model (--draft-model)")
    if not wants and config.draft_model is not None:
        raise _wrong("draft_model", config.draft_model, "left out unless engine.speculation is model")


def load_draft_model(
    config: EngineConfig,
    vocabulary: Vocabulary,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
) -> DraftSource | None:
    """Load the draft model on the engine's device, if there is one. `dtype`, `cache_dtype`: see report_model.

    Raises ConfigError if a token of it differs from that of `vocabulary`, if it has states or changing angles, or if
    the device has no memory for it.
    """
    path = config.draft_model
    if path is None:
        return None
    _check_same(load_tokenizer(path), vocabulary, path)
    try:
        model = load_model(path, device=config.device, dtype=dtype)
    except torch.OutOfMemoryError as error:
        raise _wrong("draft_model", path, f"a model for which {config.device} has memory: {error}") from error
    layout = model.kv_layout(config.page_size, cache_dtype)
    if layout.linear or layout.original_length:
        raise _wrong("draft_model", path, "a model without linear attention and longrope")
    if model.card_facts.vocab_size < vocabulary.size:
        raise _wrong("draft_model", path, f"a model with logits of {vocabulary.size} tokens")
    longest, planner = model.card_facts.max_position_embeddings, None
    if config.on_gpu:
        if not isinstance(model.module, GpuDecoder):
            raise _wrong("draft_model", path, "a model that GpuDecoder computes")
        planner = planner_of(model, layout, config)
    return DraftSource(model.module, layout, longest, planner)


def next_token_source(
    config: EngineConfig, model: LoadedModel, cache_dtype: torch.dtype | None = None
) -> NextTokenSource:
    """Load the layer of a model that predicts the token after the next. Raises ConfigError if it has none.

    `cache_dtype`: of its cache; None: that of the model.
    """
    layout = model.kv_layout(config.page_size, cache_dtype)
    if layout.original_length or layout.index or layout.by_layer:
        raise _wrong(
            "speculation", "mtp", "off or lookup for this model, whose layers differ, have an indexer or longrope"
        )
    try:
        layer = load_next_token_layer(model, _file_of(config.model))
    except CheckpointError as error:
        raise _no_layer(error) from error
    except torch.OutOfMemoryError as error:
        raise _no_layer(f"{config.device} has no memory for its layer: {error}") from error
    scales: tuple[CacheScale, ...] = ()
    if isinstance(layer, GpuNextTokenLayer) and layout.dtype.itemsize == 1:
        scales = cache_scales(layer.cache_bounds, {}, latent=layout.latent is not None)
    layout = replace(layout, layers=1, linear=(), scales=scales)
    return NextTokenSource(layer, layout, model.card_facts.max_position_embeddings)


def report_with_drafts(
    report: ModelReport,
    config: EngineConfig,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
) -> ModelReport:
    """Return the report of a model with the weights and the cache of what drafts for it. Raises ConfigError.

    `dtype`, `cache_dtype`: see report_model.
    """
    check_draft_model(config)
    if config.draft_model is not None:
        draft = report_model(config.draft_model, device=config.device, dtype=dtype, cache_dtype=cache_dtype)
        rows = [replace(row, name=f"draft model: {row.name}") for row in draft.rows]
        token_bytes, position_bytes, movable = draft.cache_token_bytes, draft.position_bytes, draft.movable_bytes
    elif config.speculation == "mtp":
        try:
            absorbed = max((row.largest_bytes for row in report.rows if row.name.endswith(ABSORBED)), default=0)
            size = next_token_layer_size(_file_of(config.model), report.layers, absorbed)
        except CheckpointError as error:
            raise _no_layer(error) from error
        rows = [*_layer_rows(report, config, size, dtype)]
        token_bytes = (
            report.cache_token_bytes // report.cache_layers + dtype.itemsize * report.hidden
        )  # the latter is kept
        position_bytes, movable = 0, size.expert_bytes if config.on_gpu else 0
    else:
        return report
    held = dict(report.device_bytes)
    for row in rows:
        held[row.device] = held.get(row.device, 0) + row.device_bytes
    return replace(
        report,
        rows=[*report.rows, *rows],
        device_bytes=held,
        cache_token_bytes=report.cache_token_bytes + token_bytes,
        position_bytes=report.position_bytes + position_bytes,
        movable_bytes=report.movable_bytes + movable,
    )


def _layer_rows(report: ModelReport, config: EngineConfig, size: LayerSize, dtype: torch.dtype) -> Iterator[ReportRow]:
    """The layer as one row, or on a GPU as two. There dense weights are counted as if they were decoded."""
    parts = [("", "cpu", size.file_bytes, size.loaded_bytes)]
    if config.on_gpu:
        dense = size.dense_numbers * dtype.itemsize
        parts = [("", config.device, size.file_bytes - size.expert_file_bytes, dense)]
        if size.expert_bytes:
            parts.append((".mlp.experts", "cpu", size.expert_file_bytes, size.expert_bytes))
    for name, device, file_bytes, loaded in parts:
        yield ReportRow(
            name=f"model.layers.{report.layers}{name}",
            count=1,
            class_name=NextTokenLayer.__name__,
            operator=report.rows[-1].operator,
            device=device,
            quants=size.quants,
            file_bytes=file_bytes,
            device_bytes=loaded,
            largest_bytes=loaded,
        )


def _file_of(model: str) -> Path:
    """The file or folder of a model. Raises CheckpointError."""
    if model.startswith(SYNTHETIC_PREFIX):
        raise CheckpointError(f"{model} has random weights, but no layer that predicts further tokens")
    return resolve_model(model)


def _no_layer(error: Exception | str) -> ConfigError:
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
    return ConfigError.must_be(f"engine.{name}", wanted, value)
