"""Runs the largest step that an engine can have, once before it serves.

So all memory that steps need is allocated, and all kernels are compiled, before the first job.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from ktqueue.core.config import EngineConfig
from ktqueue.engine.batch import Batch
from ktqueue.engine.draft_model import DraftSource
from ktqueue.engine.runner import HostRunner
from ktqueue.engine.scheduler import MAX_PROMPT_ROWS
from ktqueue.loading.load import LoadedModel
from ktqueue.operators.kv_cache import KVCache, KVLayout
from ktqueue.operators.step import StepContext


def largest_batch(model: LoadedModel, layout: KVLayout, config: EngineConfig) -> Batch:
    """A batch with the largest number of tokens, rows and rows of logits, all of token 0, and its own cache.

    Rows of few tokens share pages, so that the cache is small. With an indexer the page table is as wide as for the
    longest sequence, because the memory of its scores is, too.
    """
    rows = min(config.rows, config.step_tokens)
    tokens = min(config.step_tokens // rows, model.card_facts.max_position_embeddings)
    pages, together = -(-tokens // layout.page_size), max(1, layout.page_size // tokens)
    states = rows if layout.linear else 0
    kv = KVCache(layout, -(-rows // together) * pages, config.device, slots=states)
    row = torch.arange(rows, dtype=torch.int32)[:, None]
    table = row // together * pages + torch.arange(pages, dtype=torch.int32)
    starts = torch.arange(0, rows * tokens + 1, tokens, dtype=torch.int32)
    slots = table[:, :1] * layout.page_size + row % together * tokens + torch.arange(tokens)
    if layout.index:
        widest = -(-(config.max_model_len or model.card_facts.max_position_embeddings) // layout.page_size)
        table = torch.nn.functional.pad(table, (0, max(0, widest - pages)))
    return Batch(
        input_ids=torch.zeros(1, rows * tokens, dtype=torch.int64),
        position_ids=torch.arange(tokens).repeat(rows)[None],
        scored=torch.unique(torch.cat([torch.arange(min(rows * tokens, MAX_PROMPT_ROWS)), starts[1:].long() - 1])),
        step=StepContext(
            query_starts=starts,
            context_lengths=torch.full((rows,), tokens, dtype=torch.int32),
            page_table=table,
            slot_mapping=slots.long().reshape(-1),
            kv=kv,
            state_sources=torch.arange(states, dtype=torch.int32),
            state_targets=torch.arange(states, dtype=torch.int32),
        ),
    )


def draft_batches(batch: Batch, draft: DraftSource, device: str, rows: int) -> Iterator[Batch]:
    """The largest passes of what drafts beside `batch`, on a cache of its own: one that reads tokens, and one that adds
    a token to `rows` rows, if there are as many."""
    step = batch.step
    kv = KVCache(draft.layout, step.kv.pages, device)
    none = torch.empty(0, dtype=torch.int32)
    positions = batch.position_ids.clamp(max=draft.longest - 1)
    step = replace(step, kv=kv, state_sources=none, state_targets=none)
    yield replace(batch, position_ids=positions, scored=batch.scored[:0], step=step)
    rows = min(rows, len(step.context_lengths))
    yield Batch(
        input_ids=batch.input_ids[:, :rows],
        position_ids=torch.zeros(1, rows, dtype=torch.int64),
        scored=torch.arange(rows),
        step=replace(
            step,
            query_starts=torch.arange(rows + 1, dtype=torch.int32),
            context_lengths=torch.ones(rows, dtype=torch.int32),
            page_table=torch.nn.functional.pad(step.page_table[:rows], (0, 1)),
            slot_mapping=step.page_table[:rows, 0].long() * kv.layout.page_size,
        ),
    )


def run_on_host(model: LoadedModel, layout: KVLayout, config: EngineConfig) -> None:
    """Run it with a model on the CPU."""
    HostRunner(model.module, model.card_facts.vocab_size).execute(largest_batch(model, layout, config))
