"""How fast prompts are read alone: `python -m benchmarks.gpu.prefill [--model M] [--results DIR]`.

All experts are on the CPU and come over the bus, then all are in GPU memory, at last without captured steps. The
engine is built for each most tokens of a step, again and again in turns. The first prompts of each length are not
counted: they teach which experts to stream, and how many.
"""

import sys
from statistics import median
from typing import Any

from benchmarks import machine
from benchmarks.command import integers
from benchmarks.gpu.loaded_gpu_model import GIB, LoadedGpuModel, gpu_command_line
from benchmarks.results import write
from ktqueue.bench.engine import measure_prefill
from ktqueue.bench.environment import environment

CACHE_GIB = 4
UNCOUNTED, UNCOUNTED_ON_CPU = 3, 16


def read(loaded: LoadedGpuModel, tokens: int, count: int, uncounted: int) -> dict[str, Any]:
    """The median time of `count` prompts behind `uncounted` others, and what came over the bus for each of them."""
    prompts = loaded.prompts(uncounted + count, tokens)
    measure_prefill(loaded.engine, prompts[:uncounted])
    before, steps = loaded.decoder.expert_work(), loaded.engine.stats().steps
    figure = measure_prefill(loaded.engine, prompts[uncounted:])
    work = loaded.decoder.expert_work().since(before)
    return {
        "tokens": tokens,
        "seconds": figure.seconds,
        "fastest": figure.fastest,
        "steps": (loaded.engine.stats().steps - steps) / count,
        "bus_gb": work.bus_bytes / count / 1e9,
        "cpu_gb": work.cpu_bytes / count / 1e9,
    }


def in_the_median(figures: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A line for each place, most tokens and length: the median of its turns."""
    points: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for figure in figures:
        points.setdefault(tuple(figure[name] for name in ("experts", "step_tokens", "tokens")), []).append(figure)
    lines = []
    for (experts, most, tokens), turns in points.items():
        seconds = median(turn["seconds"] for turn in turns)
        line = {"experts": experts, "step_tokens": most, "tokens": tokens, "ms": 1e3 * seconds}
        line |= {"tokens_per_second": tokens / seconds, "every_turn": [tokens / turn["seconds"] for turn in turns]}
        line |= {name: median(turn[name] for turn in turns) for name in ("steps", "bus_gb", "cpu_gb", "dram_gb_s")}
        lines.append({**line, "bus_gb_s": line["bus_gb"] / seconds})
    return lines


def main() -> None:
    parser = gpu_command_line(__doc__, rows="4")
    parser.add_argument("--on-cpu", type=integers, default="2048,8192,32704", help="tokens, with experts on the CPU")
    parser.add_argument("--on-gpu", type=integers, default="512,2048,8192,16384", help="tokens, with all on the GPU")
    parser.add_argument("--eager", type=integers, default="512", help="tokens, with all on the GPU and no CUDA graphs")
    parser.add_argument("--step-tokens", type=integers, default="8192,32768", help="most tokens of a step")
    parser.add_argument("--count", type=int, default=7, help="prompts of each length in a turn")
    parser.add_argument("--turns", type=int, default=2)
    arguments = parser.parse_args()
    loaded = LoadedGpuModel(arguments.model, max(arguments.rows), CACHE_GIB * GIB, gpu_expert_memory_bytes=0)
    on_gpu = {"gpu_expert_memory_bytes": 2 * loaded.expert_bytes}
    places: dict[str, tuple[dict[str, Any], list[int]]] = {
        "CPU": ({"gpu_expert_memory_bytes": 0}, arguments.on_cpu),
        "GPU": (on_gpu, arguments.on_gpu),
        "GPU, no graphs": ({**on_gpu, "cuda_graphs": False}, arguments.eager),
    }
    result: dict[str, Any] = {"format": 1, "model": arguments.model, "environment": environment()}
    result |= {"prompts": arguments.count, "turns": arguments.turns}
    figures: list[dict[str, Any]] = []
    for turn in range(arguments.turns):
        for experts, (settings, lengths) in places.items():
            for most in arguments.step_tokens if lengths else ():
                loaded.rebuild(**settings, max_num_batched_tokens=most)
                for tokens in lengths:
                    if tokens <= most or most == max(arguments.step_tokens):
                        uncounted = UNCOUNTED_ON_CPU if experts == "CPU" else UNCOUNTED
                        found = read(loaded, tokens, arguments.count, uncounted)
                        figure = {"experts": experts, "step_tokens": most, **found}
                        figures.append({**figure, "dram_gb_s": machine.bandwidth()})
                        sys.stderr.write(f"turn {turn}: {figures[-1]}\n")
                        write(arguments.results / "prefill.json", {**result, "figures": in_the_median(figures)})
    loaded.engine.close()


if __name__ == "__main__":
    main()
