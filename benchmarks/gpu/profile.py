"""Where a decode step of a GPU worker spends its time: `python -m benchmarks.gpu.profile [--model M] [--results DIR]`.

Kernels are traced by CUDA's profiler (torch.profiler) over some steps and added up by what they are for; what lies
between two of them is short, a launch's latency, or long, a wait for the CPU's experts or for the host. Steps are timed
without the profiler first, which slows them down.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch.autograd.profiler_util import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.loaded_gpu_model import GIB, PROMPT_TOKENS, LoadedGpuModel, gpu_command_line
from benchmarks.results import write
from ktqueue.bench.engine import finish, start, step
from ktqueue.bench.environment import environment

STEPS = 8  # that are traced
WARM = 4  # before them
LONG_GAP = 5.0  # microseconds
PARTS = {  # by words of a kernel's name; the first that fits
    "over the bus": ("_fetch_kernel", "_divide_kernel"),
    "experts": (
        *("_experts_kernel", "_of_pair", "multiply_experts", "_prepare_kernel", "_panels_kernel", "_sort_kernel"),
        *("multiply_many", "_order_words", "_count_blocks", "_add_blocks", "_place_pairs"),
        *("_decode_experts", "_join_rows", "_add_slots", "GroupProblemShape", "grouped_gemm"),
    ),
    "attention": ("flashinfer", "Batch", "MergeStates", "_decode_split", "_decode_join", "_latent_", "attend_to_"),
    "norms, rotary, router": ("_add_rms_norm", "_gated", "_qk_norm_rope_append", "_route", "route_some_rows"),
    "matrices": (
        *("_few_rows", "multiply_panels", "_decode_kernel"),
        *("gemm", "gemv", "nvjet", "cutlass", "cublas", "splitK"),
    ),
}
REST = "rest"
"""Copies, the sampler, torch's small kernels."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One that ran on the device, from `begin` to `end` in microseconds."""

    name: str
    begin: float
    end: float


def part_of(name: str) -> str:
    """What a kernel is for."""
    return next((part for part, words in PARTS.items() if any(word in name for word in words)), REST)


def divide(kernels: Sequence[Kernel], steps: int) -> dict[str, Any]:
    """Of so many steps: milliseconds of each part in one, of gaps between kernels, short ones and long ones, and how
    many kernels there are. A kernel beside another counts only from where that one ends."""
    parts = dict.fromkeys([*PARTS, REST], 0.0)
    gaps = {"short gaps": 0.0, "long gaps": 0.0}
    ordered = sorted(kernels, key=lambda kernel: kernel.begin)
    counted_to = ordered[0].begin
    for kernel in ordered:
        gap = max(0.0, kernel.begin - counted_to)
        gaps["long gaps" if gap > LONG_GAP else "short gaps"] += gap
        parts[part_of(kernel.name)] += max(0.0, kernel.end - max(counted_to, kernel.begin))
        counted_to = max(counted_to, kernel.end)
    milliseconds = {name: value / steps / 1e3 for name, value in (parts | gaps).items()}
    return {"kernels": len(kernels) / steps, "ms": milliseconds}


def measure(loaded: LoadedGpuModel, rows: int, launch: str = "ahead") -> dict[str, Any]:
    """Rows that decode together, after prompts of PROMPT_TOKENS. launch: one of ktqueue.bench.engine.LAUNCHES."""
    engine, decoder = loaded.engine, loaded.decoder
    start(engine, loaded.prompts(rows), 3 * (WARM + STEPS), {})

    def timed_step() -> float:
        begun = time.perf_counter()
        step(engine, launch)
        return time.perf_counter() - begun

    for _ in range(WARM):
        timed_step()
    before = decoder.handoff_statistics
    plain = [timed_step() for _ in range(STEPS)]
    after = decoder.handoff_statistics
    figure: dict[str, Any] = {"rows": rows, "step_ms": 1e3 * median(plain)}
    if before and after:
        figure["cpu_experts_ms"] = 1e3 * (after.busy_seconds - before.busy_seconds) / STEPS
        figure["cpu_experts_gb"] = (after.bytes - before.bytes) / STEPS / 1e9
    with profile(activities=[ProfilerActivity.CUDA]) as traced:
        timed_step()  # the profiler's own first
        torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as traced:
        figure["traced_step_ms"] = 1e3 * median([timed_step() for _ in range(STEPS)])
        torch.cuda.synchronize()
    events = [event for event in traced.events() if event.device_type == DeviceType.CUDA]
    kernels = [Kernel(event.name, event.time_range.start, event.time_range.end) for event in events]
    finish(engine)
    unknown = sorted({kernel.name[:60] for kernel in kernels if part_of(kernel.name) == REST})
    sys.stderr.write(f"{rows} rows; rest: {unknown}\n")
    return figure | divide(kernels, STEPS)


def main() -> None:
    arguments = gpu_command_line(__doc__, rows="1,4,16,64").parse_args()
    loaded = LoadedGpuModel(arguments.model, max(arguments.rows), 2 * GIB)
    result: dict[str, Any] = {"format": 1, "model": arguments.model, "environment": environment()}
    result["prompt_tokens"], result["steps"] = PROMPT_TOKENS, STEPS
    result["on_cpu"] = [measure(loaded, rows) for rows in arguments.rows]
    loaded.rebuild(gpu_expert_memory_bytes=loaded.expert_bytes)
    result["on_gpu"] = [measure(loaded, rows) for rows in arguments.rows]
    loaded.engine.close()
    write(arguments.results / "profile.json", result)


if __name__ == "__main__":
    main()
