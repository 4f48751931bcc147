"""Measures the engine of a GPU worker: `python -m benchmarks.gpu.engine [--model M] [--results DIR]`.

First all experts are on the CPU: rows that decode together, and single prompts. Beside each figure is what the CPU's
experts read a second, and what a probe of the memory reads in the same minute. Then decode runs without and with expert
prefetch, in turns, and with some or all experts in GPU memory. The model is loaded once.
"""

import argparse
import gc
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine
from benchmarks.results import RESULTS, write
from ktqueue.bench.engine import measure_decode, measure_prefill, prompts
from ktqueue.bench.environment import environment
from ktqueue.core.config import EngineConfig
from ktqueue.operators.gpu.decoder import GpuDecoder
from ktqueue.workers.startup.build import Built, assemble, build

PROMPT_TOKENS, OUTPUT_TOKENS = 128, 32
GIB = 1 << 30


def decoder_of(built: Built) -> GpuDecoder:
    """The model's one operator."""
    decoder = built.model.module
    if not isinstance(decoder, GpuDecoder):
        raise SystemExit(f"GpuDecoder is measured; the rules put {type(decoder).__name__} there")
    return decoder


def decode(built: Built, rows: int, rounds: int, prompt_tokens: int = PROMPT_TOKENS) -> dict[str, Any]:
    """The best of some rounds, and what the CPU's experts did in all of them."""
    engine, decoder = built.engine, decoder_of(built)
    before = decoder.handoff_statistics
    vocabulary = built.tokenizer.size
    taken = [
        measure_decode(engine, prompts(rows, prompt_tokens, vocabulary, seed=again), OUTPUT_TOKENS)
        for again in range(rounds)
    ]
    best = max(taken, key=lambda one: one.tokens_per_second)
    figure = {
        "rows": rows,
        "prompt_tokens": prompt_tokens,
        "tokens_per_second": best.tokens_per_second,
        "step_ms": 1e3 * best.step,
        "fastest_step_ms": 1e3 * best.fastest_step,
        "host_share": best.host_share,
    }
    after = decoder.handoff_statistics
    if before and after and after.tasks > before.tasks:
        figure["cpu_experts_gb_s"] = (after.bytes - before.bytes) / (after.busy_seconds - before.busy_seconds) / 1e9
        figure["dram_gb_s"] = machine.bandwidth()
        predicted = after.predicted - before.predicted
        if predicted > 0:
            figure["expert_prediction_rate"] = (after.predicted_used - before.predicted_used) / predicted
    experts = decoder.expert_statistics
    if experts is not None:
        figure["expert_fetched_share"] = experts.fetched_shares.of(rows)
        if experts.hit_rate is not None:
            figure["expert_hit_rate"] = experts.hit_rate
    return figure


def prefill(built: Built, tokens: int, rounds: int) -> dict[str, Any]:
    """Prompts alone; the first ones teach what to stream, so that the median counts."""
    taken = measure_prefill(built.engine, prompts(rounds, tokens, built.tokenizer.size))
    return {
        "tokens": tokens,
        "tokens_per_second": taken.tokens_per_second,
        "ms": 1e3 * taken.seconds,
        "fastest_ms": 1e3 * taken.fastest,
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", default="synthetic:qwen3-30b-a3b:q4_k_m")
    parser.add_argument("--rows", default="1,4,16,32,64", help="rows that decode at once")
    parser.add_argument("--prefill", default="512,2048,8192", help="tokens of prompts that are read alone")
    parser.add_argument("--memory", default="4,8", help="GiB of GPU memory for experts: points of the curve")
    parser.add_argument("--curve-rows", default="1,4,16", help="rows of the curve")
    parser.add_argument("--prefetch-turns", type=int, default=2, help="without and with expert prefetch, so many times")
    parser.add_argument("--expert-streaming", default="auto", help="off: no experts come to the GPU for a step")
    parser.add_argument("--rounds", type=int, default=2, help="of each point")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    arguments = parser.parse_args()
    rows, lengths, gigabytes, curve_rows = (
        [int(one) for one in text.split(",") if one]
        for text in (
            arguments.rows,
            arguments.prefill,
            arguments.memory,
            arguments.curve_rows,
        )
    )
    config = EngineConfig(
        model=arguments.model,
        device="cuda",
        enable_prefix_caching=False,
        max_num_seqs=max(rows),
        kv_cache_bytes=12 * GIB,
        expert_streaming=arguments.expert_streaming,
    )
    result: dict[str, Any] = {"format": 1, "model": arguments.model}

    def keep() -> None:  # an interrupted run leaves what it has
        write(arguments.results / "gpu.json", result)

    def say(what: str, figure: dict[str, Any]) -> dict[str, Any]:
        sys.stderr.write(f"{what}: {figure}\n")
        return figure

    built = build(config)
    result["environment"] = environment()
    result["decode"] = [say("decode", decode(built, count, arguments.rounds)) for count in rows]
    keep()
    result["prefill"] = [say("prefill", prefill(built, length, 3 * arguments.rounds)) for length in lengths]
    keep()
    whole = int(decoder_of(built).statistics()["expert_bytes"])
    points: list[tuple[str, dict[str, Any], EngineConfig]] = [
        ("prefetch", {"expert_prefetch": on}, replace(config, expert_prefetch=on))
        for on in arguments.prefetch_turns * (False, True)
    ]
    points += [
        ("curve", {"expert_memory_gib": memory / GIB}, replace(config, gpu_expert_memory_bytes=memory))
        for memory in ([*(count * GIB for count in gigabytes), whole] if gigabytes else [])
    ]
    result |= {"prefetch": [], "curve": []}
    for part, what, settings in points:
        built.engine.close()
        model, tokenizer = built.model, built.tokenizer
        del built
        gc.collect()
        torch.cuda.empty_cache()
        built = assemble(settings, model, tokenizer)
        for count in rows if settings.gpu_expert_memory_bytes == whole else curve_rows:
            result[part].append(say(part, {**what, **decode(built, count, arguments.rounds)}))
        keep()
    built.engine.close()


if __name__ == "__main__":
    main()
