"""On a GPU, FlashInfer and our Triton kernels attend as the reference does, eager and in CUDA graphs, with no wait."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from ktqueue.operators import reference
from ktqueue.operators.gpu.attention.backends import make_planner
from ktqueue.operators.gpu.attention.base import AttentionPlanner
from ktqueue.operators.kv_cache import CacheScale, KVCache, KVLayout
from ktqueue.operators.step import AttentionPlan, ScoreOptions, StepContext

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),  # FlashInfer compiles
    pytest.mark.filterwarnings("default"),  # FlashInfer's own, and that sync_debug_mode is new
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

BACKENDS = ("flashinfer", "triton")
BOUNDS = {torch.float32: 2e-5, torch.bfloat16: 0.02, torch.float16: 0.004}
STEPS = {
    "prefill": ([300, 17, 1024], [300, 17, 1024]),
    "continued": ([64, 5, 200], [700, 2000, 201]),
    "decode": ([1] * 6, [1, 16, 17, 513, 4000, 64]),
    "mixed": ([1, 130, 1, 2, 1], [3000, 150, 1, 900, 77]),
    "prompts beside rows": ([1, 600, 1, 40], [9, 700, 40, 40]),
}
"""Tokens of each row, and the keys that its last token sees."""


def scales_of(cache: torch.dtype) -> tuple[CacheScale, ...]:
    """The scales of a float8 cache of one layer; other types have none."""
    return (CacheScale(0.5, 4),) if cache.itemsize == 1 else ()


def random_cache(layout: KVLayout, pages: int) -> KVCache:
    kv = KVCache(layout, pages, "cuda")
    for tensor in (*kv.keys, *kv.values):
        tensor.copy_(torch.randn(tensor.shape, device="cuda").to(layout.dtype))
    return kv


def make_step(kv: KVCache, chunks: list[int], contexts: list[int]) -> StepContext:
    """A step on the host, with random pages of `kv`."""
    size = kv.layout.page_size
    counts = [-(-context // size) for context in contexts]
    drawn = torch.randperm(kv.pages)
    table = torch.zeros(len(chunks), max(counts) + 1, dtype=torch.int32)
    for row, count in enumerate(counts):
        table[row, :count], drawn = drawn[:count], drawn[count:]
    starts = torch.tensor([0, *torch.tensor(chunks).cumsum(0).tolist()], dtype=torch.int32)
    slots = torch.zeros(sum(chunks), dtype=torch.int64)
    return StepContext(starts, torch.tensor(contexts, dtype=torch.int32), table, slots, kv)


def same(
    got: torch.Tensor,
    step: StepContext,
    query: torch.Tensor,
    scaling: float,
    window: int,
    sinks: torch.Tensor | None = None,
    cap: float = 0.0,
    chunk: int = 0,
) -> None:
    """`got` is what the reference attends over layer 0, in float32 on the CPU."""
    scale = step.kv.layout.scale(0)
    twin = reference.paged_attention(
        query.cpu().float().transpose(0, 1),
        step.kv.keys[0].cpu().float() * scale.key,
        step.kv.values[0].cpu().float() * scale.value,
        step.query_starts,
        step.context_lengths,
        step.page_table,
        scaling=scaling,
        sliding_window=window or None,
        sinks=None if sinks is None else sinks.cpu(),
        cap=cap,
        chunk=chunk,
    )
    assert got.dtype == query.dtype and got.shape == query.shape
    bound = BOUNDS[query.dtype]
    torch.testing.assert_close(got.cpu().float(), twin, rtol=bound, atol=bound)


@contextmanager
def no_waiting() -> Iterator[None]:
    """Raise if anything waits for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


PLANNERS: dict[tuple[object, ...], AttentionPlanner] = {}


def planner(
    layout: KVLayout, backend: str, heads: int, dtype: torch.dtype, windows: set[int], **options: Any
) -> AttentionPlanner:
    """One planner for each case, because FlashInfer's buffers are large."""
    key = (layout, backend, heads, dtype, *options.items(), *sorted(windows))
    if key not in PLANNERS:
        PLANNERS[key] = make_planner(
            layout,
            heads=heads,
            scaling=layout.head_dim**-0.5,
            windows=windows,
            device="cuda",
            backend=backend,
            dtype=dtype,
            **options,
        )
    return PLANNERS[key]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("window", [0, 128])
@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "page_size", "dtype", "cache"),
    [
        (32, 4, 128, 16, torch.bfloat16, torch.bfloat16),
        (32, 4, 128, 16, torch.bfloat16, torch.float8_e4m3fn),
        (16, 16, 64, 64, torch.float16, torch.float16),
        (28, 4, 128, 1, torch.bfloat16, torch.bfloat16),
        (8, 1, 256, 16, torch.bfloat16, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_eager_steps(
    backend: str,
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
    cache: torch.dtype,
    kind: str,
    window: int,
) -> None:
    sizes: Any = {"kv_heads": kv_heads, "head_dim": head_dim, "page_size": page_size}
    layout = KVLayout(layers=1, **sizes, dtype=cache, scales=scales_of(cache))
    kv = random_cache(layout, 6000 // page_size + 8)
    step = make_step(kv, *STEPS[kind])
    plans = planner(layout, backend, heads, dtype, {0, 128})
    query = torch.randn(len(step.slot_mapping), heads, head_dim, device="cuda").to(dtype)
    with no_waiting():
        got = plans.plan(step).attend(0, query, kv, ScoreOptions(head_dim**-0.5, window))
    same(got, step, query, head_dim**-0.5, window)


@pytest.mark.parametrize("window", [0, 128])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256, 512])
@pytest.mark.parametrize("kind", ["mixed", "decode"])
def test_float32_and_odd_heads_go_to_our_kernels(kind: str, head_dim: int, window: int) -> None:
    layout = KVLayout(layers=1, kv_heads=2, head_dim=head_dim, page_size=16, dtype=torch.float32)
    kv = random_cache(layout, 400)
    step = make_step(kv, *STEPS[kind])
    plans = planner(layout, "auto", 8, torch.float32, {0, 128})
    assert plans.backend == "triton"
    query = torch.randn(len(step.slot_mapping), 8, head_dim, device="cuda")
    got = plans.plan(step).attend(0, query, kv, ScoreOptions(head_dim**-0.5, window))
    same(got, step, query, head_dim**-0.5, window)


@pytest.mark.parametrize(
    ("dtype", "cache"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float8_e4m3fn),
        (torch.float16, torch.float16),
        (torch.float32, torch.float32),
    ],
)
def test_sinks_eager_and_captured(dtype: torch.dtype, cache: torch.dtype) -> None:
    """Heads as in gpt-oss, one window of two. Sinks are above all scores of their head, below them or between."""
    layout = KVLayout(layers=1, kv_heads=8, head_dim=64, page_size=16, dtype=cache, scales=scales_of(cache))
    plans = planner(layout, "auto", 64, dtype, {0, 128}, sinks=(True,))
    assert plans.backend == "triton"
    kv = random_cache(layout, 600)
    sinks = torch.linspace(-20, 20, 64, device="cuda")
    options = [ScoreOptions(0.125, window, sinks) for window in (0, 128)]
    for kind in STEPS:
        step = make_step(kv, *STEPS[kind])
        query = torch.randn(len(step.slot_mapping), 64, 64, device="cuda").to(dtype)
        plan = plans.plan(step)
        with no_waiting():
            results = [plan.attend(0, query, kv, option) for option in options]
        for got, option in zip(results, options, strict=True):
            same(got, step, query, 0.125, option.sliding_window, sinks)
    query = torch.randn(6, 64, 64, device="cuda").to(dtype)
    decode = plans.decode_plan(6, 300)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [decode.attend(0, query, kv, option) for option in options]
    for contexts in ([1, 2, 3, 4, 5, 6], STEPS["decode"][1]):
        step = make_step(kv, [1] * 6, contexts)
        decode.update(step)
        graph.replay()
        for got, option in zip(results, options, strict=True):
            same(got, step, query, 0.125, option.sliding_window, sinks)


@pytest.mark.parametrize("chunk", [96, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_chunks_eager_and_captured(dtype: torch.dtype, chunk: int) -> None:
    """Heads as in Llama 4. A chunk may be no multiple of a block of keys, and rows cross its borders."""
    layout = KVLayout(layers=1, kv_heads=8, head_dim=128, page_size=16, dtype=dtype)
    plans = planner(layout, "auto", 40, dtype, {0}, chunk=chunk)
    assert plans.backend == "triton"
    kv = random_cache(layout, 600)
    options = [ScoreOptions(0.125, chunk=size) for size in (0, chunk)]
    for kind in STEPS:
        step = make_step(kv, *STEPS[kind])
        query = torch.randn(len(step.slot_mapping), 40, 128, device="cuda").to(dtype)
        plan = plans.plan(step)
        with no_waiting():
            results = [plan.attend(0, query, kv, option) for option in options]
        for got, option in zip(results, options, strict=True):
            same(got, step, query, 0.125, 0, chunk=option.chunk)
    query = torch.randn(6, 40, 128, device="cuda").to(dtype)
    decode = plans.decode_plan(6, 300)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [decode.attend(0, query, kv, option) for option in options]
    for contexts in ([1, chunk, chunk + 1, 4, 5, 6], STEPS["decode"][1]):
        step = make_step(kv, [1] * 6, contexts)
        decode.update(step)
        graph.replay()
        for got, option in zip(results, options, strict=True):
            same(got, step, query, 0.125, 0, chunk=option.chunk)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_soft_limit_of_scores(backend: str) -> None:
    """Heads as in Gemma 2, one window of two. The limit is low, so that it matters."""
    layout = KVLayout(layers=1, kv_heads=4, head_dim=256, page_size=16, dtype=torch.bfloat16)
    plans = planner(layout, backend, 8, torch.bfloat16, {0, 128}, cap=0.7)
    kv = random_cache(layout, 600)
    for kind in STEPS:
        step = make_step(kv, *STEPS[kind])
        query = torch.randn(len(step.slot_mapping), 8, 256, device="cuda").to(torch.bfloat16)
        plan = plans.plan(step)
        for window in (0, 128):
            got = plan.attend(0, query, kv, ScoreOptions(0.0625, window, cap=0.7))
            same(got, step, query, 0.0625, window, cap=0.7)
    with pytest.raises(ValueError, match="planned for") if backend == "flashinfer" else nullcontext():
        plan.attend(0, query, kv, ScoreOptions(0.0625))


@pytest.mark.parametrize("cache", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_graph_follows_updates(backend: str, rows: int, cache: torch.dtype) -> None:
    """One capture, replays for steps of other lengths and pages; two windows in it; eager steps in between."""
    layout = KVLayout(layers=1, kv_heads=4, head_dim=128, page_size=16, dtype=cache, scales=scales_of(cache))
    plans = planner(layout, backend, 32, torch.bfloat16, {0, 128})
    kv = random_cache(layout, 64 * 40 + 600)
    query = torch.randn(rows, 32, 128, device="cuda").to(torch.bfloat16)
    decode = plans.decode_plan(rows, 600)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        whole, local = (decode.attend(0, query, kv, ScoreOptions(128**-0.5, window)) for window in (0, 128))
    for longest in (1, 300, 9000, 40):
        contexts = [1 + (37 * row) % min(longest, 600) for row in range(rows - 1)] + [longest]
        step = make_step(kv, [1] * rows, contexts)
        with no_waiting():
            decode.update(step)
            graph.replay()
        same(whole, step, query, 128**-0.5, 0)
        same(local, step, query, 128**-0.5, 128)
        eager_step = make_step(kv, *STEPS["mixed"])
        between = torch.randn(len(eager_step.slot_mapping), 32, 128, device="cuda").to(torch.bfloat16)
        same(plans.plan(eager_step).attend(0, between, kv, ScoreOptions(128**-0.5)), eager_step, between, 128**-0.5, 0)


@pytest.mark.parametrize("cache", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize(("backend", "windows"), [("flashinfer", [0]), ("auto", [0]), ("triton", [0, 128])])
def test_a_prompt_graph_follows_updates(backend: str, windows: list[int], cache: torch.dtype) -> None:
    """One capture without tokens, replays for chunks and decode rows of any lengths, with all windows in it."""
    layout = KVLayout(layers=1, kv_heads=4, head_dim=128, page_size=16, dtype=cache, scales=scales_of(cache))
    kv = random_cache(layout, 1100)
    query = torch.randn(512, 32, 128, device="cuda").to(torch.bfloat16)
    plan = planner(layout, backend, 32, torch.bfloat16, {*windows}).prompt_plan(16, 512, 1024)
    graph = torch.cuda.CUDAGraph()
    for captured in (nullcontext(), torch.cuda.graph(graph)):  # the first compiles
        with captured:
            found = [plan.attend(0, query, kv, ScoreOptions(128**-0.5, window)) for window in windows]
    for chunks, contexts in (([512], [512]), STEPS["mixed"], ([1] * 16, [*range(1, 17)]), ([64, 300], [16384, 301])):
        step, live = make_step(kv, chunks, contexts), sum(chunks)
        with no_waiting():
            plan.update(step)
            graph.replay()
        for got, window in zip(found, windows, strict=True):
            same(got[:live], step, query[:live], 128**-0.5, window)
            assert not got[live:].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_steps_may_be_planned_while_the_device_is_behind(backend: str) -> None:
    """A buffer that a plan was written to is not overwritten before it has been copied."""
    layout = KVLayout(layers=1, kv_heads=4, head_dim=128, page_size=16, dtype=torch.bfloat16)
    plans = planner(layout, backend, 32, torch.bfloat16, {0})
    kv = random_cache(layout, 600)
    decode = plans.decode_plan(2, 200)
    query = torch.randn(2, 32, 128, device="cuda").to(torch.bfloat16)
    steps = [make_step(kv, [1, 1], [1 + 150 * number, 3000 - 150 * number]) for number in range(20)]

    def attend(plan: AttentionPlan) -> torch.Tensor:
        return plan.attend(0, query, kv, ScoreOptions(128**-0.5))

    torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]  # cycles
    results = []
    for step in steps:
        decode.update(step)
        results.append((attend(decode), attend(plans.plan(step))))
    for step, (captured, eager) in zip(steps, results, strict=True):
        same(captured, step, query, 128**-0.5, 0)
        same(eager, step, query, 128**-0.5, 0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_plans_of_another_planner_run_at_the_same_time(backend: str) -> None:
    """They are on two streams, as are steps that overlap."""
    layout = KVLayout(layers=1, kv_heads=4, head_dim=128, page_size=16, dtype=torch.bfloat16)
    plans = planner(layout, backend, 32, torch.bfloat16, {0})
    kv = random_cache(layout, 800)
    steps = [make_step(kv, *STEPS[name]) for name in ("mixed", "decode")]
    queries = [torch.randn(int(step.query_starts[-1]), 32, 128, device="cuda").to(torch.bfloat16) for step in steps]
    both = list(zip(steps, queries, (plans, plans.another()), strict=True))
    streams = [torch.cuda.Stream(), torch.cuda.Stream(priority=-1)]  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    results: list[list[torch.Tensor]] = [[], []]
    for _ in range(20):
        for found, stream, (step, query, own) in zip(results, streams, both, strict=True):
            with torch.cuda.stream(stream):
                found.append(own.plan(step).attend(0, query, kv, ScoreOptions(128**-0.5)))
    torch.cuda.synchronize()
    for found, (step, query, _) in zip(results, both, strict=True):
        for result in found:
            same(result, step, query, 128**-0.5, 0)


def test_auto_falls_back_to_our_kernels_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    layout = KVLayout(layers=1, kv_heads=2, head_dim=96, page_size=16, dtype=torch.bfloat16)
    with caplog.at_level(logging.WARNING):
        assert planner(layout, "auto", 4, torch.bfloat16, {0}).backend == "triton"
    assert "FlashInfer is not available" in caplog.text and "not 96" in caplog.text
    with pytest.raises(ValueError, match="flashinfer is not available: its kernels do not support torch\\.float32"):
        small = KVLayout(layers=1, kv_heads=2, head_dim=64, page_size=16, dtype=torch.float32)
        planner(small, "flashinfer", 4, torch.float32, {0})


def test_planners_know_their_memory() -> None:
    layout = KVLayout(layers=1, kv_heads=4, head_dim=128, page_size=16, dtype=torch.bfloat16)
    for backend in BACKENDS:
        plans = planner(layout, backend, 32, torch.bfloat16, {0})
        held = plans.workspace_bytes
        plans.decode_plan(16, 1000)
        assert held < plans.workspace_bytes < held + (64 << 20)
