"""What drafts gain on a GPU where a text repeats itself: `python -m benchmarks.gpu.drafts [--model M] [--results DIR]`.

The engine is built again and again, without drafts and with them. Steps without drafts are launched ahead in both. The
text is that of `benchmarks.engine.drafts`, and its answers must be equal. With `--expert-gib 0` all experts are on the
CPU.
"""

import sys
from typing import Any

from benchmarks.engine.drafts import ReplacedText, measure
from benchmarks.gpu.loaded_gpu_model import GIB, LoadedGpuModel, gpu_command_line
from benchmarks.results import write
from ktqueue.bench.environment import environment

WAYS = ("off", "lookup")


def main() -> None:
    """Run the command line."""
    parser = gpu_command_line(__doc__, rows="1,2,4,8")
    parser.add_argument("--repeated", default="1,0.9,0.5,0", help="parts of the tokens that repeat earlier ones")
    parser.add_argument("--tokens", type=int, default=200, help="of each answer")
    parser.add_argument("--turns", type=int, default=2, help="of both ways; the best turn counts")
    parser.add_argument("--expert-gib", type=int, default=20, help="GPU memory for experts")
    arguments = parser.parse_args()
    memory = {"gpu_expert_memory_bytes": arguments.expert_gib * GIB}
    loaded = LoadedGpuModel(arguments.model, max(arguments.rows), 4 * GIB, **memory)
    text = ReplacedText(loaded.decoder, max(arguments.rows), "cuda")
    result: dict[str, Any] = {"format": 1, "model": arguments.model, "environment": environment(), **memory}
    result |= {"output_tokens": arguments.tokens, "decode": []}
    parts = [float(part) for part in arguments.repeated.split(",")]
    taken: dict[tuple[float, int, str], list[dict[str, float]]] = {}
    known: dict[tuple[float, int], Any] = {}
    for turn in range(arguments.turns):
        for way in WAYS:
            loaded.rebuild(speculation=way)
            for repeated in parts:
                text.write(repeated)
                for rows in arguments.rows:
                    before = loaded.engine.stats()
                    (speed,), answers = measure([loaded.engine], text, rows, arguments.tokens)
                    made = loaded.engine.stats().since(before)
                    if known.setdefault((repeated, rows), answers) != answers:
                        raise SystemExit("drafts changed an answer")
                    figure = {
                        "tokens_per_second": speed, "steps": made.steps, "steps_ahead": made.steps_ahead,
                        "drafted": made.drafted_tokens, "accepted": made.accepted_tokens,
                    }  # fmt: skip
                    sys.stderr.write(f"turn {turn}, {way}, {repeated:.0%} repeated, {rows} rows: {figure}\n")
                    taken.setdefault((repeated, rows, way), []).append(figure)
        result["decode"] = [
            {
                "repeated": repeated, "rows": rows, "speculation": way,
                **max(figures, key=lambda figure: figure["tokens_per_second"]),
                "every_turn": [figure["tokens_per_second"] for figure in figures],
            }
            for (repeated, rows, way), figures in taken.items()
        ]  # fmt: skip
        write(arguments.results / "drafts.json", result)  # an interrupted run leaves what it has
    loaded.engine.close()


if __name__ == "__main__":
    main()
