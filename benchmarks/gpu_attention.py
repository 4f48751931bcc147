"""Attention on a GPU, timed: `python -m benchmarks.gpu_attention`, for the shape of Qwen3-30B-A3B.

Microseconds of one layer for each backend: decode rows in a CUDA graph over enough layers that no keys stay in the
cache, prefill of one prompt eager; then what a plan costs the host. GB/s are the bytes of the keys and values.
"""

import argparse
import sys
import time
from collections.abc import Callable

import torch

from ktqueue.operators.gpu.attention import AttentionPlanner, make_planner
from ktqueue.operators.kv_cache import KVCache, KVLayout
from ktqueue.operators.step import AttentionPlan, StepContext

HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 32, 4, 128, 16
SCALING = HEAD_DIM**-0.5
LAYERS = 8
DECODE = tuple((rows, context) for context in (512, 8192) for rows in (1, 16, 64))
PREFILL = (512, 8192)
TYPES = {"bfloat16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


def seconds(call: Callable[[], object], repeats: int) -> float:
    """Of one call, on the device."""
    call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / repeats


def make_step(kv: KVCache, rows: int, tokens: int, context: int) -> StepContext:
    """`rows` alike, each of `tokens` tokens, the last of which sees `context` keys."""
    pages = -(-context // PAGE_SIZE)
    return StepContext(
        query_starts=torch.arange(rows + 1, dtype=torch.int32) * tokens,
        context_lengths=torch.full((rows,), context, dtype=torch.int32),
        page_table=torch.randperm(rows * pages).view(rows, pages).to(torch.int32),
        slot_mapping=torch.zeros(rows * tokens, dtype=torch.int64),
        kv=kv,
    )


def attend(plan: AttentionPlan, query: torch.Tensor, kv: KVCache) -> None:
    """All layers."""
    for layer in range(LAYERS):
        plan.attend(layer, query, kv, scaling=SCALING)


def decode_line(planner: AttentionPlanner, kv: KVCache, rows: int, context: int) -> str:
    """Decode rows in a graph, and the host's time for an update."""
    step = make_step(kv, rows, 1, context)
    plan = planner.decode_plan(rows, -(-context // PAGE_SIZE))
    query = torch.randn(rows, HEADS, HEAD_DIM, device="cuda").to(torch.bfloat16)
    plan.update(step)
    attend(plan, query, kv)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend(plan, query, kv)
    layer = seconds(graph.replay, 20) / LAYERS
    begin = time.perf_counter()
    for _ in range(50):
        plan.update(step)
        torch.cuda.synchronize()
    update = (time.perf_counter() - begin) / 50
    gigabytes = rows * context * KV_HEADS * HEAD_DIM * 2 * kv.layout.dtype.itemsize / 1e9
    speed = gigabytes / layer
    return (
        f"decode  {rows:4} rows x {context:5}: {layer * 1e6:8.1f} us {speed:7.0f} GB/s, update {update * 1e6:6.0f} us"
    )


def prefill_line(planner: AttentionPlanner, kv: KVCache, tokens: int) -> str:
    """One whole prompt, and the host's time for a plan."""
    step = make_step(kv, 1, tokens, tokens)
    query = torch.randn(tokens, HEADS, HEAD_DIM, device="cuda").to(torch.bfloat16)
    plan = planner.plan(step)
    layer = seconds(lambda: attend(plan, query, kv), 5) / LAYERS
    begin = time.perf_counter()
    for _ in range(20):
        planner.plan(step)
        torch.cuda.synchronize()
    planned = (time.perf_counter() - begin) / 20
    operations = 2 * 2 * HEADS * HEAD_DIM * tokens * (tokens + 1) / 2
    rate = operations / layer / 1e12
    return f"prefill {tokens:17}: {layer * 1e6:8.1f} us {rate:7.0f} TFLOP/s, plan {planned * 1e6:4.0f} us"


def main() -> None:
    """A table of each backend and type of cache."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", action="append", choices=("flashinfer", "triton"))
    parser.add_argument("--cache", action="append", choices=tuple(TYPES))
    arguments = parser.parse_args()
    pages = max(rows * -(-context // PAGE_SIZE) for rows, context in DECODE)
    for name in arguments.cache or TYPES:
        layout = KVLayout(layers=LAYERS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, page_size=PAGE_SIZE, dtype=TYPES[name])
        kv = KVCache(layout, pages, "cuda")
        for backend in arguments.backend or ("flashinfer", "triton"):
            begin = time.perf_counter()
            planner = make_planner(
                layout, heads=HEADS, scaling=SCALING, windows=frozenset({0}), device="cuda", backend=backend
            )
            torch.cuda.synchronize()
            sys.stdout.write(f"{backend}, {name} cache, made in {time.perf_counter() - begin:.1f} s\n")
            for rows, context in DECODE:
                sys.stdout.write(f"  {decode_line(planner, kv, rows, context)}\n")
            for tokens in PREFILL:
                sys.stdout.write(f"  {prefill_line(planner, kv, tokens)}\n")
            sys.stdout.write(f"  memory of plans {planner.workspace_bytes / 2**20:.0f} MiB\n")


if __name__ == "__main__":
    main()
