"""Compares when decode steps are launched: `python -m benchmarks.gpu.launches [--model M] [--results DIR]`.

All experts are on the GPU, where a step is short. The next step is launched before the tokens of a step are read
(ahead), after that (early), or by the caller (late), in turns in one process. Each way must give the same tokens.
"""

from typing import Any

from benchmarks.gpu.loaded_gpu_model import GIB, PROMPT_TOKENS, LoadedGpuModel, gpu_command_line
from benchmarks.gpu.profile import measure as trace
from benchmarks.results import GrowingResult
from ktqueue.bench.engine import LAUNCHES, measure_decode, start, step
from ktqueue.bench.environment import environment

OUTPUT_TOKENS = 96
SAMPLINGS: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": {"temperature": 0.8, "top_k": 20, "top_p": 0.95}}


def answers(loaded: LoadedGpuModel, rows: int, launch: str, sampling: dict[str, Any]) -> dict[str, list[int]]:
    """The tokens of each request."""
    found: dict[str, list[int]] = {str(row): [] for row in range(rows)}
    start(loaded.engine, loaded.prompts(rows), OUTPUT_TOKENS, sampling)  # these first tokens follow from the prompts
    while loaded.engine.has_work:
        for output in step(loaded.engine, launch):
            found[output.request_id] += output.token_ids
    return found


def main() -> None:
    parser = gpu_command_line(__doc__, rows="1,4,16,64")
    parser.add_argument("--turns", type=int, default=3, help="of all ways; the best turn counts")
    parser.add_argument("--expert-gib", type=int, default=20, help="GPU memory for experts")
    arguments = parser.parse_args()
    loaded = LoadedGpuModel(
        arguments.model, max(arguments.rows), 4 * GIB, gpu_expert_memory_bytes=arguments.expert_gib * GIB
    )
    result = GrowingResult(
        arguments.results / "launches.json",
        model=arguments.model,
        environment=environment(),
        prompt_tokens=PROMPT_TOKENS,
        output_tokens=OUTPUT_TOKENS,
    )
    for name, sampling in SAMPLINGS.items():
        for rows in arguments.rows:
            known = answers(loaded, rows, "late", sampling)
            same = {launch: answers(loaded, rows, launch, sampling) == known for launch in LAUNCHES}
            turns = [
                (launch, measure_decode(loaded.engine, loaded.prompts(rows), OUTPUT_TOKENS, launch=launch, **sampling))
                for _ in range(arguments.turns)
                for launch in LAUNCHES
            ]
            for launch in LAUNCHES:
                taken = [measured for way, measured in turns if way == launch]
                best = max(taken, key=lambda measured: measured.tokens_per_second)
                result.add(
                    {
                        "rows": rows, "sampling": name, "launch": launch, "same_tokens": same[launch],
                        "tokens_per_second": best.tokens_per_second,
                        "every_turn": [measured.tokens_per_second for measured in taken],
                        "step_ms": 1e3 * best.step, "fastest_step_ms": 1e3 * best.fastest_step,
                        "parts_ms": {part: 1e3 * seconds for part, seconds in best.parts.items()},
                    },
                    "decode",
                )  # fmt: skip
    for rows in arguments.rows:
        for launch in ("late", "ahead"):
            result.add({"launch": launch, **trace(loaded, rows, launch)}, "traced")
    loaded.engine.close()


if __name__ == "__main__":
    main()
