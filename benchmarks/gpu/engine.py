"""Measures the engine of a GPU worker: `python -m benchmarks.gpu.engine [--model M] [--results DIR]`.

First all experts are on the CPU: rows that decode together, and single prompts. Beside each figure is what the CPU's
experts read a second, and what a probe of the memory reads in the same minute. Then decode runs without and with expert
prefetch, in turns, and with some or all experts in GPU memory. The model is loaded once.
"""

from typing import Any

from benchmarks import machine
from benchmarks.command import integers
from benchmarks.gpu.loaded_gpu_model import GIB, PROMPT_TOKENS, LoadedGpuModel, gpu_command_line
from benchmarks.results import GrowingResult
from ktqueue.bench.engine import measure_decode, measure_prefill
from ktqueue.bench.environment import environment

OUTPUT_TOKENS = 32


def decode(loaded: LoadedGpuModel, rows: int, rounds: int) -> dict[str, Any]:
    """The best of some rounds, and what the CPU's experts did in all of them."""
    before = loaded.decoder.handoff_statistics
    measured = [
        measure_decode(loaded.engine, loaded.prompts(rows, seed=number), OUTPUT_TOKENS) for number in range(rounds)
    ]
    best = max(measured, key=lambda figure: figure.tokens_per_second)
    figure = {
        "rows": rows,
        "prompt_tokens": PROMPT_TOKENS,
        "tokens_per_second": best.tokens_per_second,
        "step_ms": 1e3 * best.step,
        "fastest_step_ms": 1e3 * best.fastest_step,
        "host_share": best.host_share,
    }
    after = loaded.decoder.handoff_statistics
    if before and after and after.tasks > before.tasks:
        figure["cpu_experts_gb_s"] = (after.bytes - before.bytes) / (after.busy_seconds - before.busy_seconds) / 1e9
        figure["dram_gb_s"] = machine.bandwidth()
        predicted = after.predicted - before.predicted
        if predicted > 0:
            figure["expert_prediction_rate"] = (after.predicted_used - before.predicted_used) / predicted
    experts = loaded.decoder.statistics()
    if experts:
        figure["expert_fetched_share"] = experts[f"expert_fetched_share_{'one' if rows == 1 else 'several'}"]
    if "expert_hit_rate" in experts:
        figure["expert_hit_rate"] = experts["expert_hit_rate"]
    return figure


def prefill(loaded: LoadedGpuModel, tokens: int, rounds: int) -> dict[str, Any]:
    """Prompts alone; the first ones teach what to stream, so that the median counts."""
    measured = measure_prefill(loaded.engine, loaded.prompts(rounds, tokens))
    return {
        "tokens": tokens,
        "tokens_per_second": measured.tokens_per_second,
        "ms": 1e3 * measured.seconds,
        "fastest_ms": 1e3 * measured.fastest,
    }


def main() -> None:
    parser = gpu_command_line(__doc__, rows="1,4,16,32,64")
    parser.add_argument("--prefill", type=integers, default="512,2048,8192", help="tokens of prompts that run alone")
    parser.add_argument("--memory", type=integers, default="4,8", help="GiB of GPU memory for experts, for the curve")
    parser.add_argument("--curve-rows", type=integers, default="1,4,16", help="rows of the curve")
    parser.add_argument("--prefetch-turns", type=int, default=2, help="without and with expert prefetch, so many times")
    parser.add_argument("--expert-streaming", default="auto", help="off: no experts come to the GPU for a step")
    parser.add_argument("--rounds", type=int, default=2, help="of each point")
    arguments = parser.parse_args()
    loaded = LoadedGpuModel(
        arguments.model, max(arguments.rows), 12 * GIB, expert_streaming=arguments.expert_streaming
    )  # fmt: skip
    result = GrowingResult(arguments.results / "gpu.json", model=arguments.model, environment=environment())
    for rows in arguments.rows:
        result.add(decode(loaded, rows, arguments.rounds), "decode")
    for tokens in arguments.prefill:
        result.add(prefill(loaded, tokens, 3 * arguments.rounds), "prefill")
    all_experts = loaded.expert_bytes
    for prefetch in arguments.prefetch_turns * (False, True):
        loaded.rebuild(expert_prefetch=prefetch)
        for rows in arguments.curve_rows:
            result.add({"expert_prefetch": prefetch, **decode(loaded, rows, arguments.rounds)}, "prefetch")
    for memory in [*(gigabytes * GIB for gigabytes in arguments.memory), all_experts] if arguments.memory else []:
        loaded.rebuild(gpu_expert_memory_bytes=memory)
        for rows in arguments.rows if memory == all_experts else arguments.curve_rows:
            result.add({"expert_memory_gib": memory / GIB, **decode(loaded, rows, arguments.rounds)}, "curve")
    loaded.engine.close()


if __name__ == "__main__":
    main()
