"""The kernel of prompts compiles to machine code without a GPU, and has prompts if it is chosen.
tests/gpu/test_warpgroup_prompts.py runs it on one."""

import ctypes
from dataclasses import replace
from typing import Any

import pytest
import torch

from ktqueue.operators.gpu.attention import by_warpgroups, triton
from ktqueue.operators.gpu.attention.base import AttentionShape
from ktqueue.operators.gpu.attention.by_warpgroups import (
    ARCHITECTURE,
    NAME,
    SOURCE,
    TILE,
    PromptFacts,
    constants,
    fits,
    shared_bytes,
)
from ktqueue.operators.gpu.attention.triton_prefill import tile_tokens
from ktqueue.operators.gpu.kernels.cuda_kernel import machine_code
from ktqueue.operators.kv_cache import KVLayout
from ktqueue.operators.step import ScoreOptions

from ..attention_steps import MIXED, make_cache, make_shape, make_step, random_query

SHARED_BYTES = 227 << 10
"""Of a program on Hopper."""
BARRIERS = 1 << 10
"""Bytes of shared memory at most, beside queries, keys and values."""
LAYOUT = KVLayout(layers=1, kv_heads=4, head_dim=128, page_size=16, dtype=torch.bfloat16)
SHAPE = AttentionShape(layout=LAYOUT, heads=32, scaling=0.1, windows=(0,), device="cuda", dtype=torch.bfloat16)


@pytest.mark.compiled
@pytest.mark.parametrize(
    "further",
    [
        {},
        {"heads": 28, "page_size": 64, "dtype": torch.float16},
        {"heads": 4, "page_size": 256, "chunk": 8192},
        {"page_size": 8, "window": 128, "cap": 50.0, "has_sinks": True},
    ],
)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_it_compiles(head_dim: int, further: dict[str, Any], compiler: ctypes.CDLL) -> None:
    facts = PromptFacts(32, 4, head_dim, 16, torch.bfloat16, 0.1)._replace(**further)
    options = [f"-D{name}={value}" for name, value in constants(facts).items()]
    assert NAME.encode() in machine_code(SOURCE, options, ARCHITECTURE, compiler)
    assert shared_bytes(head_dim) + BARRIERS <= SHARED_BYTES


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_its_tiles_are_those_of_triton(head_dim: int, dtype: torch.dtype) -> None:
    assert all(tile_tokens(group, head_dim, dtype) == TILE // group for group in range(1, TILE + 1))


def test_it_takes_caches_of_16_bits_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_warpgroups, "has_warpgroups", lambda _: True)
    for size in (8, 16, 64, 128, 256):
        assert fits(replace(SHAPE, layout=replace(LAYOUT, page_size=size)))
    for size in (1, 4, 24, 192):
        assert not fits(replace(SHAPE, layout=replace(LAYOUT, page_size=size)))
    for head_dim in (64, 128):
        assert fits(replace(SHAPE, layout=replace(LAYOUT, head_dim=head_dim)))
    for layout in (replace(LAYOUT, head_dim=96), replace(LAYOUT, head_dim=256), replace(LAYOUT, latent=64)):
        assert not fits(replace(SHAPE, layout=layout))
    assert not fits(replace(SHAPE, layout=replace(LAYOUT, dtype=torch.float8_e4m3fn)))
    assert not fits(replace(SHAPE, layout=replace(LAYOUT, dtype=torch.float32), dtype=torch.float32))
    assert not fits(replace(SHAPE, dtype=torch.float16))
    monkeypatch.setattr(by_warpgroups, "has_warpgroups", lambda _: False)
    assert not fits(SHAPE)


def test_constants_name_what_the_source_needs() -> None:
    facts = PromptFacts(32, 4, 128, 16, torch.bfloat16, 0.5, 7, 8, 2.0, has_sinks=True)
    assert constants(facts) == {
        "HEADS": 32, "KV_HEADS": 4, "HEAD_DIM": 128, "PAGE_SIZE": 16, "IS_BFLOAT16": 1,
        "SCALE": "float(0.7213475204444817)", "WINDOW": 7, "CHUNK": 8, "HAS_CAP": 1, "CAP": "float(2.8853900817779268)",
        "LOG2_E": "float(1.4426950408889634)", "HAS_SINKS": 1,
    }  # fmt: skip
    assert constants(facts._replace(cap=0.0))["CAP"] != "float(0.0)", "the source divides by it"


@pytest.mark.parametrize("fits", [True, False])
def test_prompts_have_it_if_it_fits(fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager ones and captured ones; each planner has a counter of its own."""
    seen: list[tuple[str, torch.Tensor | None, int]] = []

    def noted(name: str) -> Any:
        def attend(*arguments: Any) -> None:
            counter = arguments[7] if name == "warpgroups" else None
            seen.append((name, counter, len(arguments[4])))

        return attend

    monkeypatch.setattr(by_warpgroups, "fits", lambda _: fits)
    monkeypatch.setattr(by_warpgroups, "attend", noted("warpgroups"))
    monkeypatch.setattr(triton, "prefill", noted("triton"))
    monkeypatch.setattr(triton, "decode", lambda *_: None)
    kv = make_cache(kv_heads=2, head_dim=16, page_size=16, dtype=torch.float32)
    step = make_step(kv, *MIXED)
    planner = triton.TritonPlanner(make_shape(kv, 8))
    other = planner.another()
    assert (planner.counter is not None) == (other.counter is not None) == fits
    captured = planner.prompt_plan(8, 40, 8)
    captured.update(step)
    for plan in (planner.plan(step), captured, other.plan(step)):
        plan.attend(0, random_query(step, 8), kv, ScoreOptions(0.2))
    assert [name for name, *_ in seen] == ["warpgroups" if fits else "triton"] * 3
    counters = [counter.data_ptr() for _, counter, _ in seen if counter is not None]
    assert not fits or counters[0] == counters[1] != counters[2]
