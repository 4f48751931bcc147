"""The largest step, which is run once before a worker serves."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
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
    """CpuDecoder requires it."""
    model: Any = SimpleNamespace(card_facts=SimpleNamespace(max_position_embeddings=640))
    layout = KVLayout(layers=1, kv_heads=1, head_dim=8, page_size=16, dtype=torch.float32)
    batch = largest_batch(model, layout, EngineConfig(max_num_seqs=4, max_num_batched_tokens=4))
    assert batch.step.slot_mapping.is_contiguous()
    assert batch.step.slot_mapping.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(("rows", "tokens", "pages"), [(9, 5, 3), (7, 16, 7), (2, 33, 6), (2048, 4, 512)])
def test_rows_of_few_tokens_share_pages(rows: int, tokens: int, pages: int) -> None:
    """No slot is written twice, and each is on a page of its row."""
    model: Any = SimpleNamespace(card_facts=SimpleNamespace(max_position_embeddings=640))
    layout = KVLayout(layers=1, kv_heads=1, head_dim=8, page_size=16, dtype=torch.float32)
    step = largest_batch(model, layout, EngineConfig(max_num_seqs=rows, max_num_batched_tokens=rows * tokens)).step
    assert step.kv.pages == pages
    slots = step.slot_mapping.view(rows, tokens)
    assert len({*step.slot_mapping.tolist()}) == rows * tokens and int(slots.max()) < pages * 16
    on = slots // 16
    assert (on[:, :, None] == step.page_table[:, None]).any(2).all()
