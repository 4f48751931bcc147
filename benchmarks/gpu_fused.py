"""Microseconds of one call of each fused operator on a GPU, in a CUDA graph of 48 calls, as a decode step makes them.

python -m benchmarks.gpu_fused: Qwen3-30B-A3B's sizes in bf16, at 1, 4, 16 and 64 rows; matrices at 1, 2 and 4, beside
torch's. Each call of a graph has its own
weights, as each layer has.
"""

import sys
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch.nn import functional

from ktqueue.operators.gpu.kernels.fused import add_rms_norm, few_rows_linear, gated, qk_norm_rope_append, route

CALLS = 48  # layers
ROWS = (1, 4, 16, 64)
FEW = (1, 2, 4)
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, EXPERTS, CHOSEN = 2048, 32, 4, 128, 128, 8


def microseconds(call: Callable[[int], Any], rounds: int = 20) -> float:
    """Of call(i), the median of `rounds` replays of a graph of call(0) to call(CALLS - 1)."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        call(0)  # compiles
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(CALLS):
            call(i)
    times: list[float] = []
    for _ in range(rounds):
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / CALLS)
    return median(times)


def operators(rows: int) -> dict[str, Callable[[int], Any]]:
    """Name to call(layer)."""

    def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, device="cuda").to(dtype)

    residual, added, partials = random(rows, HIDDEN), random(rows, HIDDEN), random(rows, 8, HIDDEN, dtype=torch.float32)
    norms, head_norms = random(CALLS, HIDDEN), random(CALLS, HEAD_DIM)
    qkv = random(rows, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
    table = random(4096, HEAD_DIM // 2, dtype=torch.float32)
    positions = torch.arange(rows, device="cuda")
    slots = positions * 16
    caches = random(2, CALLS, rows, 16, KV_HEADS, HEAD_DIM)
    fp8 = caches.to(torch.float8_e4m3fn)
    logits = random(CALLS, rows, EXPERTS)
    counts = torch.zeros(CALLS, EXPERTS, dtype=torch.int32, device="cuda")
    places = torch.full((EXPERTS,), -1, device="cuda")
    live = torch.tensor([rows], dtype=torch.int32, device="cuda")
    gate_up = random(rows, 2 * 6144)

    def append(layer: int, cache: torch.Tensor) -> torch.Tensor:
        return qk_norm_rope_append(
            qkv,
            heads=HEADS,
            kv_heads=KV_HEADS,
            q_norm=head_norms[layer],
            k_norm=head_norms[layer],
            epsilon=1e-6,
            cosine=table,
            sine=table,
            positions=positions,
            slot_mapping=slots,
            keys=cache[0, layer],
            values=cache[1, layer],
        )

    return {
        "add_rms_norm": lambda layer: add_rms_norm(residual, norms[layer], 1e-6, added=added),
        "add_rms_norm, 8 partials": lambda layer: add_rms_norm(residual, norms[layer], 1e-6, partials=partials),
        "qk_norm_rope_append": lambda layer: append(layer, caches),
        "qk_norm_rope_append, fp8": lambda layer: append(layer, fp8),
        "route 8 of 128": lambda layer: route(
            logits[layer], CHOSEN, renormalise=True, on_gpu=places, live_tokens=live, counts=counts[layer]
        ),
        "gated 6144": lambda layer: gated("silu", gate_up),
    }


def linears(rows: int) -> dict[str, Callable[[int], Any]]:
    """Name to call(layer) of the dense matrices: ours and torch's."""
    shapes = {"qkv": (5120, HIDDEN), "output": (HIDDEN, 4096), "router": (EXPERTS, HIDDEN), "gate_up": (12288, HIDDEN)}
    calls: dict[str, Callable[[int], Any]] = {}
    for name, (outputs, columns) in shapes.items():
        weights = torch.randn(CALLS, outputs, columns, device="cuda", dtype=torch.bfloat16)
        x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
        calls[f"{name} {outputs} x {columns}"] = partial(_one, few_rows_linear, x, weights)
        calls[f"{name}, torch"] = partial(_one, functional.linear, x, weights)
    head = torch.randn(151936, HIDDEN, device="cuda", dtype=torch.bfloat16)  # larger than any cache: one is enough
    last = torch.randn(rows, HIDDEN, device="cuda", dtype=torch.bfloat16)
    calls[f"logits 151936 x {HIDDEN}"] = lambda layer: few_rows_linear(last, head)
    calls["logits, torch"] = lambda layer: functional.linear(last, head)
    return calls


def _one(multiply: Callable[..., torch.Tensor], x: torch.Tensor, weights: torch.Tensor, layer: int) -> torch.Tensor:
    return multiply(x, weights[layer])


def main() -> None:
    """Print the table."""
    write = sys.stdout.write
    write(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; us a call in a graph of {CALLS}\n")
    for make, counts in ((operators, ROWS), (linears, FEW)):
        write(f"{'':28}" + "".join(f"{f'{rows} rows':>10}" for rows in counts) + "\n")
        columns = [{name: microseconds(call) for name, call in make(rows).items()} for rows in counts]
        for name in columns[0]:
            write(f"{name:28}" + "".join(f"{column[name]:10.2f}" for column in columns) + "\n")


if __name__ == "__main__":
    main()
