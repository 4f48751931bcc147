"""The largest step, which is run once before a worker serves."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from ktqueue.core.config import EngineConfig
from ktqueue.operators.kv_cache import KVLayout
from ktqueue.workers.startup.largest_step import largest_batch


def test_with_an_indexer_the_page_table_is_as_wide_as_for_the_longest_sequence() -> None:
    """The scores of its keys, and so its memory, grow with the table."""
    model: Any = SimpleNamespace(card_facts=SimpleNamespace(max_position_embeddings=640))
    layout = KVLayout(layers=1, kv_heads=1, head_dim=24, page_size=16, dtype=torch.float32, latent=16)
    config = EngineConfig(max_num_seqs=2, max_num_batched_tokens=64)
    batches = [largest_batch(model, layout, config), largest_batch(model, replace(layout, index=8), config)]
    assert [[*batch.step.page_table.shape] for batch in batches] == [[2, 2], [2, 40]]
    assert [batch.step.context_lengths.tolist() for batch in batches] == [[32, 32]] * 2


def test_with_as_many_rows_as_tokens_the_slots_are_contiguous() -> None:
    """CpuDecoder requires it. In a step of one token a row, every page has one slot of the step."""
    model: Any = SimpleNamespace(card_facts=SimpleNamespace(max_position_embeddings=640))
    layout = KVLayout(layers=1, kv_heads=1, head_dim=8, page_size=16, dtype=torch.float32)
    batch = largest_batch(model, layout, EngineConfig(max_num_seqs=4, max_num_batched_tokens=4))
    assert batch.step.slot_mapping.is_contiguous()
    assert batch.step.slot_mapping.tolist() == [0, 16, 32, 48]
