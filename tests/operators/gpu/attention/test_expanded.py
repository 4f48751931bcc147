"""Attention over expanded latents equals attention over the latents themselves, by the kernel and by its twin."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from decoder_families import answers, feed, make_model

from ktqueue.operators.decoder_facts import DecoderFacts
from ktqueue.operators.gpu.attention import expanded, latent
from ktqueue.operators.gpu.attention.base import AttentionShape
from ktqueue.operators.gpu.attention.expanded import Expansion, attend_expanded
from ktqueue.operators.gpu.attention.latent import LatentPlanner, expansion_of
from ktqueue.operators.kv_cache import KVCache, KVLayout

from ..attention_steps import BOUNDS, MIXED, absorbed_reference, make_cache, make_shape, make_step
from ..interpreted import by_kernel, by_twin

SCALING = 0.2
LONG = ([3, 80, 1, 65, 70], [30, 80, 90, 133, 70])
"""Tokens of each row and the keys that its last token sees: rows with and without earlier keys, beside short ones."""


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def planned(kv: KVCache, heads: int, dtype: torch.dtype, rows: tuple[list[int], list[int]] = LONG) -> Expansion:
    expansion = expansion_of(LatentPlanner(make_shape(kv, heads, dtype)).plan(make_step(kv, *rows)))
    assert isinstance(expansion, Expansion)
    return expansion


@pytest.mark.parametrize("run", [by_kernel, by_twin])
@pytest.mark.parametrize(
    ("heads", "sizes", "dtype", "cache"),
    [
        (3, (16, 16, 16), torch.float32, torch.float32),
        (2, (24, 8, 40), torch.float32, torch.float32),
        (4, (32, 16, 32), torch.bfloat16, torch.bfloat16),
        (2, (32, 16, 32), torch.bfloat16, torch.float8_e4m3fn),
    ],
)
def test_long_rows_attend_as_the_reference_does(
    heads: int, sizes: tuple[int, int, int], dtype: torch.dtype, cache: torch.dtype, run: Callable[..., Any]
) -> None:
    """The reference attends with absorbed queries. sizes: columns without position, rotary ones, and of values."""
    plain, rotary, value = sizes
    kv = make_cache(kv_heads=1, head_dim=32 + rotary, page_size=16, dtype=cache, pages=40, latent=32)
    step = make_step(kv, *LONG)
    up = random(heads, plain + value, 32, dtype=dtype) * 0.2
    query = random(len(step.slot_mapping), heads, plain + rotary, dtype=dtype)
    out = torch.full((len(query), heads, value), float("nan"), dtype=dtype)
    expansion = planned(kv, heads, dtype)
    run(expansion.attend, 1, query, up, out, kv, SCALING)
    expected = absorbed_reference(step, query, up, SCALING)
    assert expansion.others is not None
    long = torch.ones(len(query), dtype=torch.bool).index_fill(0, expansion.others.long(), False)
    assert long.sum() == 80 + 65 + 70 and out[~long].isnan().all()
    torch.testing.assert_close(out[long].float(), expected[long], rtol=BOUNDS[dtype], atol=BOUNDS[dtype])


def test_heads_take_turns_if_there_are_many_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = make_cache(kv_heads=1, head_dim=48, page_size=16, dtype=torch.float32, pages=40, latent=32)
    rows = [65, 1], [400, 3]
    query, up = random(66, 5, 32, dtype=torch.float32), random(5, 32, 32, dtype=torch.float32)
    apart, together = torch.zeros(66, 5, 16), torch.zeros(66, 5, 16)
    turns: list[tuple[int, int]] = []

    def noted(query: Any, states: torch.Tensor, *rest: Any, first_head: int, **options: Any) -> None:
        turns.append((first_head, states.shape[1]))
        attend_expanded(query, states, *rest, first_head=first_head, **options)

    monkeypatch.setattr(expanded, "attend_expanded", noted)
    planned(kv, 5, torch.float32, rows).attend(0, query, up, together, kv, SCALING)
    monkeypatch.setattr(expanded, "EXPANDED_BYTES", 2 * 400 * 32 * 4)
    planned(kv, 5, torch.float32, rows).attend(0, query, up, apart, kv, SCALING)
    assert turns == [(0, 5), (0, 2), (2, 2), (4, 1)]
    torch.testing.assert_close(apart, together)


def test_steps_of_short_rows_expand_nothing() -> None:
    kv = make_cache(kv_heads=1, head_dim=48, page_size=16, dtype=torch.float32, latent=32)
    planner = LatentPlanner(make_shape(kv, 4))
    assert expansion_of(planner.plan(make_step(kv, *MIXED))) is None
    assert expansion_of(planner.decode_plan(2, 4)) is None
    only = planned(kv, 4, torch.float32, ([64], [70]))
    assert only.others is None and only.other_plan is None


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_a_decoder_that_expands_equals_transformers(
    family: str, make_decoder: Callable[..., Any], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of 4 tokens or more are expanded, beside others and after earlier keys."""
    monkeypatch.setattr(latent, "EXPANDED_TOKENS", 4)
    seen = []

    def noted(self: Expansion, *arguments: Any) -> None:
        seen.append(self.others is not None)
        expand(self, *arguments)

    expand = Expansion.attend
    monkeypatch.setattr(Expansion, "attend", noted)

    def make_planner(layout: KVLayout, facts: DecoderFacts, device: str) -> LatentPlanner:
        shape = AttentionShape(
            layout=layout, heads=facts.heads, scaling=facts.scaling, windows=(0,), device=device, dtype=facts.dtype
        )
        return LatentPlanner(shape)

    model = make_model(family)
    decoder = make_decoder(model)
    with torch.inference_mode():
        found = feed(decoder, device=device, planner=make_planner)
    for name, expected in answers(model).items():
        assert (found[name] - expected).abs().max() < 1e-5 * expected.abs().max()
    assert set(seen) == {True, False}
