"""Compares ways to compute a step: `python -m benchmarks.gpu.trials [--model M] [--results DIR]`.

Each way is changed alone, or with others as in `one+other`, between runs with none changed
(ktqueue/operators/gpu/settings.py). The model is loaded once, and the engine is built again for each run. Decode is
greedy, and its tokens are compared with those of the first run. They may differ where a trial rounds in another way. A
trace of some steps counts kernels, gaps and what the kernels are for.
"""

import sys
from dataclasses import fields
from typing import Any

from benchmarks.command import integers
from benchmarks.gpu.launches import answers
from benchmarks.gpu.loaded_gpu_model import GIB, PROMPT_TOKENS, LoadedGpuModel, gpu_command_line
from benchmarks.gpu.profile import measure as trace
from benchmarks.results import write
from ktqueue.bench.engine import measure_decode, measure_prefill
from ktqueue.bench.environment import environment
from ktqueue.operators.gpu.settings import Trials

OUTPUT_TOKENS = 96
CACHE_BYTES = 12 * GIB
"""256 rows of Qwen3-30B-A3B need half of it. With less, rows are preempted and read again, which hides the step."""
NAMES = tuple(field.name for field in fields(Trials) if field.type is bool)


def decode(loaded: LoadedGpuModel, rows: int, turns: int) -> dict[str, Any]:
    """The best of some turns."""
    taken = [measure_decode(loaded.engine, loaded.prompts(rows), OUTPUT_TOKENS) for _ in range(turns)]
    best = max(taken, key=lambda measured: measured.tokens_per_second)
    return {
        "rows": rows,
        "tokens_per_second": best.tokens_per_second,
        "every_turn": [measured.tokens_per_second for measured in taken],
        "step_ms": 1e3 * best.step,
        "fastest_step_ms": 1e3 * best.fastest_step,
    }


def prefill(loaded: LoadedGpuModel, tokens: int, turns: int, pause: float = 0.0) -> dict[str, Any]:
    """Prompts alone, after a first one that compiles. pause: seconds before each."""
    measured = measure_prefill(loaded.engine, loaded.prompts(turns + 1, tokens), pause)
    return {"tokens": tokens, "tokens_per_second": tokens / measured.fastest, "median_ms": 1e3 * measured.seconds}


def main() -> None:
    parser = gpu_command_line(__doc__, rows="1,4,16,64")
    parser.add_argument("--prefill", type=integers, default="512,2048,8192", help="tokens of prompts that run alone")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds before each of them, in which the GPU rests")
    parser.add_argument("--trials", default=",".join(NAMES), help="one after the other")
    parser.add_argument("--turns", type=int, default=3, help="of each point; the best counts")
    parser.add_argument("--traced", type=integers, default="1,64", help="rows of steps that are traced")
    parser.add_argument("--expert-gib", type=int, default=20, help="GPU memory for experts")
    parser.add_argument("--rules", help="as of a worker")
    parser.add_argument("--name", default="trials", help="of the file of results")
    arguments = parser.parse_args()
    experts = {"gpu_expert_memory_bytes": arguments.expert_gib * GIB}
    loaded = LoadedGpuModel(arguments.model, max(arguments.rows), CACHE_BYTES, rules=arguments.rules, **experts)
    result: dict[str, Any] = {"format": 1, "model": arguments.model, "rules": arguments.rules or "default"}
    result["environment"] = environment()
    result |= {"prompt_tokens": PROMPT_TOKENS, "output_tokens": OUTPUT_TOKENS, "runs": []}
    known: dict[int, dict[str, list[int]]] = {}
    for name in ("", *(name for name in arguments.trials.split(",") if name), ""):
        changed = {part: not getattr(Trials(), part) for part in name.split("+") if part}
        loaded.rebuild(Trials(**changed), **experts)
        run: dict[str, Any] = {"trial": name or "none", "decode": [], "prefill": [], "traced": []}
        result["runs"].append(run)
        for rows in arguments.rows:
            found = answers(loaded, rows, "ahead", {})
            figure = {**decode(loaded, rows, arguments.turns), "same_tokens": known.setdefault(rows, found) == found}
            run["decode"].append(figure)
            sys.stderr.write(f"{run['trial']}: {figure}\n")
        for tokens in arguments.prefill:
            figure = prefill(loaded, tokens, arguments.turns, arguments.pause)
            run["prefill"].append(figure)
            sys.stderr.write(f"{run['trial']}: {figure}\n")
        for rows in arguments.traced:
            figure = trace(loaded, rows)
            run["traced"].append(figure)
            sys.stderr.write(f"{run['trial']}: {figure}\n")
        write(arguments.results / f"{arguments.name}.json", result)  # an interrupted run leaves what it has
    loaded.engine.close()


if __name__ == "__main__":
    main()
