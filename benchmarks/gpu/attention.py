"""Measures attention on a GPU: `python -m benchmarks.gpu.attention`, for the shape of Qwen3-30B-A3B.

Figures are microseconds of one layer for each backend. Decode rows run in a CUDA graph over enough layers that no keys
stay in the GPU's cache; a prompt runs eagerly. Then the host's time for a plan is measured. GB/s count the bytes of
keys and values. The torch twin cannot be captured and always runs eagerly.
"""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from benchmarks.command import command_line
from benchmarks.results import GrowingResult
from ktqueue.bench.environment import environment
from ktqueue.operators.gpu.attention.backends import make_planner
from ktqueue.operators.gpu.attention.base import AttentionPlanner
from ktqueue.operators.kv_cache import KVCache, KVLayout
from ktqueue.operators.step import AttentionPlan, ScoreOptions, StepContext

HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 32, 4, 128, 16
SCALING = HEAD_DIM**-0.5
LAYERS = 8
DECODE = tuple((rows, context) for context in (512, 4096, 32768) for rows in (1, 4, 16, 64))
PREFILL = (512, 2048, 8192, 32768)
TORCH_KEYS = 16_384  # the torch twin copies its keys, so larger steps would take minutes
TYPES = {"bfloat16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
BACKENDS = ("flashinfer", "triton", "torch")
ROUNDS = 3


def seconds(call: Callable[[], object], repeats: int) -> float:
    """Time of one call on the device: the median of ROUNDS, each the mean of `repeats` calls."""
    call()
    rounds = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        begin.record()
        for _ in range(repeats):
            call()
        end.record()
        end.synchronize()
        rounds.append(float(begin.elapsed_time(end)) / 1e3 / repeats)
    return median(rounds)


def host_seconds(call: Callable[[], object], repeats: int = 20) -> float:
    """Time of one call on the host, with what it enqueues."""
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / repeats


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
    """Attention of all layers."""
    for layer in range(LAYERS):
        plan.attend(layer, query, kv, ScoreOptions(SCALING))


def decode(planner: AttentionPlanner, kv: KVCache, rows: int, context: int) -> dict[str, Any]:
    """Decode rows, captured in a graph where the backend can be, and the host's time for an update of the plan."""
    step = make_step(kv, rows, 1, context)
    plan = planner.decode_plan(rows, -(-context // PAGE_SIZE))
    query = torch.randn(rows, HEADS, HEAD_DIM, device="cuda").to(torch.bfloat16)
    plan.update(step)
    attend(plan, query, kv)
    if planner.backend == "torch":
        layer = seconds(lambda: attend(plan, query, kv), 2) / LAYERS
    else:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            attend(plan, query, kv)
        layer = seconds(graph.replay, 20) / LAYERS
    gigabytes = rows * context * KV_HEADS * HEAD_DIM * 2 * kv.layout.dtype.itemsize / 1e9
    return {
        "rows": rows,
        "keys": context,
        "layer_us": 1e6 * layer,
        "gb_s": gigabytes / layer,
        "plan_us": 1e6 * host_seconds(lambda: plan.update(step)),
    }


def prefill(planner: AttentionPlanner, kv: KVCache, tokens: int) -> dict[str, Any]:
    """One whole prompt, and the host's time for a plan."""
    step = make_step(kv, 1, tokens, tokens)
    query = torch.randn(tokens, HEADS, HEAD_DIM, device="cuda").to(torch.bfloat16)
    plan = planner.plan(step)
    layer = seconds(lambda: attend(plan, query, kv), 3) / LAYERS
    operations = 2 * 2 * HEADS * HEAD_DIM * tokens * (tokens + 1) / 2
    return {
        "tokens": tokens,
        "layer_us": 1e6 * layer,
        "tflop_s": operations / layer / 1e12,
        "plan_us": 1e6 * host_seconds(lambda: planner.plan(step)),
    }


def measure(backend: str, kv: KVCache) -> dict[str, Any]:
    """All figures of one backend."""
    begin = time.perf_counter()
    planner = make_planner(
        kv.layout, heads=HEADS, scaling=SCALING, windows=frozenset({0}), device="cuda", backend=backend
    )
    torch.cuda.synchronize()
    figure: dict[str, Any] = {"backend": backend, "made_in_seconds": time.perf_counter() - begin}
    most = TORCH_KEYS if backend == "torch" else max(rows * context for rows, context in DECODE)
    figure["decode"] = [decode(planner, kv, *shape) for shape in DECODE if shape[0] * shape[1] <= most]
    figure["prefill"] = [prefill(planner, kv, tokens) for tokens in PREFILL if backend != "torch" or tokens <= 2048]
    figure["workspace_mib"] = planner.workspace_bytes / 2**20
    return figure


def main() -> None:
    """Measure each backend and type of cache, and keep the figures."""
    parser = command_line(__doc__)
    parser.add_argument("--backend", action="append", choices=BACKENDS)
    parser.add_argument("--cache", action="append", choices=tuple(TYPES))
    arguments = parser.parse_args()
    result = GrowingResult(arguments.results / "attention.json", environment=environment())
    pages = max(rows * -(-context // PAGE_SIZE) for rows, context in DECODE)
    for name in arguments.cache or TYPES:
        layout = KVLayout(layers=LAYERS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, page_size=PAGE_SIZE, dtype=TYPES[name])
        kv = KVCache(layout, pages, "cuda")
        for backend in arguments.backend or BACKENDS:
            if backend == "torch" and name != "bfloat16":
                continue
            result.add({"cache": name, **measure(backend, kv)})
        del kv


if __name__ == "__main__":
    main()
