"""Where a decode step of a GPU worker spends its time: `python -m benchmarks.gpu.profile [--model M] [--results DIR]`.

Kernels are traced by CUDA's profiler (torch.profiler) over some steps and added up by what they are for; what lies
between two of them is short, a launch's latency, or long, a wait for the CPU's experts or for the host. Steps are timed
without the profiler first, which slows them down.
"""

import argparse
import gc
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.autograd.profiler_util import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.engine import GIB, PROMPT_TOKENS, decoder_of
from benchmarks.results import RESULTS, write
from ktqueue.bench.engine import finish, prompts, start
from ktqueue.bench.environment import environment
from ktqueue.core.config import EngineConfig
from ktqueue.workers.startup.build import Built, assemble, build

STEPS = 8  # that are traced
WARM = 4  # before them
LONG_GAP = 5.0  # microseconds
PARTS = {  # by words of a kernel's name; the first that fits
    "over the bus": ("_fetch_kernel", "_divide_kernel"),
    "experts": ("_experts_kernel", "_prepare_kernel", "_panels_kernel", "_sort_kernel"),
    "attention": ("flashinfer", "Batch", "MergeStates", "_decode_split", "_decode_join", "_latent_"),
    "norms, rotary, router": ("_add_rms_norm", "_gated", "_qk_norm_rope_append", "_route"),
    "matrices": ("_few_rows", "_decode_kernel", "gemm", "gemv", "nvjet", "cutlass", "cublas", "splitK"),
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
    ordered = sorted(kernels, key=lambda one: one.begin)
    at = ordered[0].begin
    for one in ordered:
        gap = max(0.0, one.begin - at)
        gaps["long gaps" if gap > LONG_GAP else "short gaps"] += gap
        parts[part_of(one.name)] += max(0.0, one.end - max(at, one.begin))
        at = max(at, one.end)
    milliseconds = {name: value / steps / 1e3 for name, value in (parts | gaps).items()}
    return {"kernels": len(kernels) / steps, "ms": milliseconds}


def measure(built: Built, rows: int) -> dict[str, Any]:
    """Rows that decode together, after prompts of PROMPT_TOKENS."""
    engine, decoder = built.engine, decoder_of(built)
    start(engine, prompts(rows, PROMPT_TOKENS, built.tokenizer.size), 3 * (WARM + STEPS), {})

    def step() -> float:
        begun = time.perf_counter()
        engine.step()
        return time.perf_counter() - begun

    for _ in range(WARM):
        step()
    before = decoder.handoff_statistics
    plain = [step() for _ in range(STEPS)]
    after = decoder.handoff_statistics
    figure: dict[str, Any] = {"rows": rows, "step_ms": 1e3 * median(plain)}
    if before and after:
        figure["cpu_experts_ms"] = 1e3 * (after.busy_seconds - before.busy_seconds) / STEPS
        figure["cpu_experts_gb"] = (after.bytes - before.bytes) / STEPS / 1e9
    with profile(activities=[ProfilerActivity.CUDA]) as traced:
        step()  # the profiler's own first
        torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as traced:
        figure["traced_step_ms"] = 1e3 * median([step() for _ in range(STEPS)])
        torch.cuda.synchronize()
    events = [one for one in traced.events() if one.device_type == DeviceType.CUDA]
    kernels = [Kernel(one.name, one.time_range.start, one.time_range.end) for one in events]
    finish(engine)
    unknown = sorted({one.name[:60] for one in kernels if part_of(one.name) == REST})
    sys.stderr.write(f"{rows} rows; rest: {unknown}\n")
    return figure | divide(kernels, STEPS)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", default="synthetic:qwen3-30b-a3b:q4_k_m")
    parser.add_argument("--rows", default="1,4,16,64", help="rows that decode at once")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    arguments = parser.parse_args()
    rows = [int(one) for one in arguments.rows.split(",")]
    config = EngineConfig(
        model=arguments.model,
        device="cuda",
        enable_prefix_caching=False,
        max_num_seqs=max(rows),
        kv_cache_bytes=2 * GIB,
    )
    built = build(config)
    result: dict[str, Any] = {"format": 1, "model": arguments.model, "environment": environment()}
    result["prompt_tokens"], result["steps"] = PROMPT_TOKENS, STEPS
    result["on_cpu"] = [measure(built, count) for count in rows]
    whole = int(decoder_of(built).statistics()["expert_bytes"])
    built.engine.close()
    model, tokenizer = built.model, built.tokenizer
    del built
    gc.collect()
    torch.cuda.empty_cache()
    built = assemble(replace(config, gpu_expert_memory_bytes=whole), model, tokenizer)
    result["on_gpu"] = [measure(built, count) for count in rows]
    built.engine.close()
    write(arguments.results / "profile.json", result)


if __name__ == "__main__":
    main()
