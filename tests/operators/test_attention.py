"""Paged attention inside a transformers model: packed ragged batches against the model's own eager attention."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from model_types import MakeConfig, MakeModel

from ktqueue.operators.attention import paged_attention
from ktqueue.operators.kv_cache import KVCache, KVLayout
from ktqueue.operators.step import StepContext


def make_step(kv: KVCache, chunks: list[int], contexts: list[int], first_page: int = 1) -> StepContext:
    size = kv.layout.page_size
    table = torch.zeros(len(chunks), 8, dtype=torch.int32)
    for row in range(len(chunks)):  # eight pages a row, in falling order
        table[row] = torch.arange(first_page + 8 * row + 7, first_page + 8 * row - 1, -1)
    slots = [
        int(table[row, position // size]) * size + position % size
        for row, (chunk, context) in enumerate(zip(chunks, contexts, strict=True))
        for position in range(context - chunk, context)
    ]
    starts = torch.tensor([0, *torch.tensor(chunks).cumsum(0).tolist()], dtype=torch.int32)
    return StepContext(starts, torch.tensor(contexts, dtype=torch.int32), table, torch.tensor(slots), kv)


def cache(config: Any, dtype: torch.dtype = torch.float32) -> KVCache:
    layout = KVLayout(
        layers=config.num_hidden_layers,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        page_size=8,
        dtype=dtype,
    )
    return KVCache(layout, 33)


@pytest.mark.parametrize("head_dim", [16, 20])
@pytest.mark.parametrize("window", [None, 10])
def test_packed_chunks_equal_the_eager_model(window: int | None, head_dim: int, tiny_model: MakeModel) -> None:
    """Three prompts are fed in uneven chunks in packed batches. A head_dim of 20 uses the torch twin."""
    changes = {"head_dim": head_dim, "sliding_window": window, "use_sliding_window": window is not None}
    eager, paged = tiny_model(**changes), tiny_model(paged=True, **changes)
    prompts = [
        torch.randint(0, 96, (1, length), generator=torch.Generator().manual_seed(length)) for length in (31, 9, 18)
    ]
    with torch.no_grad():
        expected = [eager(prompt).logits[0] for prompt in prompts]
        kv = cache(paged.config)
        fed = [0, 0, 0]
        got: list[list[torch.Tensor]] = [[], [], []]
        for chunks in [(20, 3, 1), (10, 1, 9), (1, 5, 8)]:
            ids = torch.cat([prompts[row][0, fed[row] : fed[row] + chunk] for row, chunk in enumerate(chunks)])
            positions = torch.cat([torch.arange(fed[row], fed[row] + chunk) for row, chunk in enumerate(chunks)])
            fed = [done + chunk for done, chunk in zip(fed, chunks, strict=True)]
            step = make_step(kv, list(chunks), fed)
            logits = paged(input_ids=ids[None], position_ids=positions[None], use_cache=False, step=step).logits[0]
            for row, part in enumerate(logits.split(chunks)):
                got[row].append(part)
    for row in range(3):
        torch.testing.assert_close(torch.cat(got[row]), expected[row], rtol=1e-4, atol=1e-5)


def states(heads: int, tokens: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    noise = torch.randn(1, tokens, heads, 16, generator=torch.Generator().manual_seed(heads))
    return noise.to(dtype).transpose(1, 2)  # drawn in float32: the numbers of other types differ between torch versions


def call(
    step: StepContext, dtype: torch.dtype = torch.float32, tokens: int = 4, **options: Any
) -> tuple[torch.Tensor, None]:
    module: Any = SimpleNamespace(layer_idx=1)
    arguments = (states(4, tokens, dtype), states(2, tokens, dtype), states(2, tokens, dtype))
    return paged_attention(module, *arguments, options.pop("mask", None), scaling=0.25, step=step, **options)


def test_attention_writes_the_cache_of_its_layer_only(tiny_config: MakeConfig) -> None:
    kv = cache(tiny_config())
    out, weights = call(make_step(kv, [3, 1], [3, 1]))
    assert (out.shape, weights) == ((1, 4, 4, 16), None)
    assert not kv.keys[0].any() and not kv.values[0].any()
    assert kv.keys[1].ne(0).any(dim=-1).any(dim=-1).sum() == 4


def test_bfloat16_uses_the_twin(tiny_config: MakeConfig) -> None:
    exact, _ = call(make_step(cache(tiny_config()), [3, 1], [3, 1]))
    got, _ = call(make_step(cache(tiny_config(), torch.bfloat16), [3, 1], [3, 1]), torch.bfloat16)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), exact, rtol=0.05, atol=0.05)


def test_options_that_attention_does_not_compute_are_refused(tiny_config: MakeConfig) -> None:
    step = make_step(cache(tiny_config()), [3, 1], [3, 1])
    with pytest.raises(ValueError, match="has a mask of its own"):
        call(step, mask=torch.zeros(1))
    with pytest.raises(ValueError, match=r"slot_mapping must have shape \[5\], got \[4\]"):
        call(step, tokens=5)
