"""Attention steps of any shape over a random cache, and what the reference computes for them."""

from typing import Any

import torch

from ktqueue.operators import reference
from ktqueue.operators.gpu.attention.base import AttentionShape
from ktqueue.operators.kv_cache import CacheScale, KVCache, KVLayout
from ktqueue.operators.step import AttentionPlan, ScoreOptions, StepContext

BOUNDS = {torch.float32: 2e-5, torch.bfloat16: 0.02, torch.float16: 0.004}
"""Largest difference from the reference, relative and absolute, by the type of the queries."""
MIXED = ([20, 1, 3, 1, 2], [41, 70, 3, 1, 37])
"""Tokens of each row, and the keys that its last token sees."""


def random_cache(layout: KVLayout, pages: int, device: str = "cpu") -> KVCache:
    """A cache of noise: the same numbers for each type, up to rounding."""
    kv = KVCache(layout, pages, device)
    noise = torch.Generator().manual_seed(7)
    for tensor in (*kv.keys, *kv.values):
        tensor.copy_(torch.randn(tensor.shape, generator=noise).to(layout.dtype))
    return kv


def float8_scales(dtype: torch.dtype, latent: int | None = None) -> tuple[CacheScale, ...]:
    """Scales of two layers. Other types than float8 have none."""
    if dtype.itemsize > 1:
        return ()
    return (CacheScale(2, 2), CacheScale(0.5, 0.5)) if latent else (CacheScale(1, 4), CacheScale(0.5, 2))


def make_cache(
    *, kv_heads: int, head_dim: int, page_size: int, dtype: torch.dtype, pages: int = 24, latent: int | None = None
) -> KVCache:
    """A random cache of two layers on the CPU. The layers of a float8 cache have different scales."""
    layout = KVLayout(
        layers=2,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        dtype=dtype,
        latent=latent,
        scales=float8_scales(dtype, latent),
    )
    return random_cache(layout, pages)


def make_shape(kv: KVCache, heads: int, dtype: torch.dtype = torch.float32) -> AttentionShape:
    """A model with that cache on the CPU, without windows; its scores are scaled by 0.2."""
    return AttentionShape(layout=kv.layout, heads=heads, scaling=0.2, windows=(0,), device="cpu", dtype=dtype)


def make_step(kv: KVCache, chunks: list[int], contexts: list[int]) -> StepContext:
    """A step on the host: rows of `chunks` tokens that see `contexts` keys on random pages. Its slots are all 0."""
    size = kv.layout.page_size
    counts = [-(-context // size) for context in contexts]
    pages = torch.randperm(kv.pages, generator=torch.Generator().manual_seed(len(chunks)))
    assert sum(counts) <= kv.pages
    table = torch.zeros(len(chunks), max(counts) + 1, dtype=torch.int32)
    for row, count in enumerate(counts):
        table[row, :count], pages = pages[:count], pages[count:]
    starts = torch.tensor([0, *torch.tensor(chunks).cumsum(0).tolist()], dtype=torch.int32)
    slots = torch.zeros(sum(chunks), dtype=torch.int64)
    return StepContext(starts, torch.tensor(contexts, dtype=torch.int32), table, slots, kv)


def random_query(step: StepContext, heads: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[tokens, heads, head_dim] of noise on the CPU."""
    shape = (len(step.slot_mapping), heads, step.kv.layout.head_dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)


def attended(
    step: StepContext,
    query: torch.Tensor,
    *,
    layer: int = 0,
    scaling: float,
    window: int = 0,
    sinks: torch.Tensor | None = None,
    cap: float = 0.0,
    chunk: int = 0,
) -> torch.Tensor:
    """What the reference computes in float32 on the CPU, over keys and values as they were before they were stored."""
    scale = step.kv.layout.scale(layer)
    return reference.paged_attention(
        query.cpu().float().transpose(0, 1),
        step.kv.keys[layer].cpu().float() * scale.key,
        step.kv.values[layer].cpu().float() * scale.value,
        step.query_starts,
        step.context_lengths,
        step.page_table,
        scaling=scaling,
        sliding_window=window or None,
        sinks=sinks,
        cap=cap,
        chunk=chunk,
    )


def assert_attended(got: torch.Tensor, step: StepContext, query: torch.Tensor, **options: Any) -> None:
    """`got` equals the reference, within the bounds of its type. options: of `attended`."""
    expected = attended(step, query, **options)
    assert got.dtype == query.dtype and got.shape == expected.shape
    bound = BOUNDS[query.dtype]
    torch.testing.assert_close(got.cpu().float(), expected, rtol=bound, atol=bound)


def check_plan(
    plan: AttentionPlan,
    step: StepContext,
    query: torch.Tensor,
    window: int = 0,
    sinks: torch.Tensor | None = None,
    cap: float = 0.0,
    chunk: int = 0,
) -> None:
    """The plan of a model of `make_shape` attends in layer 1 as the reference does."""
    got = plan.attend(1, query, step.kv, ScoreOptions(0.2, window, sinks, cap, chunk))
    assert_attended(got, step, query, layer=1, scaling=0.2, window=window, sinks=sinks, cap=cap, chunk=chunk)


def absorbed_reference(step: StepContext, query: torch.Tensor, up: torch.Tensor, scaling: float) -> torch.Tensor:
    """What the reference attends in layer 1 with absorbed queries: [tokens, heads, value] float32.

    query: [tokens, heads, plain + rotary]; up: [heads, plain + value, latent], which expands latents.
    """
    kv, plain = step.kv, query.shape[-1] - (step.kv.layout.head_dim - up.shape[-1])
    keys, values = torch.split(up.float(), [plain, up.shape[1] - plain], 1)
    absorbed = torch.cat([torch.einsum("qhd,hdl->qhl", query[..., :plain].float(), keys), query[..., plain:]], -1)
    attended = reference.paged_attention(
        absorbed.transpose(0, 1),
        kv.keys[1].float() * kv.layout.scale(1).key,
        kv.values[1].float() * kv.layout.scale(1).value,
        step.query_starts,
        step.context_lengths,
        step.page_table,
        scaling=scaling,
    )
    return torch.einsum("qhl,hvl->qhv", attended, values)
