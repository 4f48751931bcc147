"""Steps of any shape over a random cache, and what the reference attends for them."""

from collections.abc import Callable

import pytest
import torch

from ktqueue.operators import reference
from ktqueue.operators.kv_cache import KVCache, KVLayout
from ktqueue.operators.step import StepContext


def random_cache(
    *, kv_heads: int, head_dim: int, page_size: int, dtype: torch.dtype, pages: int = 24, device: str = "cpu"
) -> KVCache:
    """Two layers of noise, the same numbers for each type up to rounding."""
    layout = KVLayout(layers=2, kv_heads=kv_heads, head_dim=head_dim, page_size=page_size, dtype=dtype)
    kv = KVCache(layout, pages, device)
    noise = torch.Generator().manual_seed(7)
    for tensor in (*kv.keys, *kv.values):
        tensor.copy_(torch.randn(tensor.shape, generator=noise).to(dtype))
    return kv


def make_step(kv: KVCache, chunks: list[int], contexts: list[int]) -> StepContext:
    """Rows of `chunks` tokens that see `contexts` keys, their pages drawn at random; the slots are not made."""
    size = kv.layout.page_size
    counts = [-(-context // size) for context in contexts]
    drawn = torch.randperm(kv.pages, generator=torch.Generator().manual_seed(len(chunks)))
    table = torch.zeros(len(chunks), max(counts) + 1, dtype=torch.int32)
    used = 0
    for row, count in enumerate(counts):
        table[row, :count] = drawn[used : used + count]
        used += count
    assert used <= kv.pages
    starts = torch.tensor([0, *torch.tensor(chunks).cumsum(0).tolist()], dtype=torch.int32)
    slots = torch.zeros(sum(chunks), dtype=torch.int64)
    return StepContext(starts, torch.tensor(contexts, dtype=torch.int32), table, slots, kv)


def random_query(step: StepContext, heads: int, dtype: torch.dtype) -> torch.Tensor:
    """[tokens, heads, head_dim] of noise."""
    shape = (len(step.slot_mapping), heads, step.kv.layout.head_dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)


def expected(step: StepContext, query: torch.Tensor, layer: int, scaling: float, window: int) -> torch.Tensor:
    """What the reference attends, in float32."""
    return reference.paged_attention(
        query.float().transpose(0, 1),
        step.kv.keys[layer],
        step.kv.values[layer],
        step.query_starts,
        step.context_lengths,
        step.page_table,
        scaling=scaling,
        sliding_window=window or None,
    )


@pytest.fixture
def steps() -> type:
    """The functions above, by name."""

    class Steps:
        cache: Callable[..., KVCache] = staticmethod(random_cache)
        make: Callable[..., StepContext] = staticmethod(make_step)
        query: Callable[..., torch.Tensor] = staticmethod(random_query)
        expected: Callable[..., torch.Tensor] = staticmethod(expected)

    return Steps
